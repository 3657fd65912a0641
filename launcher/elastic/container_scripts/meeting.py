"""How the nodes of a run agree on the members of a generation, without a master: pure functions of one node's view.

Each node repeatedly sends its State to all others; no other messages exist. From its own state, the last state received
from each other node and the time, `decide` computes its next state. A generation has a number, members in the order of
the job's nodes, and the member that proposed it. It starts when every member has promised, on its disk, to join it. A
node promises only increasing numbers and joins one generation at a time. More than half of all nodes must take part, so
any two generations share a node: once a newer generation has started, an older one can neither start nor make progress,
even if its members were disconnected or suspended.

The state also records which nodes ended the last generations (ends.py): a node that ended too many sits out while
enough others remain, and a program that repeatedly fails with the same error is not restarted.

Python 3.7 without packages: it runs in the containers. tests/unit/test_meeting_model.py explores the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Iterable, Mapping  # noqa: UP035 - 3.7 evaluates the aliases below

if TYPE_CHECKING or __package__:
    from launcher.elastic.container_scripts.ends import REPEATS, End, history, read, repeated, sitting_out
else:
    from ends import REPEATS, End, history, read, repeated, sitting_out  # in the same folder

IDLE, PROPOSING, PROMISED, RUNNING, DONE, ENDED = "idle", "proposing", "promised", "running", "done", "ended"
MEETING = (IDLE, PROPOSING, PROMISED)
FIRST_TIME = 4  # multiple of lost_after for which the first start waits for missing nodes
QUORUM_TIME = 20  # multiple of lost_after after which a node gives up waiting for a quorum


@dataclass(frozen=True)
class Rules:
    """Settings of the job. order: its nodes, then its spares; size: number of members; least: minimum number."""

    order: tuple[str, ...]
    size: int
    least: int
    lost_after: float

    @property
    def fresh(self) -> float:
        """Maximum age in seconds of the last message of a node that may become a member."""
        return self.lost_after / 3


@dataclass(frozen=True)
class State:
    """The state that a node sends to the others. life, generation, by, joined and ends are stored on disk."""

    node: str
    life: int = 0  # number of starts
    beat: int = 0  # number of messages since the start
    phase: str = IDLE
    generation: int = 0  # the newest that it has promised to join
    by: str = ""  # the node that proposed it
    members: tuple[str, ...] = ()
    joined: int = 0  # the newest that it has joined
    hears: tuple[str, ...] = ()
    port: int = 0  # port of the first member's store, once it is running
    reason: str = ""  # why it ended
    last: bool = False  # it will not restart
    over: bool = False  # no other node should restart either
    ends: tuple[End, ...] = ()  # of the last generations, oldest first
    # local to this node
    since: float = 0.0  # when the phase started, or the set of possible members changed
    hopeful: float = 0.0  # when enough nodes were last reachable
    looked: float = 0.0  # time of the last call of decide()


@dataclass(frozen=True)
class Heard:
    """The last state received from a node, and the time of its arrival."""

    state: State
    when: float


View = Mapping[str, Heard]


def newer(known: State, received: State) -> bool:
    """Return whether `received` is newer than `known`: messages may arrive out of order."""
    return (received.life, received.beat) > (known.life, known.beat)


def hears(rules: Rules, view: View, now: float) -> tuple[str, ...]:
    """Return the nodes with a recent message."""
    return tuple(name for name in rules.order if name in view and now - view[name].when <= rules.fresh)


def decide(rules: Rules, me: State, view: View, now: float) -> State:
    """Return this node's next state. RUNNING starts a generation; ENDED terminates this node for the given reason."""
    was_suspended = now - me.looked > rules.fresh
    me = replace(me, hears=hears(rules, view, now), looked=now)
    if me.phase == RUNNING:
        return _watch(rules, me, view, now, was_suspended=was_suspended)
    if me.phase in (DONE, ENDED):
        return me
    alive = {name: view[name].state for name in me.hears if me.node in view[name].state.hears}
    for other in alive.values():
        if other.phase == DONE:
            failed = "the ranks of the other nodes finished, but those of this node failed"
            return _end(me, now, failed if me.joined == other.generation else "", last=True)
        if other.phase == RUNNING and _promised(me, other) and me.joined < me.generation:
            # with the proposal's history: a node that restarted after its promise has added its own account
            return _run(replace(me, members=other.members, ends=other.ends), now)
    for other in alive.values():
        if other.phase == ENDED and other.over:
            return _end(replace(me, over=True), now, other.reason, last=True)
    return _meet(rules, me, alive, now)


def may_leave(rules: Rules, view: View, now: float) -> bool:
    """Return whether a finished node may exit because the other nodes know that it has finished."""
    return all(view[name].state.phase in (DONE, ENDED) for name in hears(rules, view, now))


def program_failed(me: State, view: View, now: float, reason: str, error: str) -> State:
    """Return the state after a failure of the program. error: its own error; "" if it only lost its peers.

    If another member ended the generation earlier, that is the cause of the failure.
    """
    accounts = (_account(view[name].state, me.joined) for name in me.members if name in view)
    own = End(me.joined, (me.node,) if error else (), error)
    return _end(_with(me, next((end for end in accounts if end and end.nodes), own)), now, reason)


def reached(me: State, step: int) -> State:
    """Return the state with the last step in this node's metrics."""
    return replace(me, ends=tuple(replace(e, step=step) if e.generation == me.joined else e for e in me.ends))


def _watch(rules: Rules, me: State, view: View, now: float, *, was_suspended: bool) -> State:
    """Return the next state of a running member: ENDED as soon as this generation cannot continue."""
    for name in me.members:
        if name == me.node:
            continue
        last = view.get(name)
        silent = now - max(last.when if last else me.since, me.since)
        if last and last.state.phase == DONE and last.state.generation == me.generation:
            continue
        if silent > rules.lost_after:
            lost = End(me.generation, (me.node if was_suspended else name,))
            return _end(_with(me, lost), now, f"no message from {name} for {rules.lost_after:g} s")
        reason = _departure(rules, me, last.state, now) if last else ""
        if last and reason:
            end = _account(last.state, me.generation) or End(me.generation, (name,))
            return _end(_with(me, end), now, f"{name} {reason}")
    return me


def _departure(rules: Rules, me: State, other: State, now: float) -> str:
    """Return why another member no longer takes part in this node's generation; "" if it does."""
    if other.generation > me.generation:
        return f"joined generation {other.generation}"
    if other.joined >= me.generation and other.phase != RUNNING:
        return "ended the generation" if other.phase == ENDED else "restarted"
    if now - me.since > rules.lost_after and other.generation < me.generation:
        return "lost its promise"
    return ""


def _account(state: State, generation: int) -> End | None:
    return next((end for end in state.ends if end.generation == generation), None)


def _with(me: State, end: End) -> State:
    return replace(me, ends=(*(e for e in me.ends if e.generation != end.generation), end))


def _meet(rules: Rules, me: State, alive: Mapping[str, State], now: float) -> State:
    position = rules.order.index
    proposals = [
        other
        for other in alive.values()
        if other.phase == PROPOSING and me.node in other.members and other.generation > me.generation
    ]
    if proposals:
        first = min(proposals, key=lambda other: position(other.node))
        if me.phase == IDLE or position(first.node) <= position(me.by):
            promise = replace(me, generation=first.generation, by=first.node, members=first.members, ends=first.ends)
            return _enter(promise, PROMISED, now)
    if me.phase == PROPOSING and all(_promised(me, alive.get(name)) for name in me.members if name != me.node):
        return _run(me, now)
    if me.phase != IDLE:
        return _enter(me, IDLE, now) if now - me.since > rules.lost_after else me
    return _gather(rules, me, alive, now)


def _gather(rules: Rules, me: State, alive: Mapping[str, State], now: float) -> State:
    """Return the next state while idle: wait for more nodes or for the proposal of another node, then propose."""
    if any(other.phase == RUNNING for other in alive.values()):
        return replace(me, since=now, hopeful=now)  # this node may be needed when that generation ends
    here = {name: other for name, other in alive.items() if other.phase in MEETING}
    here[me.node] = me
    ends = history((other.joined, other.ends) for other in here.values())
    out = sitting_out(ends)
    free = _choose(rules, here, out)
    if me.node not in free:
        return replace(me, members=(), since=now, hopeful=now)
    members = _members(rules, me.node, free)
    if members != me.members:
        me = replace(me, members=members, since=now)
    if len(members) < rules.least:
        return _too_few(rules, me, now)
    me = replace(me, hopeful=now)
    highest = max(other.generation for other in here.values())
    if now - me.since < _my_turn(rules, me, free, out, highest):
        return me
    hopeless = _hopeless(rules, ends, free)
    if hopeless:
        return _end(replace(me, over=True), now, hopeless, last=True)
    return _enter(replace(me, generation=highest + 1, by=me.node, ends=ends), PROPOSING, now)


def _choose(rules: Rules, here: Mapping[str, State], out: Iterable[str]) -> Mapping[str, State]:
    """Return the nodes that may become members: without those that sit out, while enough others remain."""
    for name in out:
        rest = {other: state for other, state in here.items() if other != name}
        if name in here and len(_largest(rules, rest)) >= rules.least:
            here = rest
    return here


def _too_few(rules: Rules, me: State, now: float) -> State:
    """Return the next state without a quorum: after a long time, the node gives up."""
    if now - me.hopeful <= QUORUM_TIME * rules.lost_after:
        return me
    found = ", ".join(me.members)
    what = f"only {found} of at least {rules.least} nodes can be reached from this node"
    return _end(me, now, what, last=True)


def _my_turn(rules: Rules, me: State, free: Mapping[str, State], out: Iterable[str], highest: int) -> float:
    """Return for how many seconds the possible members must be the same before this node may propose them.

    Each node that precedes it may propose first. highest: the newest generation that any of them knows.
    """
    before = sum(rules.order.index(name) < rules.order.index(me.node) for name in free)
    if any(name in out for name in me.members):
        patience = rules.lost_after  # too few other nodes, but more may return
    elif me.members == rules.order[: rules.size]:
        patience = 0.0  # there is nobody to wait for
    else:
        patience = rules.fresh if highest else FIRST_TIME * rules.lost_after
    return patience + before * rules.lost_after


def _hopeless(rules: Rules, ends: tuple[End, ...], free: Mapping[str, State]) -> str:
    """Return why another generation would fail like the last ones; "" if it may succeed."""
    error, nodes = repeated(ends)
    others = {name: other for name, other in free.items() if name not in nodes}
    if not error or (len(nodes) == 1 and len(_largest(rules, others)) >= rules.least):
        return ""
    names = ", ".join(name for name in rules.order if name in nodes)
    return f"{REPEATS} generations in a row ended with the same error, on {names}: {error}"


def _members(rules: Rules, me: str, free: Mapping[str, State]) -> tuple[str, ...]:
    """Return the largest group of mutually reachable nodes including this one, in order; at most `size`."""
    largest = _largest(rules, {name: other for name, other in free.items() if name != me})
    ordered = [name for name in rules.order if name in largest or name == me]
    while len(ordered) > rules.size:  # this node must be among them, as it proposes
        ordered.remove(ordered[-1] if ordered[-1] != me else ordered[-2])
    return tuple(ordered)


def _largest(rules: Rules, free: Mapping[str, State]) -> list[str]:
    """Return the largest group of mutually reachable nodes among these, in order."""
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
    """Return whether that node's newest promise equals this node's."""
    return other is not None and (other.generation, other.by) == (me.generation, me.by)


def _run(me: State, now: float) -> State:
    return _enter(replace(me, joined=me.generation), RUNNING, now)


def _end(me: State, now: float, reason: str, *, last: bool = False) -> State:
    return _enter(replace(me, reason=reason, last=last), ENDED, now)


def _enter(me: State, phase: str, now: float) -> State:
    return replace(me, phase=phase, since=now)


def begin(node: str, kept: Mapping[str, Any], now: float) -> State:
    """Return the state of a node that starts or restarts. kept: its stored state, empty at the first start."""
    known = {name: kept[name] for name in ("generation", "by", "joined") if name in kept}
    me = State(node, life=kept.get("life", 0) + 1, since=now, hopeful=now, looked=now, **known)
    me = replace(me, ends=read(kept.get("ends", ())))
    if me.joined and not _account(me, me.joined):  # it was killed before it could write an account
        me = _with(me, End(me.joined, (node,)))
    return me


def announced(me: State) -> State:
    """Return the part of the state that is sent immediately when it changes."""
    return replace(me, beat=0, since=0.0, hopeful=0.0, looked=0.0)


def keep(me: State) -> dict[str, Any]:
    """Return the part of the state that must be on disk before the state is sent."""
    kept = {"life": me.life, "generation": me.generation, "by": me.by, "joined": me.joined}
    return {**kept, "ends": [vars(end) for end in me.ends]}
