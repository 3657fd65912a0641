"""Supervise a run until it ends: yield its messages, stop the peers of a failed node, record the outcome."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial

from launcher.errors import LauncherError, NodeUnfit
from launcher.extras import warn_on_error
from launcher.node.parallel import Future, in_background, run_all_catching
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, Record
from launcher.run.end.evidence import Evidence, collective_failed, gather
from launcher.run.end.explain import of_cluster
from launcher.run.end.outcome import conclude, given_up_or_removed, uncollected
from launcher.run.end.stop import GRACE as DOWN_GRACE
from launcher.run.locate import Attached, Owner
from launcher.run.result import Outcome
from launcher.run.state import HANG_CODE
from launcher.run.watch import messages
from launcher.run.watch.follow import Follow
from launcher.run.watch.messages import Message
from launcher.run.watch.observed import Action, Shown, StopPeers, peers_to_stop

# Seconds from SIGTERM to SIGKILL of a peer that is stopped. SIGTERM comes PEER_TIMEOUT (`observed`) after the failure,
# and STACKS, or HANG_STACKS after a hang, later if the peer is first asked for its stacks.
PEER_GRACE = 10.0
TELL = 5.0  # seconds after which nodes are told again that the run has reached its budget
STACKS = 1.0  # seconds for waiting ranks to dump their flight recorder
HANG_STACKS = 8.0  # after a hang: entry.sh waits 5 s for the dumps before it requests the stacks


class Supervision:
    """Supervision of one run, by one thread at a time; another thread can continue it.

    reads_only: never stop anything or record an outcome.
    """

    def __init__(self, attached: Attached, shown: Sequence[Shown], *, resumed: bool, reads_only: bool = False) -> None:
        """shown: files whose output is reported. resumed: the run was started earlier."""
        self._attached = attached
        self._may_stop = not reads_only and attached.owner is not Owner.OTHER
        self._records = not reads_only
        if attached.nodes:
            of_cluster(attached.nodes[0].host)  # loaded now, as the launcher may be upgraded meanwhile
        self._following = Follow(attached, shown, resumed=resumed, brief=reads_only)
        self._messages = self._executed()
        self._problems: list[str] = []  # of what does not change the outcome
        self._closed = False
        self._stops: list[Future[None]] = []  # of peers: a second one if a node has come back since the first

    def messages(self) -> Iterator[Message]:
        """Yield messages until every container has ended and its files were collected.

        Raises the error of a worker thread, or RuntimeError if another thread has closed this object.
        """
        for message in self._messages:  # noqa: UP028 - `yield from` would close it where a caller pauses
            yield message
        if self._closed:  # the run has not ended
            raise RuntimeError("no longer connected: the Run was closed while a thread waited for it")
        for stop in self._stops:
            stop()  # wait for it

    @property
    def all_ended(self) -> bool:
        """Whether every container has ended; their files may still be collected."""
        return self._following.known.all_ended

    def close(self) -> None:
        """Stop following; the run continues."""
        self._closed = True
        self._following.close()

    def record_outcome(self) -> tuple[Outcome, str, Sequence[str]]:
        """After the last message: record the outcome in result.json.

        Return it, the error of recording it, or "", and errors that do not change it.
        """
        self.close()
        known, record, problems = self._following.known, self._attached.record, self._problems
        missing = {name: uncollected(name, error) for name, error in known.not_collected.items()}
        missing |= {name: given_up_or_removed(message) for name, message in known.given_up_or_removed.items()}
        outcome = conclude(self._attached, known.states, missing, known.stopped_by, problems.append)
        finish = partial(record.finish, outcome.to_dict())  # returns its error; any other one is a problem
        problem = warn_on_error("result.json was not written", finish, "", problems.append)
        record.event("ended", state=outcome.state.value, failure=outcome.failure)
        return outcome, problem, problems

    def _executed(self) -> Iterator[Message]:
        """Record messages, execute the actions, then yield the messages: while a caller pauses, nothing is stopped."""
        for found, actions in self._following:
            for message in found:
                if self._records:
                    _record(self._attached.record, message)
            for action in actions:
                if self._may_stop:
                    self._execute(action)
            yield from found

    def _execute(self, action: Action) -> None:
        if isinstance(action, StopPeers):
            what, act = "peers were not stopped", partial(self._stop_peers, action.after)
            self._stops.append(in_background(partial(warn_on_error, what, act, None, self._problems.append)))
        else:  # not waited for: it lasts as long as a request to a node that does not answer
            what = "not all nodes were told that the run has reached its budget"
            in_background(partial(warn_on_error, what, self._tell_budget, None, self._problems.append))

    def _stop_peers(self, after: float) -> None:
        """Stop peers that have not exited by then. A stopped container is not restarted by its policy."""
        if self._following.end_seen.wait(after) or self._closed:
            return
        known, attached = self._following.known, self._attached
        names = peers_to_stop(known)
        peers = [node for node in attached.nodes if node.name in names]
        if not peers:
            return
        root, states = attached.record.paths.root, known.states
        ended = [node for node in attached.nodes if node.name in states]

        def first() -> str:
            evidence = [gather(root, node, states[node.name]) for node in ended]
            return _first_signal(evidence, up_to_date=self._following.known.up_to_date)

        signal = warn_on_error("the logs of the nodes that ended could not be read", first, "", self._problems.append)
        run_all_catching([partial(self._stop_peer, node, signal) for node in peers])

    def _tell_budget(self) -> None:
        """Tell the nodes that the run has reached its budget; their entry scripts then end it there.

        Again until they have ended: one may be away, or its script may just start.
        """
        end_seen, record, noted = self._following.end_seen, self._attached.record, set[str]()
        while not (self._closed or end_seen.is_set()):
            states = self._following.known.states
            others = [node for node in self._attached.nodes if node.name not in states]
            told = run_all_catching([partial(self._tell_node, node) for node in others])
            failed = {node.name: error for node, error in zip(others, told, strict=True) if error is not None}
            for name in failed.keys() - noted:
                record.event("not told of the budget", node=name, reason=str(failed[name]))
            noted |= failed.keys()
            end_seen.wait(TELL)

    def _tell_node(self, node: NodeOfRun) -> None:
        """If the file cannot be written, stop the container: a program gets the same time to save."""
        engine = self._attached.engines[node.name]
        try:
            engine.files.append(NodePaths(node.output, node.name).budget, str(int(time.time())), below=node.output)
        except NodeUnfit:
            engine.stop(node.container, DOWN_GRACE)

    def _stop_peer(self, node: NodeOfRun, signal: str) -> None:
        """signal: sent first, as a rank of this node may be the one that all others wait for; "": none."""
        engine, record = self._attached.engines[node.name], self._attached.record
        try:
            if signal:
                engine.signal(node.container, signal)
                self._following.end_seen.wait(HANG_STACKS if signal == "QUIT" else STACKS)
            engine.stop(node.container, PEER_GRACE)
            record.event("peer stopped", node=node.name)
        except LauncherError as error:
            record.event("peer not stopped", node=node.name, reason=str(error))


def _first_signal(ended: Sequence[Evidence], *, up_to_date: bool) -> str:
    """Return the signal that peers get before they are stopped, "" for none, for a node that all others may wait for.

    ended: evidence of the nodes that ended. up_to_date: it is complete. QUIT: stacks of all threads; URG: the dump of
    the flight recorder.
    """
    if any(one.state.exit_code == HANG_CODE for one in ended):
        return "QUIT"
    return "URG" if collective_failed(ended) or not up_to_date else ""


def _record(record: Record, message: Message) -> None:
    if isinstance(message, messages.NodeEnded):
        state = message.state
        record.event(message.event, node=message.node, exit_code=state.exit_code, oom_killed=state.oom_killed)
    elif message.event:
        record.event(message.event, **asdict(message))
