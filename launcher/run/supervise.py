"""A run supervised until it ends: messages to the screen, peers of a failed node stopped, the outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from launcher.errors import LauncherError
from launcher.model.container import ContainerState
from launcher.node.engine import Engine
from launcher.node.parallel import in_background, run_all_settled
from launcher.records.store import NodeOfRun, Record
from launcher.run.finish import Outcome, conclude
from launcher.run.follow import Follow
from launcher.run.messages import Message, NodeBack, NodeEnded, NodeGone, NodeLost, NodeRestarted
from launcher.run.state import HANG_CODE

# A rank that fails takes its peers down within a second or two: torchrun and the communication library see to that.
# Those that still run after PEER_TIMEOUT are stopped, SIGKILL after GRACE: 15 s in all.
PEER_TIMEOUT = 3.0
GRACE = 10.0
STACKS = 1.0  # seconds for ranks that hang to say where they stand


class Supervisor:
    """Supervises one run. Interrupting `supervise` leaves the run alone; calling it again goes on without a loss."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        record: Record,
        nodes: Sequence[NodeOfRun],
        follow: Follow,
        show: Callable[[Message], None],
    ) -> None:
        self._engines = engines
        self._record = record
        self._nodes = nodes
        self._follow = follow
        self._show = show
        self._states: dict[str, ContainerState] = {}
        self._gone: dict[str, str] = {}
        self._stopping: Callable[[], None] | None = None
        self._all_ended = threading.Event()

    def supervise(self) -> Outcome:
        """Until every container has ended."""
        for message in self._follow.messages():
            self._note(message)
            self._show(message)
        if self._stopping is not None:
            self._stopping()
        lost = {name: str(error) for name, error in self._follow.not_brought.items()} | self._gone
        return conclude(self._engines, self._record, self._nodes, self._states, lost)

    def _note(self, message: Message) -> None:
        if isinstance(message, NodeEnded):
            self._states[message.node] = message.state
            state = message.state
            self._record.event("node ended", node=message.node, exit_code=state.exit_code, oom_killed=state.oom_killed)
            if state.exit_code != 0 and self._stopping is None:
                self._stopping = in_background(self._stop_peers)
        elif isinstance(message, NodeGone):
            self._gone[message.node] = message.reason
            self._record.event("node gone", node=message.node, reason=message.reason)
        elif isinstance(message, NodeRestarted):
            self._record.event("node restarted", node=message.node, restarts=message.restarts, why=message.why)
        elif isinstance(message, (NodeLost, NodeBack)):
            self._record.event("node lost" if isinstance(message, NodeLost) else "node back", node=message.node)
        if len(self._states) + len(self._gone) >= len(self._nodes):
            self._all_ended.set()

    def _stop_peers(self) -> None:
        """Peers that have not ended by themselves. A stop ends a restart policy: only once restarts are used up."""
        if not self._all_ended.wait(PEER_TIMEOUT):
            left = [node for node in self._nodes if node.name not in self._states]
            run_all_settled([partial(self._stop_one, node) for node in left])

    def _stop_one(self, node: NodeOfRun) -> None:
        engine = self._engines[node.name]
        try:
            if any(state.exit_code == HANG_CODE for state in self._states.values()):
                # Others ended when the master did, which they waited for: the one that still runs is the one that all
                # of them waited for.
                engine.signal(node.container, "QUIT")
                self._all_ended.wait(STACKS)
            engine.stop(node.container, GRACE)
            self._record.event("peer stopped", node=node.name)
        except LauncherError as error:
            self._record.event("peer not stopped", node=node.name, reason=str(error))
