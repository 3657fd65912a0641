"""Follow all nodes of a run as one stream of messages: output, progress, exits, lost and restored connections.

Two threads per node: one waits for its container, one follows its files (see run.followed and node.follower). One more
thread collects all other files. All threads only read, so that a caller can detach from a run at any time and follow it
again, from this machine or another one.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from launcher.errors import ContainerGone, LauncherError, LoginLost, NodeUnfit, NodeUnreachable, NoRoomHere
from launcher.job.settings import read_settings
from launcher.model.container import Phase
from launcher.model.host import cluster_name
from launcher.model.plan import RunId
from launcher.node.engine import Engine
from launcher.node.files import Files
from launcher.node.machine import LocalMachine
from launcher.records.collect import Collected, collect, output_folders
from launcher.records.store import NodeOfRun
from launcher.run import gradients, messages
from launcher.run.followed import Followed, FollowedFiles
from launcher.run.locate import Attached
from launcher.run.messages import Message, RankZeroMoved
from launcher.run.state import SIGKILL_CODE

TICK = 0.2  # seconds without a message after which a Tick is sent
WAITING = 64  # queued messages, mostly output; reading pauses while the queue is full
COLLECT_EVERY = 5.0
COLLECT_SELDOM = 30.0  # while no file has changed
REMOVAL = 1.0  # seconds that `docker rm -f` may take between killing and removing a container
WAIT = 30.0  # limit of one wait call, so that a silently dropped connection is detected
QUEUE = 2.0  # the same on a cluster, where one query of the queue serves all nodes
GLANCE = 2.0  # the same of a reader of output, which may be closed at any time: each wait occupies a session
RETRY = 1.0
RETRY_SELDOM = 15.0  # while a node is unreachable
GIVE_UP = 30.0  # seconds to wait for an unreachable node of a run that has ended elsewhere


class FollowedNode:
    """A followed node: whether it is reachable, has ended, and its files were collected."""

    def __init__(
        self, run: RunId, node: NodeOfRun, engine: Engine, files: FollowedFiles, put: Callable[[Message], None]
    ) -> None:
        self.run = run
        self.node = node
        self.name, self.container = node.name, node.container
        self.engine = engine
        self.files = files
        self.last_answer = time.time()
        self.unreachable_since = 0.0  # time.monotonic(); 0: reachable
        self.ended = 0.0  # time.monotonic(); 0: running
        self.collected = threading.Event()  # its files were collected, or cannot be
        self.problem: LauncherError | None = None  # why they were not collected
        self._put = put
        self._lock = threading.Lock()  # several threads can detect a lost connection at the same time

    def mark_unreachable(self, error: LauncherError) -> None:
        """Report a lost connection. Raises LoginLost, as a new login might ask for a password."""
        if isinstance(error, LoginLost):
            raise LoginLost(
                error.where, error.what, f"the run is not affected; follow it again: launcher logs {self.run}"
            )
        with self._lock:
            if not self.unreachable_since:
                self.unreachable_since = time.monotonic()
                self._put(messages.NodeLost(self.name, error.what, self.last_answer))

    def mark_reachable(self) -> None:
        with self._lock:
            if self.unreachable_since:
                self.unreachable_since = 0.0
                self._put(messages.NodeBack(self.name))
            self.last_answer = time.time()

    def end(self) -> None:
        """Mark the node as ended: its files no longer grow."""
        self.ended = time.monotonic()
        self.files.end()


class _ReaderGone(Exception):  # noqa: N818 - no error: it ends a thread
    pass


class Follow:
    """The messages of a run's nodes, until every container has ended and all files were collected. Iterate only once.

    Waits indefinitely for an unreachable node, unless the run has failed or was stopped on another node.
    """

    def __init__(self, attached: Attached, shown: Sequence[Followed], *, resumed: bool, brief: bool = False) -> None:
        """shown: at most one file per node. resumed: the run was started before; earlier restarts are not reported.

        brief: its threads must end soon after close(), even those that wait for a container.
        """
        self._attached = attached
        self._resumed = resumed
        self._brief = brief
        self._queue: queue.Queue[Message | BaseException | None] = queue.Queue(WAITING)
        self._stop = threading.Event()
        self._closed = threading.Event()
        self._due = threading.Event()  # collect now
        self._moves = any(followed.moves for followed in shown)
        self._generation = max((followed.world.number for followed in shown if followed.world), default=0)
        self._moving = threading.Lock()
        self._over = math.inf  # time.monotonic()
        logs = {followed.node.name: followed for followed in shown}
        most, put = read_settings(os.environ).limits.file, self._put
        self._nodes = [
            FollowedNode(
                attached.record.run,
                node,
                attached.engines[node.name],
                FollowedFiles(node, logs.get(node.name), attached, put, self._move, most),
                put,
            )
            for node in attached.nodes
        ]

    @property
    def not_collected(self) -> Mapping[str, LauncherError]:
        """Nodes whose files could not be collected at the end, with the reason."""
        return {node.name: node.problem for node in self._nodes if node.problem is not None}

    @property
    def up_to_date(self) -> bool:
        """Whether the files of all ended nodes were collected."""
        return all(node.collected.is_set() for node in self._nodes if node.ended)

    def left_out(self) -> set[str]:
        """Return reachable nodes that are not part of the newest generation, in a job with min_nodes."""
        newest = max(node.files.generation for node in self._nodes)
        return {node.name for node in self._nodes if node.files.generation < newest and not node.unreachable_since}

    def __iter__(self) -> Iterator[Message]:
        """Yield every message as it arrives."""
        steps = [partial(step, node) for node in self._nodes for step in (self._wait_for, self._read)]
        for job in (jobs := [*steps, self._collect]):
            threading.Thread(target=self._run, args=(job,), daemon=True).start()
        running = len(jobs)
        while running:
            try:
                message = self._queue.get(timeout=TICK)
            except queue.Empty:
                if self._closed.is_set():
                    return
                yield messages.Tick()
                continue
            if isinstance(message, BaseException):
                raise message
            if message is None:
                running -= 1
            else:
                yield message

    def close(self) -> None:
        """Stop following; the run continues. Its threads, which only read, end without being waited for."""
        self._closed.set()
        self._halt()
        for node in self._nodes:
            node.files.end()

    def _put(self, message: Message | BaseException | None) -> None:
        """Queue a message for the reader. Raises _ReaderGone once it has closed this object."""
        while not self._closed.is_set():
            with suppress(queue.Full):
                return self._queue.put(message, timeout=TICK)
        raise _ReaderGone

    def _halt(self) -> None:
        self._stop.set()
        self._due.set()
        for node in self._nodes:
            node.collected.set()

    def over(self) -> None:
        """Stop waiting indefinitely for unreachable nodes, as the outcome of the run is decided."""
        self._over = min(self._over, time.monotonic())

    def _move(self, message: RankZeroMoved) -> None:
        """If the generation is newer than all before, show the output of its first node from now on."""
        with self._moving:
            if message.world.number <= self._generation:
                return
            self._generation = message.world.number
            for node in self._nodes:
                if node.name == message.node:
                    node.files.rank_zero_came(message.world, shown=self._moves)
                elif self._moves:
                    node.files.rank_zero_left()
        self._put(message)

    def _run(self, job: Callable[[], None]) -> None:
        """If a worker thread fails, iteration raises its error, so that no thread waits forever."""
        try:
            job()
            self._put(None)
        except _ReaderGone:
            return
        except BaseException as error:  # noqa: BLE001 - raised again in __iter__
            self._halt()
            with suppress(_ReaderGone):
                self._put(error)

    def _wait_for(self, node: FollowedNode) -> None:
        """Wait until the container has ended and is not restarted; reconnect as often as needed."""
        pause, waiting_for = RETRY, ""
        at_most = QUEUE if cluster_name(node.node.host) is not None else GLANCE if self._brief else WAIT
        while not self._stop.is_set():
            try:
                state = node.engine.wait(node.container, 0 if node.unreachable_since else at_most)
                if state.exit_code == SIGKILL_CODE and not state.oom_killed:
                    self._stop.wait(REMOVAL)
                    state = node.engine.wait(node.container, 0)
            except ContainerGone:
                folder = "" if self._attached.record.traits.isolates else node.node.output
                self._put(messages.NodeRemoved(node.name, folder))
                break
            except LauncherError as error:
                node.mark_unreachable(error)
                if self._hopeless(node):
                    self._put(messages.NodeGone(node.name, str(error), node.last_answer))
                    node.collected.set()  # nothing more can be collected
                    break
                self._stop.wait(pause)
                pause = min(2 * pause, RETRY_SELDOM)
                continue
            pause = RETRY
            node.mark_reachable()
            if node.node.rank == 0 and not state.phase.ended and state.error != waiting_for:
                waiting_for = state.error
                queued = bool(waiting_for) and state.phase is not Phase.RUNNING
                self._put(messages.NodeWaits(node.name, waiting_for, queued))
            if state.phase.ended:
                self._put(messages.NodeEnded(node.name, state))
                break
        node.end()
        self._due.set()

    def _hopeless(self, node: FollowedNode) -> bool:
        """Return whether to give up an unreachable node: the outcome of the run is decided."""
        return time.monotonic() - max(self._over, node.unreachable_since) > GIVE_UP

    def _read(self, node: FollowedNode) -> None:
        """Follow its files as they grow, reconnecting as often as needed, then read the rest."""

        def running() -> bool:
            return not (node.ended or self._stop.is_set())

        if self._resumed:
            node.files.skip_known_starts()
        while running():
            try:
                node.files.follow(running)
            except LauncherError:  # reported by the thread that waits for the container; the offsets are kept
                if not node.ended:
                    self._stop.wait(RETRY)
        while not self._stop.is_set() and not self._rest_was_read(node):
            self._stop.wait(RETRY)

    def _rest_was_read(self, node: FollowedNode) -> bool:
        """Read the rest from the node or, if it is unreachable after it ended, from the collected files."""
        collected = node.collected.is_set()
        if not (collected and node.unreachable_since):
            try:
                node.files.read_rest(node.engine.files, node.node.output)
                node.mark_reachable()
            except NodeUnreachable as error:
                node.mark_unreachable(error)
            except LauncherError:
                pass  # reported by the thread that collects
            else:
                return True
        if collected:
            here = Files(LocalMachine("this machine", ""))
            with suppress(LauncherError):
                node.files.read_rest(here, str(self._attached.record.paths.root))
        return collected

    def _collect(self) -> None:
        """Collect TensorBoard logs and other files periodically, and all files of an ended node immediately."""
        pause, missed, how = COLLECT_EVERY, dict[str, str](), ""
        while left := [node for node in self._nodes if not node.collected.is_set()]:
            self._due.wait(pause)
            self._due.clear()
            if self._stop.is_set():
                return
            ended = [node for node in left if node.ended]
            wanted = ended or [node for node in left if not node.unreachable_since]
            folders = output_folders(self._attached.engines, [node.node for node in wanted])
            record = self._attached.record
            results = collect(folders, record.paths.root, mask=record.mask, code=record.sent_code)
            new = any(isinstance(result, Collected) and result.moved for result in results)
            if new and not how and (how := gradients.line(record)):
                self._put(messages.Gradients(how))
            pause = COLLECT_EVERY if new else min(2 * pause, COLLECT_SELDOM)
            outcomes = {name: result for folder, result in zip(folders, results, strict=True) for name in folder.nodes}
            for node in ended:
                outcome = outcomes[node.name]
                if isinstance(outcome, (Collected, NodeUnfit, NoRoomHere)):
                    node.mark_reachable()
                    node.problem = None
                    wait = isinstance(outcome, NodeUnfit) and time.monotonic() - node.ended < GIVE_UP
                else:
                    node.mark_unreachable(outcome)
                    node.problem, wait = outcome, not self._hopeless(node)
                if wait:
                    pause = RETRY
                    continue
                if node.problem is None:
                    for problem in outcome.problems if isinstance(outcome, Collected) else [outcome]:
                        missed.setdefault("disk" if isinstance(problem, NoRoomHere) else str(problem), str(problem))
                node.collected.set()
        for reason in missed.values():  # only once if nodes share a folder or the local disk is full
            self._put(messages.NotCollected(reason))
