"""How the nodes of a run agree on who takes part, without a master: pure functions of what one node knows.

Every node tells all others its State again and again; there is no other message. From its own state, the last that it
has heard of each other and the time, `decide` makes its next state. A world is a generation: a number, its members in
the order of the job's nodes, and the member that proposed it. It begins when every member has promised, on its disk,
to take part in that one; a node promises rising numbers only, and takes part in one generation at a time. As more than
half of all nodes must take part, any two generations share a node, so an older one can neither begin nor take a step
once a newer one has begun, wherever its members are and whenever they wake up.

A node also tells because of whom the last generations ended (ends.py): one that has cost too many sits out while enough
others are there, and a program that fails again and again in the same way is not started any more.

Python 3.7 without packages: it runs in the containers. tests/unit/test_meeting_model.py explores it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Iterable, Mapping  # noqa: UP035 - 3.7 evaluates the aliases below

if TYPE_CHECKING or __package__:
    from launcher.container_scripts.ends import REPEATS, End, history, read, repeated, sitting_out
else:
    from ends import REPEATS, End, history, read, repeated, sitting_out  # beside this file

IDLE, PROPOSING, PROMISED, RUNNING, DONE, ENDED = "idle", "proposing", "promised", "running", "done", "ended"
MEETING = (IDLE, PROPOSING, PROMISED)
FIRST_TIME = 4  # how many times lost_after the first start waits for nodes that have not come
QUORUM_TIME = 20  # how many times lost_after a node waits for enough others before it gives up


@dataclass(frozen=True)
class Rules:
    """What the job says. order: its nodes, then its spares; size: how many take part, least: at the least."""

    order: tuple[str, ...]
    size: int
    least: int
    lost_after: float

    @property
    def fresh(self) -> float:
        """Seconds within which a node must have been heard to be asked to take part."""
        return self.lost_after / 3


@dataclass(frozen=True)
class State:
    """What a node tells the others. The disk keeps life, generation, by, joined and ends."""

    node: str
    life: int = 0  # counts its starts
    beat: int = 0  # counts what it has told in this life
    phase: str = IDLE
    generation: int = 0  # the newest that it has promised to take part in
    by: str = ""  # who proposed that one
    members: tuple[str, ...] = ()
    joined: int = 0  # the newest that it has taken part in
    hears: tuple[str, ...] = ()
    port: int = 0  # of the first member's store, once that runs
    reason: str = ""  # why it has ended
    last: bool = False  # and will not start again
    over: bool = False  # nor should any other node
    ends: tuple[End, ...] = ()  # of the last generations, oldest first
    # of this node alone
    since: float = 0.0  # when the phase began, or the nodes that could take part changed
    hopeful: float = 0.0  # when enough nodes were last heard
    looked: float = 0.0  # when it last decided


@dataclass(frozen=True)
class Heard:
    """The last that a node has told, and when it was heard."""

    state: State
    when: float


View = Mapping[str, Heard]


def newer(known: State, told: State) -> bool:
    """Whether `told` is later than `known`: messages may overtake one another."""
    return (told.life, told.beat) > (known.life, known.beat)


def hears(rules: Rules, view: View, now: float) -> tuple[str, ...]:
    """The nodes that have been heard lately."""
    return tuple(name for name in rules.order if name in view and now - view[name].when <= rules.fresh)


def decide(rules: Rules, me: State, view: View, now: float) -> State:
    """This node's next state. RUNNING begins a generation, ENDED ends this life for the reason given."""
    stood_still = now - me.looked > rules.fresh
    me = replace(me, hears=hears(rules, view, now), looked=now)
    if me.phase == RUNNING:
        return _watch(rules, me, view, now, stood_still=stood_still)
    if me.phase in (DONE, ENDED):
        return me
    alive = {name: view[name].state for name in me.hears if me.node in view[name].state.hears}
    for other in alive.values():
        if other.phase == DONE:
            failed = "the ranks of the other nodes have finished, those of this node failed"
            return _end(me, now, failed if me.joined == other.generation else "", last=True)
        if other.phase == RUNNING and _promised(me, other) and me.joined < me.generation:
            return _run(replace(me, members=other.members), now)
    for other in alive.values():
        if other.phase == ENDED and other.over:
            return _end(replace(me, over=True), now, other.reason, last=True)
    return _meet(rules, me, alive, now)


def may_leave(rules: Rules, view: View, now: float) -> bool:
    """Whether a node that is done need not stay to tell the others so."""
    return all(view[name].state.phase in (DONE, ENDED) for name in hears(rules, view, now))


def program_failed(me: State, view: View, now: float, reason: str, error: str) -> State:
    """The state of a node whose program has failed. error: its own, "" where it only lost its peers.

    Where another member has ended the generation before, the program here has failed because of that.
    """
    accounts = (_account(view[name].state, me.joined) for name in me.members if name in view)
    own = End(me.joined, (me.node,) if error else (), error)
    return _end(_with(me, next((end for end in accounts if end and end.nodes), own)), now, reason)


def reached(me: State, step: int) -> State:
    """With the last step that this node's metrics have."""
    return replace(me, ends=tuple(replace(e, step=step) if e.generation == me.joined else e for e in me.ends))


def _watch(rules: Rules, me: State, view: View, now: float, *, stood_still: bool) -> State:
    """While it takes part: the first reason why this generation cannot go on."""
    for name in me.members:
        if name == me.node:
            continue
        last = view.get(name)
        silent = now - max(last.when if last else me.since, me.since)
        if last and last.state.phase == DONE and last.state.generation == me.generation:
            continue
        if silent > rules.lost_after:
            lost = End(me.generation, (me.node if stood_still else name,))
            return _end(_with(me, lost), now, f"{name} has not been heard for {rules.lost_after:g} s")
        reason = _gone(rules, me, last.state, now) if last else ""
        if last and reason:
            end = _account(last.state, me.generation) or End(me.generation, (name,))
            return _end(_with(me, end), now, f"{name} has {reason}")
    return me


def _gone(rules: Rules, me: State, other: State, now: float) -> str:
    """What another member has done instead of taking part in this node's generation."""
    if other.generation > me.generation:
        return f"left for generation {other.generation}"
    if other.joined >= me.generation and other.phase != RUNNING:
        return "ended it" if other.phase == ENDED else "started again"
    if now - me.since > rules.lost_after and other.generation < me.generation:
        return "forgotten its promise"
    return ""


def _account(state: State, generation: int) -> End | None:
    return next((end for end in state.ends if end.generation == generation), None)


def _with(me: State, end: End) -> State:
    return replace(me, ends=(*(e for e in me.ends if e.generation != end.generation), end))


def _meet(rules: Rules, me: State, alive: Mapping[str, State], now: float) -> State:
    place = rules.order.index
    proposals = [
        other
        for other in alive.values()
        if other.phase == PROPOSING and me.node in other.members and other.generation > me.generation
    ]
    if proposals:
        first = min(proposals, key=lambda other: place(other.node))
        if me.phase == IDLE or place(first.node) <= place(me.by):
            promise = replace(me, generation=first.generation, by=first.node, members=first.members, ends=first.ends)
            return _enter(promise, PROMISED, now)
    if me.phase == PROPOSING and all(_promised(me, alive.get(name)) for name in me.members if name != me.node):
        return _run(me, now)
    if me.phase != IDLE:
        return _enter(me, IDLE, now) if now - me.since > rules.lost_after else me
    return _gather(rules, me, alive, now)


def _gather(rules: Rules, me: State, alive: Mapping[str, State], now: float) -> State:
    """While idle: waits for more nodes, for another one's proposal, or for enough of them, and then proposes."""
    if any(other.phase == RUNNING for other in alive.values()):
        return replace(me, since=now, hopeful=now)  # it is needed when that generation ends
    free = {name: other for name, other in alive.items() if other.phase in MEETING}
    free[me.node] = me
    highest = max(other.generation for other in free.values())
    ends = history((other.joined, other.ends) for other in free.values())
    out = sitting_out(ends)
    for name in out:
        rest = {other: state for other, state in free.items() if other != name}
        if name in free and len(_largest(rules, rest)) >= rules.least:
            free = rest
    if me.node not in free:
        return replace(me, members=(), since=now, hopeful=now)
    members = _members(rules, me.node, free)
    if members != me.members:
        me = replace(me, members=members, since=now)
    if len(members) < rules.least:
        if now - me.hopeful > QUORUM_TIME * rules.lost_after:
            heard = ", ".join(members)
            return _end(me, now, f"only {heard} of at least {rules.least} nodes can be reached from here", last=True)
        return me
    patience = rules.fresh if highest else FIRST_TIME * rules.lost_after
    needed = any(name in out for name in members)
    if needed:  # there are too few others, but more may come back
        patience = rules.lost_after
    before = sum(rules.order.index(name) < rules.order.index(me.node) for name in free)
    waited = 0.0 if members == rules.order[: rules.size] and not needed else patience
    me = replace(me, hopeful=now)
    if now - me.since < waited + before * rules.lost_after:
        return me
    again = _again(rules, ends, free)
    if again:
        return _end(replace(me, over=True), now, again, last=True)
    return _enter(replace(me, generation=highest + 1, by=me.node, members=members, ends=ends), PROPOSING, now)


def _again(rules: Rules, ends: tuple[End, ...], free: Mapping[str, State]) -> str:
    """Why another generation would end as the last ones did; "" where it may go better."""
    error, nodes = repeated(ends)
    others = {name: other for name, other in free.items() if name not in nodes}
    if not error or (len(nodes) == 1 and len(_largest(rules, others)) >= rules.least):
        return ""
    where = ", ".join(name for name in rules.order if name in nodes)
    return f"{REPEATS} generations in a row ended with the same error, on {where}: {error}"


def _members(rules: Rules, me: str, free: Mapping[str, State]) -> tuple[str, ...]:
    """The largest group of nodes that hear one another and this one, early ones first; at most `size`."""
    largest = _largest(rules, {name: other for name, other in free.items() if name != me})
    ordered = [name for name in rules.order if name in largest or name == me]
    while len(ordered) > rules.size:  # this node must be among them, as it proposes
        ordered.remove(ordered[-1] if ordered[-1] != me else ordered[-2])
    return tuple(ordered)


def _largest(rules: Rules, free: Mapping[str, State]) -> list[str]:
    """The largest group of these nodes that hear one another, early ones first."""
    names = [name for name in rules.order if name in free]

    def group(start: Iterable[str]) -> list[str]:
        chosen: list[str] = []
        for name in [*start, *names]:
            if name not in chosen and all(_mutual(free[name], free[other]) for other in chosen):
                chosen.append(name)
        return chosen

    return max([group([]), *(group([name]) for name in names)], key=len)


def _mutual(one: State, other: State) -> bool:
    return one.node in other.hears and other.node in one.hears


def _promised(me: State, other: State | None) -> bool:
    """Whether that node's newest promise is this node's."""
    return other is not None and (other.generation, other.by) == (me.generation, me.by)


def _run(me: State, now: float) -> State:
    return _enter(replace(me, joined=me.generation), RUNNING, now)


def _end(me: State, now: float, reason: str, *, last: bool = False) -> State:
    return _enter(replace(me, reason=reason, last=last), ENDED, now)


def _enter(me: State, phase: str, now: float) -> State:
    return replace(me, phase=phase, since=now)


def begin(node: str, kept: Mapping[str, Any], now: float) -> State:
    """The state of a node that starts, or starts again. kept: what its disk has of its last life, if anything."""
    known = {name: kept[name] for name in ("generation", "by", "joined") if name in kept}
    me = State(node, life=kept.get("life", 0) + 1, since=now, hopeful=now, looked=now, **known)
    me = replace(me, ends=read(kept.get("ends", ())))
    if me.joined and not _account(me, me.joined):  # it was killed before it could write one
        me = _with(me, End(me.joined, (node,)))
    return me


def told(me: State) -> State:
    """What of its state is news to others when it changes."""
    return replace(me, beat=0, since=0.0, hopeful=0.0, looked=0.0)


def keep(me: State) -> dict[str, Any]:
    """What must be on the disk before anything of this state is told."""
    kept = {"life": me.life, "generation": me.generation, "by": me.by, "joined": me.joined}
    return {**kept, "ends": [vars(end) for end in me.ends]}
