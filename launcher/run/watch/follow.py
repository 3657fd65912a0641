"""Follow all nodes of a run as one stream of messages: output, progress, exits, lost and restored connections.

Two threads per node: one waits for its container, one reads its files (`reader`). One more thread collects all other
files. They only read, so that a caller can detach from a run at any time and follow it again, from this machine or
another one. A last one extends a file of each node while a rank is debugged, so that the run does not count as hung.
What is read next, what is said about it, and what is to be done then is decided in `observed`.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from launcher.errors import LauncherError, LoginLost, NodeUnfit
from launcher.extras import in_words
from launcher.job.settings import read_settings
from launcher.model.host import cluster_name
from launcher.node.files import Files
from launcher.node.machine import LocalMachine
from launcher.records.collect import Collected, collect, output_folders
from launcher.records.writer import append
from launcher.run import membership
from launcher.run.debug import BEAT, keep_alive
from launcher.run.end import gradients
from launcher.run.locate import Attached
from launcher.run.watch import attempts, messages, observed
from launcher.run.watch.messages import Message
from launcher.run.watch.observed import Action, FilesCollected, Moment, RestFailed, RestRead, Shown, StartsKnown
from launcher.run.watch.reader import Appended, Event, NodeReader, Wanted

TICK = 0.2  # seconds without a message after which a Tick is sent
WAITING = 64  # events whose messages, mostly output, were not taken yet; reading pauses meanwhile
WAIT = 30.0  # limit of one wait call, so that a silently dropped connection is detected
QUEUE = 2.0  # the same on a cluster, where one query of the queue serves all nodes
GLANCE = 2.0  # the same of a reader of output, which may be closed at any time: each wait occupies a session

Said = tuple[Sequence[Message], Sequence[Action]]  # after one event


class _Closed(Exception):  # noqa: N818 - no error: it ends a thread
    pass


class Follow:
    """The messages of a run's nodes, until every container has ended and all files were collected. Iterate only once.

    Waits indefinitely for an unreachable node, unless the run has failed or was stopped on another node.

    known: replaced as a whole, with the lock. end_seen: set when every container has ended.
    """

    def __init__(self, attached: Attached, shown: Sequence[Shown], *, resumed: bool, brief: bool = False) -> None:
        """shown: at most one file per node. resumed: the run was started before; earlier restarts are not reported.

        brief: its threads must end soon after close(), even those that wait for a container.
        """
        record = attached.record
        self._attached = attached
        self._resumed = resumed
        self._brief = brief
        self._most = read_settings(os.environ).limits.file
        self.known = observed.begin(
            record.run,
            attached.nodes,
            shown,
            _now(),
            elastic=record.min_nodes > 0,
            isolates=record.traits.isolates,
            unreachable=len(attached.unreachable),
            may_lose=attached.may_lose,
        )
        self.end_seen = threading.Event()
        self._lock = threading.Lock()
        self._queue = queue.SimpleQueue[Said | BaseException | None]()  # None: the end
        self._room = threading.Semaphore(WAITING)
        self._closed = threading.Event()
        self._stop = threading.Event()  # of the threads
        self._due = threading.Event()  # collect now
        self._readers = {
            node.name: NodeReader(
                node, attached.engines[node.name], partial(self._wanted_of, node.name), self._on_event
            )
            for node in attached.nodes
        }

    def __iter__(self) -> Iterator[Said]:
        """Yield messages as they arrive, each time with what to do then."""
        of_nodes = [partial(body, reader) for reader in self._readers.values() for body in (self._wait_for, self._read)]
        for body in (*of_nodes, self._collect, self._keep_alive):
            threading.Thread(target=self._run, args=(body,), daemon=True).start()
        while True:
            try:
                found = self._queue.get(timeout=TICK)
            except queue.Empty:
                if self._closed.is_set():
                    return
                yield [messages.Tick()], ()
                continue
            if found is None:
                return
            if isinstance(found, BaseException):
                raise found
            self._room.release()
            yield found

    def close(self) -> None:
        """Stop following; the run continues. Its threads, which only read, end without being waited for."""
        self._closed.set()
        self._halt()
        for reader in self._readers.values():
            reader.end()

    def _wanted_of(self, name: str) -> Wanted:
        return self.known.nodes[name].wanted()

    def _on_event(self, event: Event | FilesCollected) -> None:
        """Note an event, queue the messages about it, and pause its thread while too many wait.

        Appended data is queued before it is stored, so that a full or slow local disk loses no output. Raises _Closed,
        and LoginLost, as a new login might ask for a password.
        """
        if self._closed.is_set():
            raise _Closed
        self._require_login(event)
        name = event.node if isinstance(event, Event) else ""
        with self._lock:
            before = self.known
            self.known, found, actions = observed.reduce(before, event, _now())
            if self.known.all_ended:
                self.end_seen.set()
            if found:
                self._queue.put((found, actions))
            if self.known.nothing_to_read:
                self._queue.put(None)
        if isinstance(event, Appended):
            self._store(event)
        elif name and self.known.nodes[name].has_ended and not before.nodes[name].has_ended:
            self._readers[name].end()  # its files no longer grow
            self._due.set()
        while found and not self._room.acquire(timeout=TICK):
            if self._closed.is_set():
                raise _Closed

    def _require_login(self, event: Event | FilesCollected) -> None:
        collected = event.results.values() if isinstance(event, FilesCollected) and event.final else ()
        for error in (*collected, getattr(event, "error", None)):
            if isinstance(error, LoginLost):
                fix = f"the run is not affected; follow it again: launcher logs {self._attached.record.run}"
                raise LoginLost(error.where, error.what, fix)

    def _store(self, event: Appended) -> None:
        """Append the data to the copy in runs/, as the node may be lost before its files are collected."""
        record, path = self._attached.record, self._readers[event.node].relative(event.path)
        if event.offset + len(event.data) <= self._most:
            with suppress(OSError):  # a full disk: collect() reports it and copies the missing data later
                append(record.paths.root / path, event.offset, event.data, record.mask)

    def _halt(self) -> None:
        self._stop.set()
        self._due.set()

    def _run(self, body: Callable[[], None]) -> None:
        """If a thread fails, iteration raises its error, so that none waits forever."""
        try:
            body()
        except _Closed:
            return
        except BaseException as error:  # noqa: BLE001 - raised again in __iter__
            self._halt()
            self._queue.put(error)

    def _wait_for(self, reader: NodeReader) -> None:
        """Wait until the container has ended and is not restarted; reconnect as often as needed."""
        at_most = QUEUE if cluster_name(reader.node.host) is not None else GLANCE if self._brief else WAIT
        while how := observed.next_wait(self.known.nodes[reader.name], at_most):
            pause, limit = how
            if self._stop.wait(pause):
                return
            reader.wait(limit)

    def _read(self, reader: NodeReader) -> None:
        """Follow its files as they grow, reconnecting as often as needed, then read the rest."""

        def running() -> bool:
            return not (self.known.nodes[reader.name].has_ended or self._stop.is_set())

        if self._resumed:
            with suppress(FileNotFoundError, LauncherError):
                self._on_event(StartsKnown(reader.name, reader.attempts(attempts.LIMIT)))
        while running():
            try:
                reader.follow(running)
            except LauncherError:  # reported by the thread that waits for the container; the offsets are kept
                if running():
                    self._stop.wait(observed.RETRY)
        while not (self.known.nodes[reader.name].rest_read or self._stop.is_set()):
            self._read_rest(reader)

    def _read_rest(self, reader: NodeReader) -> None:
        """Read the rest from the node or, if it is unreachable after it ended, from the collected files."""
        node = self.known.nodes[reader.name]
        if not (node.collected and node.away):
            try:
                reader.read_rest(reader.engine.files, reader.node.output)
            except LauncherError as error:
                self._on_event(RestFailed(reader.name, error))
            else:
                self._on_event(RestRead(reader.name, copies=False))
                return
        if node.collected:
            with suppress(LauncherError):
                reader.read_rest(Files(LocalMachine("this machine", "")), str(self._attached.record.paths.root))
            self._on_event(RestRead(reader.name, copies=True))
        else:
            self._stop.wait(observed.RETRY)

    def _keep_alive(self) -> None:
        """While a rank is debugged, the run does not hang: its own node knows that, but that of rank 0 does not."""
        while not self._stop.wait(BEAT):
            if self.known.all_ended:
                return
            nodes = self.known.nodes
            if any(node.debugged for node in nodes.values()):
                for name in (name for name, node in nodes.items() if not (node.has_ended or node.away)):
                    with suppress(LauncherError):  # a node that does not answer is reported by the thread that waits
                        keep_alive(self._readers[name].engine, nodes[name].of_run)

    def _collect(self) -> None:
        """Collect TensorBoard logs and other files periodically, and all files of an ended node immediately."""
        record, engines = self._attached.record, self._attached.engines
        while not self.known.collected:
            self._due.wait(self.known.pause)
            self._due.clear()
            if self._stop.is_set():
                return
            names, final = observed.to_collect(self.known)
            folders = output_folders(engines, [self._readers[name].node for name in names])
            try:
                results = collect(folders, record.paths.root, mask=record.mask, code=record.sent_code)
            except Exception as error:  # noqa: BLE001 - said at the end; the run does not depend on its copies
                what = f"its files could not be collected: {in_words(error)}"
                results = [Collected(0, (NodeUnfit(folder.node, what, "launcher fetch"),)) for folder in folders]
            each = {name: result for folder, result in zip(folders, results, strict=True) for name in folder.nodes}
            found = FilesCollected(each, final)
            if found.new and not self.known.gradients:
                # once they are known, all nodes have met, so that `apart` is settled, too
                with suppress(Exception):  # read again at the end, and said then
                    apart = "" if final or self.known.apart else membership.so_far(record)
                    found = replace(found, gradients=gradients.line(record), apart=apart)
            self._on_event(found)


def _now() -> Moment:
    return Moment(time.monotonic(), time.time())
