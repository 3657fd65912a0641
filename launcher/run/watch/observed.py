"""What is known of a run that is followed; what there is to say about it, and when its peers are stopped: a pure
function of events.

`follow` calls it: its threads read what is wanted next. `supervise` hands the messages on, and executes the actions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher.errors import LauncherError, NodeUnfit, NodeUnreachable, NoRoomHere
from launcher.local_files import parse_object
from launcher.model.container import ContainerState, Phase
from launcher.model.plan import RunId
from launcher.records.collect import Collected
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun
from launcher.run.state import SIGKILL_CODE
from launcher.run.watch import attempts, messages
from launcher.run.watch.attempts import Generation
from launcher.run.watch.messages import Message
from launcher.run.watch.reader import Appended, ContainerRemoved, EngineLogged, Event, StateSeen, WaitFailed, Wanted

REMOVAL = 1.0  # seconds that `docker rm -f` may take between killing and removing a container
RETRY = 1.0
RETRY_SELDOM = 15.0  # while a node is unreachable
GIVE_UP = 30.0  # seconds to wait for a node that is away, and for files of a node, once the run is decided
COLLECT_EVERY = 5.0
COLLECT_SELDOM = 30.0  # while no file has changed
# After a rank has failed, torchrun and the communication library usually stop its peers within two seconds. Peers that
# still run after PEER_TIMEOUT are stopped.
PEER_TIMEOUT = 3.0
DONE_TIMEOUT = 10.0  # for the nodes of a finished run, while they notify each other
# As elastic.py prints it on each node of a generation
_RANK_ZERO_MOVED = re.compile(rb"^launcher: generation (\d{1,9}): rank 0 is now on ([^\s,]{1,400}), .*\n", re.MULTILINE)


@dataclass(frozen=True)
class StartsKnown(Event):
    """What its attempts file had when following began: its restarts were reported before."""

    data: bytes


@dataclass(frozen=True)
class RestFailed(Event):
    """The rest of its files could not be read from the node."""

    error: LauncherError


@dataclass(frozen=True)
class RestRead(Event):
    """Nothing of its files remains to be read. copies: it was read from those in runs/."""

    copies: bool


@dataclass(frozen=True)
class FilesCollected:
    """Results of collecting, by node. final: these nodes had ended.

    What is known now: gradients: how they travel; apart: that the ranks do not train together.
    """

    results: Mapping[str, Collected | LauncherError]
    final: bool
    gradients: str = ""
    apart: str = ""

    @property
    def new(self) -> bool:
        """Whether any file has changed."""
        return any(isinstance(result, Collected) and result.moved for result in self.results.values())


@dataclass(frozen=True)
class Moment:
    """at: seconds of time.monotonic(). clock: seconds since the epoch."""

    at: float
    clock: float


@dataclass(frozen=True)
class Shown:
    """A file whose content is shown, starting at an offset.

    moves: switch to the log of another node when rank 0 moves there. generation: the newest generation that was shown.
    """

    node: NodeOfRun
    path: str
    offset: int = 0
    moves: bool = False
    generation: Generation | None = None


@dataclass(frozen=True)
class StopPeers:
    """Stop the nodes that still run `after` seconds from now (see `peers_to_stop`)."""

    after: float


@dataclass(frozen=True)
class TellBudget:
    """Tell the nodes that the run has reached its budget."""


Action = StopPeers | TellBudget
End = messages.NodeEnded | messages.NodeGivenUp | messages.NodeRemoved


@dataclass(frozen=True)
class ObservedNode:
    """What is known of one node. Times are those of Moment.at; inf: never.

    Not in parts (connection, log, attempts, collecting): most events change fields of two, and `replace` would nest.

    log: its path; first_byte: of it, to be read. answered: Moment.clock of its last answer. away_since: when it stopped
    answering. failures: requests for its state that failed in a row. killed: its container was killed, and may be about
    to be removed. waits: for what, in a queue. attempts: the end of that file; of it, `reported_starts`, `gave_up`,
    `stopped` and `budget` were reported. end: what was said of the end of its container. rest_read: nothing of its
    files remains to be read. collected: the same of collecting, or it is impossible; `problem`: why, if it did
    not answer. Other errors of collecting are in `missed`.
    """

    of_run: NodeOfRun
    answered: float
    log: str
    first_byte: int = 0  # of the log
    shown: bool = False  # its log
    metrics: str = ""
    attempts: bytes = b""
    reported_starts: int = 1  # the first one is not a restart
    gave_up: bool = False
    stopped: bool = False
    budget: bool = False
    waits: str = ""
    killed: bool = False
    failures: int = 0
    away_since: float = math.inf
    ended_at: float = math.inf
    end: End | None = None
    rest_read: bool = False
    collected: bool = False
    problem: LauncherError | None = None

    @property
    def name(self) -> str:
        return self.of_run.name

    @property
    def away(self) -> bool:
        return self.away_since < math.inf

    @property
    def has_ended(self) -> bool:
        return self.end is not None

    @property
    def generation(self) -> int:
        """The generation in which it takes part, in a job with min_nodes; 0: none."""
        return attempts.current_generation(self.attempts)

    @property
    def debugged(self) -> bool:
        """Whether a rank waits in breakpoint() or is debugged."""
        return not self.has_ended and bool(attempts.waiting(self.attempts))

    def wanted(self) -> Wanted:
        """Return the files to read."""
        first_bytes = {NodePaths(self.of_run.output, self.name).attempts: 0}
        if self.metrics:
            first_bytes[self.metrics] = 0
        if self.shown:
            first_bytes[self.log] = self.first_byte
        return Wanted(first_bytes, self.log if self.shown else "")


@dataclass(frozen=True)
class Observed:
    """What is known of a run and all of its followed nodes.

    elastic: the job has min_nodes. isolates: its runtime isolates paths. unreachable: number of nodes that were so when
    following began. may_lose: number of nodes that the run can lose. moves, generation: the output of rank 0 is shown,
    wherever it is; the newest generation. stopped_by: the first user who stopped the run. decided: since when its
    outcome no longer depends on nodes that are away (Moment.at): it has failed, has finished on a node or is being
    stopped. stopping: a StopPeers was returned, and no node came back since. pause: seconds until files are collected
    again. missed: what could not be collected, each once. gradients, apart: what was said about them.
    """

    run: RunId
    nodes: Mapping[str, ObservedNode]
    elastic: bool
    isolates: bool
    unreachable: int = 0
    may_lose: int = 0
    moves: bool = False
    generation: int = 0
    stopped_by: str | None = None
    decided: float = math.inf
    stopping: bool = False
    pause: float = COLLECT_EVERY
    missed: Mapping[str, str] = field(default_factory=dict)
    gradients: str = ""
    apart: str = ""

    @property
    def states(self) -> Mapping[str, ContainerState]:
        """How the containers ended, by node."""
        return {name: node.end.state for name, node in self.nodes.items() if isinstance(node.end, messages.NodeEnded)}

    @property
    def given_up_or_removed(self) -> Mapping[str, messages.NodeGivenUp | messages.NodeRemoved]:
        """The nodes that were given up or whose container was removed, the first one first."""
        ends = [node.end for node in sorted(self.nodes.values(), key=lambda node: node.ended_at)]
        return {end.node: end for end in ends if isinstance(end, (messages.NodeGivenUp, messages.NodeRemoved))}

    @property
    def all_ended(self) -> bool:
        """Whether nothing more is awaited of any container; their files may still be collected."""
        return all(node.has_ended for node in self.nodes.values())

    @property
    def budget(self) -> bool:
        """Whether the run has reached its budget, and its nodes end, with whatever exit code."""
        return any(node.budget for node in self.nodes.values())

    @property
    def failed(self) -> bool:
        """Whether a node has failed, and the others cannot go on."""
        exited = 0 if self.budget else sum(state.exit_code != 0 for state in self.states.values())
        gave_up = any(node.gave_up for node in self.nodes.values())  # the nodes do not restart the program
        return gave_up or self.unreachable + len(self.given_up_or_removed) + exited > self.may_lose

    @property
    def finished_on_a_node(self) -> bool:
        """Whether a job with min_nodes has finished on a node, which then notifies the other reachable nodes."""
        return self.may_lose > 0 and any(state.exit_code == 0 for state in self.states.values())

    @property
    def collected(self) -> bool:
        return all(node.collected for node in self.nodes.values())

    @property
    def up_to_date(self) -> bool:
        """Whether the files of all ended nodes were collected."""
        return all(node.collected for node in self.nodes.values() if node.has_ended)

    @property
    def not_collected(self) -> Mapping[str, LauncherError]:
        """Nodes whose files could not be collected at the end, with the reason."""
        return {name: node.problem for name, node in self.nodes.items() if node.problem is not None}

    @property
    def nothing_to_read(self) -> bool:
        """Whether there is nothing more to read."""
        return all(node.has_ended and node.rest_read and node.collected for node in self.nodes.values())


def begin(
    run: RunId,
    nodes: Iterable[NodeOfRun],
    shown: Iterable[Shown],
    now: Moment,
    *,
    elastic: bool,
    isolates: bool,
    unreachable: int = 0,
    may_lose: int = 0,
) -> Observed:
    """Return what is known before anything was read. shown: at most one file per node."""
    logs = {each.node.name: each for each in shown}
    generations = [each.generation for each in logs.values() if each.generation]
    found = {}
    for node in nodes:
        own, log = NodePaths(node.output, node.name), logs.get(node.name)
        first = ObservedNode(
            node,
            now.clock,
            log.path if log else own.log,
            log.offset if log else 0,
            shown=log is not None,
            metrics=own.metrics if node.rank == 0 and not elastic else "",
        )
        generation = log.generation if log else None
        if generation is not None and generation.members[0] == node.name:
            first = _with_rank_zero(first, generation)
        found[node.name] = first
    moves, newest = any(each.moves for each in logs.values()), max((each.number for each in generations), default=0)
    return Observed(run, found, elastic, isolates, unreachable, may_lose, moves=moves, generation=newest)


def next_wait(node: ObservedNode, at_most: float) -> tuple[float, float] | None:
    """Return how to wait for its container: seconds of pause, then the limit of the request. None: no longer."""
    if node.has_ended:
        return None
    if node.failures:
        return min(RETRY * 2 ** min(node.failures - 1, 9), RETRY_SELDOM), 0
    return (REMOVAL, 0) if node.killed else (0, at_most)


def to_collect(known: Observed) -> tuple[Sequence[str], bool]:
    """Return the nodes whose files to collect now, and whether these have ended: they are served first."""
    remaining = {name: node for name, node in known.nodes.items() if not node.collected}
    ended = [name for name, node in remaining.items() if node.has_ended]
    return (ended, True) if ended else ([name for name, node in remaining.items() if not node.away], False)


def peers_to_stop(known: Observed) -> Sequence[str]:
    """Return the nodes to stop after StopPeers.

    In a finished run, these are only nodes that were away when the others finished: reachable ones that are not part of
    the newest generation. If a user stops the run, or at its budget, they are none: all nodes get the time to save a
    checkpoint.
    """
    if known.all_ended or known.stopped_by is not None or known.budget:
        return ()
    may_run = [node for node in known.nodes.values() if not isinstance(node.end, messages.NodeEnded)]
    if known.finished_on_a_node:
        newest = max(node.generation for node in known.nodes.values())
        may_run = [node for node in may_run if not node.away and node.generation < newest]
    return [node.name for node in may_run]


def reduce(
    known: Observed, event: Event | FilesCollected, now: Moment
) -> tuple[Observed, Sequence[Message], Sequence[Action]]:
    """Return what is known after an event, the messages about it, and what to do."""
    before = known
    found: Sequence[Message]
    if isinstance(event, FilesCollected):
        known, found = _on_collected(known, event, now)
    elif isinstance(event, Appended):
        known, found = _on_appended(known, event)
    else:
        node, found = _on_event_of_node(known, known.nodes[event.node], event, now)
        known = _with(known, node)
    if isinstance(event, (FilesCollected, WaitFailed)) and known.collected and not before.collected:
        found = [*found, *map(messages.NotCollected, known.missed.values())]
    actions: Sequence[Action] = ()
    if found and known is not before:  # output decides nothing
        known, actions = _decide(known, found, now)
    return known, found, actions


def _decide(known: Observed, found: Sequence[Message], now: Moment) -> tuple[Observed, Sequence[Action]]:
    """Add since when the run is decided; return what is to be done. found: what has just been said."""
    if any(isinstance(message, messages.NodeBack) for message in found):
        known = replace(known, stopping=False)  # if it was unreachable when the run failed, it must still be stopped
    must_stop = known.failed or known.finished_on_a_node
    if known.decided == math.inf and (must_stop or known.stopped_by is not None):
        known = replace(known, decided=now.at)
    actions: list[Action] = [TellBudget() for message in found if isinstance(message, messages.NodeBudget)]
    if must_stop and not known.stopping:
        known = replace(known, stopping=True)
        actions.append(StopPeers(PEER_TIMEOUT if known.failed else DONE_TIMEOUT))
    return known, actions


def _with(known: Observed, *changed: ObservedNode) -> Observed:
    return replace(known, nodes={**known.nodes, **{node.name: node for node in changed}})


NodeAndMessages = tuple[ObservedNode, list[Message]]


def _on_event_of_node(known: Observed, node: ObservedNode, event: Event, now: Moment) -> NodeAndMessages:
    name = node.name
    match event:
        case StateSeen(state=state):
            return _on_state(node, state, now)
        case ContainerRemoved():
            return _with_end(node, messages.NodeRemoved(name, "" if known.isolates else node.of_run.output), now)
        case WaitFailed(error=error):
            return _on_wait_failed(known, node, error, now)
        case RestFailed(error=NodeUnreachable() as error):
            return _went_away(node, error, now)
        case RestRead(copies=copies):
            node = replace(node, rest_read=True)
            return (node, []) if copies else _came_back(node, now)
        case EngineLogged(data=data):
            return node, [messages.Output(name, data)]
        case StartsKnown(data=data):
            return replace(node, reported_starts=max(1, len(attempts.parse(data)))), []
        case _:  # RestFailed otherwise: collecting reports it
            return node, []


def _on_state(node: ObservedNode, state: ContainerState, now: Moment) -> NodeAndMessages:
    if state.exit_code == SIGKILL_CODE and not state.oom_killed and not node.killed:
        return replace(node, killed=True, failures=0), []  # asked again after REMOVAL: it may be about to be removed
    node, found = _came_back(replace(node, killed=False, failures=0), now)
    if node.of_run.rank == 0 and not state.phase.ended and state.error != node.waits:
        queued = bool(state.error) and state.phase is not Phase.RUNNING
        found.append(messages.NodeWaits(node.name, state.error, queued))
        node = replace(node, waits=state.error)
    if state.phase.ended:
        node, end = _with_end(node, messages.NodeEnded(node.name, state), now)
        found += end
    return node, found


def _on_wait_failed(known: Observed, node: ObservedNode, error: LauncherError, now: Moment) -> NodeAndMessages:
    node, found = _went_away(node, error, now)
    if not _hopeless(known, node, now):
        return replace(node, killed=False, failures=node.failures + 1), found
    node, end = _with_end(node, messages.NodeGivenUp(node.name, str(error), node.answered), now)
    return replace(node, collected=True), [*found, *end]  # nothing more can be collected


def _with_end(node: ObservedNode, end: End, now: Moment) -> NodeAndMessages:
    return replace(node, ended_at=now.at, end=end), [end]


def _hopeless(known: Observed, node: ObservedNode, now: Moment) -> bool:
    """Whether to give up a node that is away: the outcome of the run is decided."""
    return now.at - max(known.decided, node.away_since) > GIVE_UP


def _went_away(node: ObservedNode, error: LauncherError, now: Moment) -> NodeAndMessages:
    if node.away:
        return node, []
    return replace(node, away_since=now.at), [messages.NodeAway(node.name, error.what, node.answered)]


def _came_back(node: ObservedNode, now: Moment) -> NodeAndMessages:
    found: list[Message] = [messages.NodeBack(node.name)] if node.away else []
    return replace(node, away_since=math.inf, answered=now.clock), found


def _on_appended(known: Observed, event: Appended) -> tuple[Observed, Sequence[Message]]:
    node = known.nodes[event.node]
    if event.path == node.log:
        data = _without_moves(known, event) if known.moves else event.data
        return known, [messages.Output(event.node, data)] if data else []
    if event.path == NodePaths(node.of_run.output, event.node).attempts:
        return _on_attempts(known, node, event.data)
    return known, [messages.Progress(found) for line in event.data.split(b"\n") if (found := parse_object(line))]


def _without_moves(known: Observed, event: Appended) -> bytes:
    """Return output of the node with rank 0 without the lines that say where rank 0 is next.

    The output of that node begins with the same line, and is shown as soon as its attempts have been read.
    """

    def left(line: re.Match[bytes]) -> bytes:
        other = known.nodes.get(line[2].decode("utf-8", "replace"))
        comes = other is not None and other.name != event.node and not other.away
        return b"" if comes and int(line[1]) > known.generation else line[0]

    return _RANK_ZERO_MOVED.sub(left, event.data)


def _at_breakpoints(run: RunId, name: str, before: bytes, text: bytes) -> list[Message]:
    """Report what is new in a node's attempts file."""
    reported = {(one.rank, one.pid) for one in attempts.waiting(before) if one.waits}
    skipped_before = attempts.skipping(before)
    new = [one for one in attempts.waiting(text) if one.waits and (one.rank, one.pid) not in reported]
    skipped = [each for each in attempts.skipping(text) if each not in skipped_before]
    return [
        *(messages.RankAtBreakpoint(f"{one.sentence(name)}: launcher debug {run} --rank {one.rank}") for one in new),
        *(messages.RankAtBreakpoint(f"rank {rank} on {name} skips breakpoint() in {why}") for rank, why in skipped),
    ]


def _on_attempts(known: Observed, node: ObservedNode, data: bytes) -> tuple[Observed, Sequence[Message]]:
    """Report each start, generation and end in its attempts file once."""
    name, text, found = node.name, (node.attempts + data)[-attempts.LIMIT :], list[Message]()
    tries, generations = attempts.parse(text), attempts.parse_generations(text)
    if not known.elastic:  # an elastic job reports the new generation instead
        restarted = range(node.reported_starts, len(tries))
        found += [messages.NodeRestarted(name, index, tries[index - 1].why()) for index in restarted]
    if not node.shown:
        found += _at_breakpoints(known.run, name, node.attempts, text)
    why = "" if node.gave_up else attempts.give_up_reason(text)
    by = None if node.stopped else attempts.stopped_by(text)
    budget = node.budget or attempts.reached_budget(text)
    found += [messages.NodeBudget(name)] if budget and not node.budget else []
    known = _with(
        known,
        replace(
            node,
            attempts=text,
            reported_starts=max(node.reported_starts, len(tries)),
            gave_up=node.gave_up or bool(why),
            stopped=node.stopped or by is not None,
            budget=budget,
        ),
    )
    for generation in generations:
        if generation.members[0] == name and generation.number > known.generation:
            known = _rank_zero_moved(known, name, generation)
            found.append(messages.RankZeroMoved(name, generation))
    found += [messages.NodeOver(name, why)] if why else []
    if by is not None:
        known = replace(known, stopped_by=known.stopped_by or by)
        found.append(messages.NodeStopped(name, by))
    return known, found


def _rank_zero_moved(known: Observed, name: str, generation: Generation) -> Observed:
    """From now on, show the output of the first node of a newer generation, and its metrics."""
    came = _with_rank_zero(known.nodes[name], generation)
    if known.moves and not came.shown:
        came = replace(came, shown=True, first_byte=max(came.first_byte, generation.offset))
    hidden = [replace(node, shown=False) for node in known.nodes.values() if node.shown] if known.moves else []
    return replace(_with(known, *hidden, came), generation=generation.number)


def _with_rank_zero(node: ObservedNode, generation: Generation) -> ObservedNode:
    folder = NodePaths(node.of_run.output, node.name).in_generation(generation.number, 0)
    return replace(node, metrics=f"{folder}/metrics.jsonl")


def _on_collected(known: Observed, event: FilesCollected, now: Moment) -> tuple[Observed, list[Message]]:
    """Decide of which nodes nothing more is collected, and when to collect again."""
    pause, missed = COLLECT_EVERY if event.new else min(2 * known.pause, COLLECT_SELDOM), dict(known.missed)
    nodes, found = list[ObservedNode](), list[Message]()
    if event.gradients and not known.gradients:
        known = replace(known, gradients=event.gradients)
        found.append(messages.Gradients(event.gradients))
    if event.apart and not known.apart:
        known = replace(known, apart=event.apart)
        found.append(messages.Warned(event.apart))
    for name, result in event.results.items() if event.final else ():
        node = known.nodes[name]
        if isinstance(result, (Collected, NodeUnfit, NoRoomHere)):
            node, said = _came_back(replace(node, problem=None), now)
            again = isinstance(result, NodeUnfit) and now.at - node.ended_at < GIVE_UP
            problems = result.problems if isinstance(result, Collected) else [result]
        else:
            node, said = _went_away(replace(node, problem=result), result, now)
            again, problems = not _hopeless(known, node, now), []
        nodes.append(node if again else replace(node, collected=True))
        found += said
        if again:
            pause = RETRY
            continue
        for problem in problems:  # only once if nodes share a folder or the local disk is full
            missed.setdefault("disk" if isinstance(problem, NoRoomHere) else str(problem), str(problem))
    return replace(_with(known, *nodes), pause=pause, missed=missed), found
