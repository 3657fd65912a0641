"""What happens on all nodes of a run, as one stream of messages: output, progress, ends, lost and regained connections.

Two threads a node: one waits for its container, one follows its files (run.followed says what becomes of them,
node.follower how they come here); one more collects all other files. All of them only read, so that a run can be left
at any moment and followed again, from here or from another machine.
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
from launcher.model.host import cluster_name
from launcher.model.plan import RunId
from launcher.node.engine import Engine
from launcher.node.files import Files
from launcher.node.machine import LocalMachine
from launcher.records.collect import Collected, collect, output_folders
from launcher.records.store import NodeOfRun
from launcher.run import messages
from launcher.run.followed import Followed, FollowedFiles
from launcher.run.locate import Attached
from launcher.run.messages import Message, RankZeroMoved
from launcher.run.state import SIGKILL_CODE

TICK = 0.2  # seconds without a message until a Tick
WAITING = 64  # messages, pieces of output most of them: a program that prints faster than they are shown has to wait
COLLECT_EVERY = 5.0
COLLECT_SELDOM = 30.0  # while nothing is new
REMOVAL = 1.0  # seconds in which `docker rm -f` removes a container that it has killed
WAIT = 30.0  # one wait call; then it is asked again, so that a silent cut is noticed
QUEUE = 2.0  # on a cluster, where one answer of its queue serves all nodes
RETRY = 1.0
RETRY_SELDOM = 15.0  # while a node stays away
GIVE_UP = 30.0  # of a failed run, a node that stays away so long is not waited for any more


class FollowedNode:
    """One node of a run that is followed: whether it answers, has ended, and its files are here."""

    def __init__(
        self, run: RunId, node: NodeOfRun, engine: Engine, files: FollowedFiles, put: Callable[[Message], None]
    ) -> None:
        self.run = run
        self.node = node
        self.name, self.container = node.name, node.container
        self.engine = engine
        self.files = files
        self.heard = time.time()  # when it last answered, as far as is known
        self.silent_since = 0.0  # of time.monotonic(); 0: it answers
        self.ended = 0.0  # of time.monotonic()
        self.collected = threading.Event()  # its files are here, or never will be
        self.problem: LauncherError | None = None  # why not
        self._put = put
        self._lock = threading.Lock()  # several threads meet with a lost connection at the same time

    def is_silent(self, error: LauncherError) -> None:
        """Raises LoginLost: it is not tried again, as it would ask for a password."""
        if isinstance(error, LoginLost):
            raise LoginLost(error.where, error.what, f"the run goes on; come back: launcher logs {self.run}")
        with self._lock:
            if not self.silent_since:
                self.silent_since = time.monotonic()
                self._put(messages.NodeLost(self.name, str(error), self.heard))

    def answers(self) -> None:
        with self._lock:
            if self.silent_since:
                self.silent_since = 0.0
                self._put(messages.NodeBack(self.name))
            self.heard = time.time()

    def end(self) -> None:
        """Its files do not grow any more."""
        self.ended = time.monotonic()
        self.files.end()


class Follow:
    """The messages of a run's nodes, to be iterated once: until every container has ended and all their files are here.

    A node that does not answer is waited for without end, unless the run has failed or was stopped on another one.
    """

    def __init__(self, attached: Attached, shown: Sequence[Followed], *, resumed: bool) -> None:
        """shown: at most one file a node. resumed: the run was started before; earlier restarts are not reported."""
        self._attached = attached
        self._resumed = resumed
        self._queue: queue.Queue[Message | BaseException | None] = queue.Queue(WAITING)
        self._stop = threading.Event()
        self._closed = False
        self._due = threading.Event()  # something is to be collected now
        self._moves = any(followed.moves for followed in shown)
        self._generation = max((followed.world.number for followed in shown if followed.world), default=0)
        self._moving = threading.Lock()
        self._over = math.inf  # of time.monotonic()
        logs = {followed.node.name: followed for followed in shown}
        most, put = read_settings(os.environ).limits.file, self._queue.put
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
        """Whether the files of all nodes that have ended are here."""
        return all(node.collected.is_set() for node in self._nodes if node.ended)

    def left_out(self) -> set[str]:
        """Nodes that answer and take no part in the newest generation, in a job with min_nodes."""
        newest = max(node.files.generation for node in self._nodes)
        return {node.name for node in self._nodes if node.files.generation < newest and not node.silent_since}

    def __iter__(self) -> Iterator[Message]:
        """Every message as it comes."""
        steps = [partial(step, node) for node in self._nodes for step in (self._wait_for, self._read)]
        for job in (jobs := [*steps, self._collect]):
            threading.Thread(target=self._run, args=(job,), daemon=True).start()
        running = len(jobs)
        while running:
            try:
                message = self._queue.get(timeout=TICK)
            except queue.Empty:
                if self._closed:
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
        """Stop following; the run goes on. Threads that wait for a node are not waited for: they only read."""
        self._closed = True
        self._halt()

    def _halt(self) -> None:
        self._stop.set()
        self._due.set()
        for node in self._nodes:
            node.collected.set()

    def over(self) -> None:
        """No node that stays away can change how the run ends: it is not waited for without end."""
        self._over = min(self._over, time.monotonic())

    def _move(self, message: RankZeroMoved) -> None:
        """Where that generation is newer than all so far, the shown output is that of its first node from now on."""
        with self._moving:
            if message.world.number <= self._generation:
                return
            self._generation = message.world.number
            for node in self._nodes:
                if node.name == message.node:
                    node.files.rank_zero_came(message.world, shown=self._moves)
                elif self._moves:
                    node.files.rank_zero_left()
        self._queue.put(message)

    def _run(self, job: Callable[[], None]) -> None:
        """A job that fails ends the whole: the iteration raises its error, and no other may wait for it for ever."""
        try:
            job()
            self._queue.put(None)
        except BaseException as error:  # noqa: BLE001 - raised where the messages are read
            self._halt()
            self._queue.put(error)

    def _wait_for(self, node: FollowedNode) -> None:
        """Until the container has ended for good, over any number of cut connections."""
        pause, waits_for = RETRY, ""
        at_most = WAIT if cluster_name(node.node.host) is None else QUEUE
        while not self._stop.is_set():
            try:
                state = node.engine.wait(node.container, 0 if node.silent_since else at_most)
                if state.exit_code == SIGKILL_CODE and not state.oom_killed:
                    self._stop.wait(REMOVAL)
                    state = node.engine.wait(node.container, 0)
            except ContainerGone:
                folder = node.node.output if self._attached.record.runtime == "process" else ""
                self._queue.put(messages.NodeRemoved(node.name, folder))
                break
            except LauncherError as error:
                node.is_silent(error)
                if self._hopeless(node):
                    self._queue.put(messages.NodeGone(node.name, str(error), node.heard))
                    node.collected.set()  # as far as it ever will be
                    break
                self._stop.wait(pause)
                pause = min(2 * pause, RETRY_SELDOM)
                continue
            pause = RETRY
            node.answers()
            if node.node.rank == 0 and not state.phase.ended and state.error not in ("", waits_for):
                waits_for = state.error
                self._queue.put(messages.NodeWaits(node.name, waits_for))
            if state.phase.ended:
                self._queue.put(messages.NodeEnded(node.name, state))
                break
        node.end()
        self._due.set()

    def _hopeless(self, node: FollowedNode) -> bool:
        """Whether to go on without it: it stays away, and the run is over without it."""
        return time.monotonic() - max(self._over, node.silent_since) > GIVE_UP

    def _read(self, node: FollowedNode) -> None:
        """Its followed files as they grow, over any number of cut connections, and then the rest of them."""

        def goes_on() -> bool:
            return not (node.ended or self._stop.is_set())

        if self._resumed:
            node.files.skip_known_starts()
        while goes_on():
            try:
                node.files.follow(goes_on)
            except LauncherError:  # the thread that waits for the container reports it; the offsets are kept
                if not node.ended:
                    self._stop.wait(RETRY)
        while not self._stop.is_set() and not self._rest_was_read(node):
            self._stop.wait(RETRY)

    def _rest_was_read(self, node: FollowedNode) -> bool:
        """From the node; of one that went away after its end, what was collected is all there is."""
        collected = node.collected.is_set()
        if not (collected and node.silent_since):
            try:
                node.files.read_rest(node.engine.files, node.node.output)
                node.answers()
            except NodeUnreachable as error:
                node.is_silent(error)
            except LauncherError:
                pass  # the thread that collects reports it
            else:
                return True
        if collected:
            here = Files(LocalMachine("this machine", ""))
            with suppress(LauncherError):
                node.files.read_rest(here, str(self._attached.record.paths.root.absolute()))
        return collected

    def _collect(self) -> None:
        """TensorBoard logs and the like now and then; everything of a node that has ended, at once."""
        pause, missed = COLLECT_EVERY, dict[str, str]()
        while left := [node for node in self._nodes if not node.collected.is_set()]:
            self._due.wait(pause)
            self._due.clear()
            if self._stop.is_set():
                return
            ended = [node for node in left if node.ended]
            wanted = ended or [node for node in left if not node.silent_since]
            folders = output_folders(self._attached.engines, [node.node for node in wanted])
            record = self._attached.record
            results = collect(folders, record.paths.root, mask=record.mask)
            new = any(isinstance(result, Collected) and result.moved for result in results)
            pause = COLLECT_EVERY if new else min(2 * pause, COLLECT_SELDOM)
            outcomes = {name: result for folder, result in zip(folders, results, strict=True) for name in folder.nodes}
            for node in ended:
                outcome = outcomes[node.name]
                if isinstance(outcome, (Collected, NodeUnfit, NoRoomHere)):
                    node.answers()
                    node.problem = None
                    wait = isinstance(outcome, NodeUnfit) and time.monotonic() - node.ended < GIVE_UP
                else:
                    node.is_silent(outcome)
                    node.problem, wait = outcome, not self._hopeless(node)
                if wait:
                    pause = RETRY
                    continue
                if node.problem is None:
                    for problem in outcome.problems if isinstance(outcome, Collected) else [outcome]:
                        missed.setdefault("disk" if isinstance(problem, NoRoomHere) else str(problem), str(problem))
                node.collected.set()
        for reason in missed.values():  # once, where nodes share a folder or the disk here is full
            self._queue.put(messages.NotCollected(reason))
