"""Supervise a run until it ends: yield its messages, stop the peers of a failed node, record the outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

from launcher.errors import LauncherError
from launcher.model.container import ContainerState
from launcher.node.parallel import in_background, run_all_settled
from launcher.records.store import NodeOfRun, Record
from launcher.run import messages
from launcher.run.diagnose import Failure
from launcher.run.evidence import collective_failed, gather
from launcher.run.follow import Follow
from launcher.run.followed import Followed
from launcher.run.locate import Attached, Owner
from launcher.run.messages import Message
from launcher.run.outcome import Outcome, conclude, lost_node, uncollected
from launcher.run.state import HANG_CODE

# After a rank has failed, torchrun and the communication library usually stop its peers within two seconds. Peers that
# still run after PEER_TIMEOUT are stopped, with SIGKILL after GRACE: 15 s in total, plus HANG_STACKS after a hang.
PEER_TIMEOUT = 3.0
DONE_TIMEOUT = 10.0  # for the nodes of a finished run, while they notify each other
GRACE = 10.0
STACKS = 1.0  # seconds for waiting ranks to dump their flight recorder
HANG_STACKS = 8.0  # after a hang: entry.sh waits 5 s for the dumps before it requests the stacks


class Supervision:
    """Supervision of one run, by one thread at a time; another thread can continue it.

    reads_only: never stop anything or record an outcome.
    """

    def __init__(
        self, attached: Attached, shown: Sequence[Followed], *, resumed: bool, reads_only: bool = False
    ) -> None:
        """shown: files whose output is reported. resumed: the run was started earlier."""
        self._attached = attached
        self._may_stop = not reads_only and attached.owner is not Owner.OTHER
        self._records = not reads_only
        self._following = Follow(attached, shown, resumed=resumed, brief=reads_only)
        self._messages = iter(self._following)
        self._states: dict[str, ContainerState] = {}
        self._missing: dict[str, Failure] = {}
        self._stopped_by: list[str] = []
        self._over = False  # its nodes do not restart the program
        self._left = False  # closed before the run ended
        self._all_ended = threading.Event()
        self._stopping: Callable[[], None] | None = None

    def messages(self) -> Iterator[Message]:
        """Yield messages until every container has ended and its files were collected.

        Raises the error of a worker thread, or RuntimeError if another thread has closed this object.
        """
        for message in self._messages:
            if self._records:
                _record(self._attached.record, message)
            self._take(message)
            yield message
        if self._left:  # the run has not ended
            raise RuntimeError("no longer connected: the Run was closed while a thread waited for it")
        if self._stopping is not None:
            self._stopping()

    def close(self) -> None:
        """Stop following; the run continues."""
        self._left = True
        self._following.close()

    def conclude(self) -> tuple[Outcome, str]:
        """After the last message: record the outcome in result.json; return it and the error of recording, or ""."""
        self.close()
        not_collected = {name: uncollected(name, error) for name, error in self._following.not_collected.items()}
        missing, by = not_collected | self._missing, next(iter(self._stopped_by), None)
        outcome, record = conclude(self._attached, self._states, missing, by), self._attached.record
        problem = record.finish(outcome.to_dict())
        record.event("ended", state=outcome.state.value, failure=outcome.failure)
        return outcome, problem

    def _take(self, message: Message) -> None:
        """Update the state of the run; stop the other nodes if it has failed or finished."""
        attached, states = self._attached, self._states
        if isinstance(message, messages.NodeEnded):
            states[message.node] = message.state
        elif isinstance(message, (messages.NodeGone, messages.NodeRemoved)):
            self._missing[message.node] = lost_node(message)
        elif isinstance(message, messages.NodeStopped):
            self._stopped_by.append(message.by)
        elif isinstance(message, messages.NodeOver):
            self._over = True
        elif isinstance(message, messages.NodeBack):
            self._stopping = None  # a node that was unreachable when the run failed must still be stopped
        badly = len(attached.unreachable) + len(self._missing) + sum(state.exit_code != 0 for state in states.values())
        failed, done = self._over or badly > attached.may_lose, attached.is_done(states)
        if failed or self._stopped_by or done:
            self._following.over()
        if (failed or done) and self._stopping is None and self._may_stop:
            self._stopping = in_background(partial(self._stop_peers, PEER_TIMEOUT if failed else DONE_TIMEOUT))
        if len(states) + len(self._missing) >= len(attached.nodes):
            self._all_ended.set()

    def _stop_peers(self, timeout: float) -> None:
        """Stop peers that have not exited within the timeout. A stopped container is not restarted by its policy.

        In a finished run, stop only nodes that were away when the others finished. If a user stops the run, do nothing:
        all nodes get the time to save a checkpoint.
        """
        if self._all_ended.wait(timeout) or self._stopped_by:
            return
        attached, states = self._attached, self._states
        away = self._following.left_out() if attached.is_done(states) else None
        left = [node for node in attached.nodes if node.name not in states and (away is None or node.name in away)]
        root = attached.record.paths.root
        ended = [gather(root, node, states[node.name]) for node in attached.nodes if node.name in states]
        hung = any(one.state.exit_code == HANG_CODE for one in ended)
        signal = "QUIT" if hung else "URG" if collective_failed(ended) or not self._following.up_to_date else ""
        run_all_settled([partial(self._stop_peer, node, signal) for node in left])

    def _stop_peer(self, node: NodeOfRun, signal: str) -> None:
        """signal: sent first, as a rank of this node may be the one that all others wait for; "": none."""
        engine, record = self._attached.engines[node.name], self._attached.record
        try:
            if signal:
                engine.signal(node.container, signal)
                self._all_ended.wait(HANG_STACKS if signal == "QUIT" else STACKS)
            engine.stop(node.container, GRACE)
            record.event("peer stopped", node=node.name)
        except LauncherError as error:
            record.event("peer not stopped", node=node.name, reason=str(error))


def _record(record: Record, message: Message) -> None:
    if isinstance(message, messages.NodeEnded):
        state = message.state
        record.event("node ended", node=message.node, exit_code=state.exit_code, oom_killed=state.oom_killed)
    elif not isinstance(message, (messages.Output, messages.Progress, messages.Tick)):
        record.event(type(message).__name__.replace("Node", "node ").lower(), **asdict(message))
