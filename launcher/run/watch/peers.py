"""When a run is decided, and which of its nodes are then stopped: pure functions of the messages about its nodes.

`supervise` executes the actions. A run is decided if it has failed (a node failed and the others cannot go on), has
finished (on a node of a job with min_nodes), or is being stopped by a user.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher.model.container import ContainerState
from launcher.run.end.evidence import Evidence, collective_failed
from launcher.run.state import HANG_CODE
from launcher.run.watch import messages
from launcher.run.watch.messages import Message

# After a rank has failed, torchrun and the communication library usually stop its peers within two seconds. Peers that
# still run after PEER_TIMEOUT are stopped.
PEER_TIMEOUT = 3.0
DONE_TIMEOUT = 10.0  # for the nodes of a finished run, while they notify each other


@dataclass(frozen=True)
class Supervised:
    """What is known about the nodes of a run.

    nodes: those that are followed. away: number of those that were unreachable when following began. may_lose: number
    of nodes that the run can lose. ended, missing: by node. given_up: the nodes do not restart the program.
    stopped_by: the first user who stopped the run. budget: it has reached its budget, and its nodes end, with whatever
    exit code. stopping: a StopPeers was returned, and no node came back since.
    """

    nodes: tuple[str, ...]
    away: int = 0
    may_lose: int = 0
    ended: Mapping[str, ContainerState] = field(default_factory=dict)
    missing: Mapping[str, messages.NodeGone | messages.NodeRemoved] = field(default_factory=dict)
    given_up: bool = False
    stopped_by: str | None = None
    budget: bool = False
    stopping: bool = False

    @property
    def failed(self) -> bool:
        exited = 0 if self.budget else sum(state.exit_code != 0 for state in self.ended.values())
        badly = self.away + len(self.missing) + exited
        return self.given_up or badly > self.may_lose

    @property
    def done(self) -> bool:
        """Whether a job with min_nodes has finished on a node, which then notifies the other reachable nodes."""
        return self.may_lose > 0 and any(state.exit_code == 0 for state in self.ended.values())

    @property
    def decided(self) -> bool:
        """Whether the outcome no longer depends on nodes that do not answer."""
        return self.failed or self.done or self.stopped_by is not None

    @property
    def all_ended(self) -> bool:
        return len(self.ended) + len(self.missing) >= len(self.nodes)


@dataclass(frozen=True)
class StopPeers:
    """Stop the nodes that still run `after` seconds from now (see `to_stop`)."""

    after: float


def reduce(known: Supervised, message: Message) -> tuple[Supervised, StopPeers | None]:
    """Return what is known after a message, and what to do."""
    if isinstance(message, messages.NodeEnded):
        known = replace(known, ended={**known.ended, message.node: message.state})
    elif isinstance(message, (messages.NodeGone, messages.NodeRemoved)):
        known = replace(known, missing={**known.missing, message.node: message})
    elif isinstance(message, messages.NodeStopped):
        known = replace(known, stopped_by=known.stopped_by or message.by)
    elif isinstance(message, messages.NodeBudget):
        known = replace(known, budget=True)
    elif isinstance(message, messages.NodeOver):
        known = replace(known, given_up=True)
    elif isinstance(message, messages.NodeBack):
        known = replace(known, stopping=False)  # if it was unreachable when the run failed, it must still be stopped
    if known.stopping or not (known.failed or known.done):
        return known, None
    return replace(known, stopping=True), StopPeers(PEER_TIMEOUT if known.failed else DONE_TIMEOUT)


def to_stop(known: Supervised, left_out: Collection[str]) -> Sequence[str]:
    """Return the nodes to stop after StopPeers. left_out: nodes that are not part of the newest generation.

    In a finished run, these are only nodes that were away when the others finished. If a user stops the run, or at its
    budget, they are none: all nodes get the time to save a checkpoint.
    """
    if known.all_ended or known.stopped_by is not None or known.budget:
        return ()
    return [node for node in known.nodes if node not in known.ended and (not known.done or node in left_out)]


def first_signal(ended: Sequence[Evidence], *, up_to_date: bool) -> str:
    """Return the signal that peers get before they are stopped, "" for none, for a node that all others may wait for.

    ended: evidence of the nodes that ended. up_to_date: it is complete. QUIT: stacks of all threads; URG: the dump of
    the flight recorder.
    """
    if any(one.state.exit_code == HANG_CODE for one in ended):
        return "QUIT"
    return "URG" if collective_failed(ended) or not up_to_date else ""
