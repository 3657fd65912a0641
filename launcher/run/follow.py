"""What happens on all nodes of a run, as one stream of messages: output, progress, ends, lost and regained connections.

Two threads a node: one waits for its container, one follows its files; one more collects files for all nodes. All of
them only read, so that a run can be left at any moment and followed again, from here or from another machine.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial

from launcher.errors import ContainerGone, LauncherError, NodeUnfit, NoRoomHere
from launcher.job.settings import read_settings
from launcher.records.collect import Collected, collect, output_folders
from launcher.run import messages
from launcher.run.followed import Followed, FollowedNode
from launcher.run.locate import Attached
from launcher.run.messages import Message
from launcher.run.state import SIGKILL_CODE

TICK = 0.2  # seconds without a message until a Tick
WAITING = 64  # messages, pieces of output most of them: a program that prints faster than they are shown has to wait
QUIET = 5.0  # seconds until the thread of a quiet file checks whether it is still wanted
COLLECT_EVERY = 5.0
COLLECT_SELDOM = 30.0  # while nothing is new
REMOVAL = 1.0  # seconds in which `docker rm -f` removes a container that it has killed
WAIT = 30.0  # one wait call; then it is asked again, so that a silent cut is noticed
RETRY = 1.0
RETRY_SELDOM = 15.0  # while a node stays away
GIVE_UP = 30.0  # of a failed run, a node that stays away so long is not waited for any more


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
        self._due = threading.Event()  # something is to be collected now
        self._moves = any(followed.moves for followed in shown)
        self._generation = max((followed.world.number for followed in shown if followed.world), default=0)
        self._moving = threading.Lock()
        self._over = math.inf  # of time.monotonic()
        files = {followed.node.name: followed for followed in shown}
        most = read_settings(os.environ).limits.file
        self._nodes = [FollowedNode(node, files.get(node.name), attached, self._put, most) for node in attached.nodes]

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
        newest = max(node.generation for node in self._nodes)
        return {node.name for node in self._nodes if node.generation < newest and not node.silent_since}

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
        self._stop.set()
        self._due.set()
        for node in self._nodes:
            node.collected.set()

    def over(self) -> None:
        """No node that stays away can change how the run ends: it is not waited for without end."""
        self._over = min(self._over, time.monotonic())

    def _put(self, message: Message) -> None:
        if not isinstance(message, messages.RankZeroMoved) or self._move(message):
            self._queue.put(message)

    def _move(self, message: messages.RankZeroMoved) -> bool:
        """Whether that generation is newer than all so far: then the shown output is that of its first node."""
        with self._moving:
            if message.world.number <= self._generation:
                return False
            self._generation = message.world.number
            for node in self._nodes:
                if node.name == message.node:
                    node.rank_zero_came(message.world, shown=self._moves)
                elif self._moves:
                    node.rank_zero_left()
        return True

    def _run(self, job: Callable[[], None]) -> None:
        """A job that fails ends the whole: the iteration raises its error, and no other may wait for it for ever."""
        try:
            job()
            self._queue.put(None)
        except BaseException as error:  # noqa: BLE001 - raised where the messages are read
            self.close()
            self._queue.put(error)

    def _wait_for(self, node: FollowedNode) -> None:
        """Until the container has ended for good, over any number of cut connections."""
        pause = RETRY
        while not self._stop.is_set():
            try:
                state = node.engine.wait(node.container, 0 if node.silent_since else WAIT)
                if state.exit_code == SIGKILL_CODE and not state.oom_killed:
                    self._stop.wait(REMOVAL)
                    state = node.engine.wait(node.container, 0)
            except ContainerGone:
                self._put(messages.NodeRemoved(node.name))
                break
            except LauncherError as error:
                node.is_silent(error)
                if self._hopeless(node):
                    self._put(messages.NodeGone(node.name, str(error), node.heard))
                    node.collected.set()  # as far as it ever will be
                    break
                self._stop.wait(pause)
                pause = min(2 * pause, RETRY_SELDOM)
                continue
            pause = RETRY
            node.answers()
            if state.phase.ended:
                self._put(messages.NodeEnded(node.name, state))
                break
        node.end()
        self._due.set()

    def _hopeless(self, node: FollowedNode) -> bool:
        """Whether to go on without it: it stays away, and the run is over without it."""
        return time.monotonic() - max(self._over, node.silent_since) > GIVE_UP

    def _read(self, node: FollowedNode) -> None:
        """Its files as they grow; what they have grown by until its end is collected by then, and read here."""
        if self._resumed:
            node.skip_known_starts()
        while not (node.ended or self._stop.is_set()):
            try:
                with closing(node.follow()) as follower:
                    while not (node.ended or self._stop.is_set() or node.changed):
                        if found := follower.next(QUIET):
                            node.take(*found)
            except LauncherError:  # the thread that waits for the container reports it; the offsets are kept
                if not node.ended:
                    self._stop.wait(RETRY)
        node.collected.wait()
        if not self._stop.is_set():
            node.take_the_rest()

    def _collect(self) -> None:
        """TensorBoard logs and the like now and then; everything of a node that has ended, at once."""
        pause, missed = COLLECT_EVERY, dict[str, None]()
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
                    missed |= dict.fromkeys(map(str, outcome.problems if isinstance(outcome, Collected) else [outcome]))
                node.collected.set()
        for reason in missed:  # once, where nodes share a folder
            self._queue.put(messages.NotCollected(reason))
