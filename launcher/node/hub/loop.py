"""The hub's thread: greenlets that run until they wait, and who goes on next."""

from __future__ import annotations

import atexit
import heapq
import itertools
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from greenlet import getcurrent, greenlet

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_END_LIMIT = 5.0  # seconds for the step that is being done when the program ends
Step = Callable[[], object]


class Waiter:
    """One wait of the greenlet that makes it. Anybody may wake it, in any thread, also before it waits."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._greenlet = getcurrent()
        self._over = False
        self._woken = False

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it was woken within that time, in seconds."""
        if not self._woken:
            if timeout is not None:
                self._hub.later(timeout, self.give_up)
            self._hub.give_way()
        self._over = True
        return self._woken

    def wake(self) -> None:
        self._woken = True
        self._hub.soon(self.give_up)

    def wake_now(self) -> None:
        """In the hub's thread, outside of its greenlets: before anything else."""
        self._woken = True
        self.give_up()

    def give_up(self) -> None:
        """In the hub's thread, outside of its greenlets: the wait ends, unless it has."""
        if not self._over:
            self._over = True
            self._greenlet.switch()


class Hub:
    """Starts its thread when it is first asked for something; it lasts as long as the program, and waits for free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._soon: deque[Step] = deque()
        self._last: list[Step] = []
        self._later: list[tuple[float, int, Step]] = []  # a heap; the numbers keep equal times apart
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._asleep = False
        self._over = False
        self._main: greenlet
        self._selector: selectors.BaseSelector
        self._bell: socket.socket
        self._heard: socket.socket

    @property
    def inside(self) -> bool:
        """Whether the caller runs in the hub's thread, which nobody may stop."""
        return threading.current_thread() is self._thread

    def spawn(self, job: Step) -> None:
        """Run a job as a greenlet. What it raises is reported as a thread's."""
        self.soon(lambda: greenlet(self._guarded).switch(job))

    def soon(self, step: Step) -> None:
        """Have a short step done in the hub's thread, outside of its greenlets."""
        self._soon.append(step)
        if self._thread is None:
            self._start()
        # it looks at what was asked for once more after it has said that it sleeps: no step is overlooked
        elif self._asleep and not self.inside:
            self._asleep = False
            self._bell.send(b"\0")

    def last(self, step: Step) -> None:
        """In the hub's thread: have a short step done before it looks at the sockets again, behind all others."""
        self._last.append(step)

    def later(self, seconds: float, step: Step) -> None:
        """In the hub's thread: have a short step done then."""
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), step))

    def give_way(self) -> None:
        """In a greenlet: until a step switches back to it."""
        self._main.switch()

    def watch(self, watched: socket.socket, events: int, step: Callable[[int], object]) -> None:
        """In the hub's thread: tell `step` what the socket is ready for, whenever it is. events: 0 for no more."""
        known = watched in self._selector.get_map()
        if events and known:
            self._selector.modify(watched, events, step)
        elif events:
            self._selector.register(watched, events, step)
        elif known:
            self._selector.unregister(watched)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._selector = selectors.DefaultSelector()
                self._bell, self._heard = socket.socketpair()
                self._selector.register(self._heard, READ, lambda _: self._heard.recv(4096))
                self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
                self._thread.start()
                # at its end Python unwinds the stack of every thread that is left; a greenlet's cannot be unwound
                atexit.register(self._end)

    def _end(self) -> None:
        assert self._thread is not None
        self.soon(self._finish)
        self._thread.join(_END_LIMIT)

    def _finish(self) -> None:
        self._over = True

    def _run(self) -> None:
        self._main = getcurrent()
        while not self._over:
            for _ in range(len(self._soon)):  # not what comes in meanwhile: the sockets have their turn
                self._guarded(self._soon.popleft())
            now = time.monotonic()
            while self._later and self._later[0][0] <= now:
                self._guarded(heapq.heappop(self._later)[2])
            last, self._last = self._last, []
            for step in last:
                self._guarded(step)
            self._asleep = True
            ready = self._selector.select(0 if self._soon else self._patience())
            self._asleep = False
            for key, events in ready:
                self._guarded(key.data, events)

    def _patience(self) -> float | None:
        return max(0.0, self._later[0][0] - time.monotonic()) if self._later else None

    def _guarded(self, do: Callable[..., object], *arguments: object) -> None:
        """One failure must not end the thread that everyone else waits in."""
        try:
            do(*arguments)
        except BaseException:  # noqa: BLE001 - nobody is there to raise it to
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self._thread)))


HUB = Hub()
