"""A run supervised until it ends: messages to the screen, peers of a failed node stopped, the outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from launcher.errors import LauncherError
from launcher.model.container import ContainerState
from launcher.node.parallel import in_background, run_all_settled
from launcher.records.store import NodeOfRun
from launcher.run.finish import Outcome, conclude
from launcher.run.follow import Follow, Followed
from launcher.run.locate import Attached
from launcher.run.messages import Message, NodeBack, NodeEnded, NodeGone, NodeLost, NodeRestarted
from launcher.run.state import HANG_CODE

# A rank that fails takes its peers down within a second or two: torchrun and the communication library see to that.
# Those that still run after PEER_TIMEOUT are stopped, SIGKILL after GRACE: 15 s in all.
PEER_TIMEOUT = 3.0
GRACE = 10.0
STACKS = 1.0  # seconds for ranks that hang to print where they stand


def supervise(
    attached: Attached, shown: Sequence[Followed], show: Callable[[Message], None], *, resumed: bool
) -> Outcome:
    """Follow a run until every container has ended. Interrupting this leaves the run alone."""
    following = Follow(attached, shown, resumed=resumed)
    run = _Supervised(attached)
    try:
        for message in following.messages():
            run.note(message)
            show(message)
        run.finish_stopping()
    finally:
        following.close()
    lost = {name: str(error) for name, error in following.not_collected.items()} | run.gone
    return conclude(attached, run.states, lost)


class _Supervised:
    """What is known of a run's nodes; the first failure makes it stop their peers."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._event = attached.record.event
        self.states: dict[str, ContainerState] = {}
        self.gone: dict[str, str] = {}
        self.finish_stopping: Callable[[], None] = lambda: None
        self._failed = False
        self._all_ended = threading.Event()

    def note(self, message: Message) -> None:
        if isinstance(message, NodeEnded):
            state = self.states[message.node] = message.state
            self._event("node ended", node=message.node, exit_code=state.exit_code, oom_killed=state.oom_killed)
            if state.exit_code != 0 and not self._failed:
                self._failed = True
                self.finish_stopping = in_background(self._stop_peers)
        elif isinstance(message, NodeGone):
            self.gone[message.node] = message.reason
            self._event("node gone", node=message.node, reason=message.reason)
        elif isinstance(message, NodeRestarted):
            self._event("node restarted", node=message.node, restarts=message.restarts, why=message.why)
        elif isinstance(message, (NodeLost, NodeBack)):
            self._event("node lost" if isinstance(message, NodeLost) else "node back", node=message.node)
        if len(self.states) + len(self.gone) >= len(self._attached.nodes):
            self._all_ended.set()

    def _stop_peers(self) -> None:
        """Peers that have not ended by themselves. A stop ends a restart policy: only once restarts are used up."""
        if not self._all_ended.wait(PEER_TIMEOUT):
            left = [node for node in self._attached.nodes if node.name not in self.states]
            run_all_settled([partial(self._stop_peer, node) for node in left])

    def _stop_peer(self, node: NodeOfRun) -> None:
        engine = self._attached.engines[node.name]
        try:
            if any(state.exit_code == HANG_CODE for state in self.states.values()):
                # The other nodes ended when the master did: a rank here is the one that all of them waited for.
                engine.signal(node.container, "QUIT")
                self._all_ended.wait(STACKS)
            engine.stop(node.container, GRACE)
            self._event("peer stopped", node=node.name)
        except LauncherError as error:
            self._event("peer not stopped", node=node.name, reason=str(error))
