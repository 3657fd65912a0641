"""Condition, Event, Lock and Semaphore of `threading` for both: a thread that waits stops, a greenlet gives way."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from launcher.node.hub.loop import HUB, Waiter

T = TypeVar("T")


class _Thread:
    """One wait of the thread that makes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self, timeout: float | None = None) -> bool:
        return self._lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout))

    def wake(self) -> None:
        self._lock.release()


class Condition:
    """As threading.Condition; its lock is never held for longer than a few steps."""

    def __init__(self, lock: Any = None) -> None:
        self._lock = lock or threading.Lock()
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiters: deque[_Thread | Waiter] = deque()

    def __enter__(self) -> bool:
        return bool(self._lock.__enter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        mine: _Thread | Waiter = Waiter(HUB) if HUB.inside else _Thread()
        self._waiters.append(mine)
        self._lock.release()
        woken = False
        try:
            woken = mine.wait(timeout)
        finally:
            self._lock.acquire()
            if not woken and mine in self._waiters:
                self._waiters.remove(mine)
        return woken

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiters))):
            self._waiters.popleft().wake()

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event(threading.Event):
    """threading.Event on a Condition of ours."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        with self._condition:
            self._set = True
            self._condition.notify_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            return self._set or self._condition.wait(timeout) or self._set


class Semaphore:
    """As threading.Semaphore."""

    def __init__(self, value: int = 1) -> None:
        self._condition = Condition()
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while self._value == 0:
                left = None if deadline is None else deadline - time.monotonic()
                if not blocking or (left is not None and left <= 0):
                    return False
                self._condition.wait(left)
            self._value -= 1
            return True

    def release(self) -> None:
        with self._condition:
            self._value += 1
            self._condition.notify()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Lock(Semaphore):
    """As threading.Lock, for what is held while the network is waited for."""


def aside(job: Callable[[], T]) -> T:
    """Do what stops its thread, a program or a resolver, in one of its own; in no greenlet: here."""
    if not HUB.inside:
        return job()
    outcome: list[T | BaseException] = []
    waiter = Waiter(HUB)

    def work() -> None:
        try:
            outcome.append(job())
        except BaseException as error:  # noqa: BLE001 - raised again below
            outcome.append(error)
        waiter.wake()

    threading.Thread(target=work, daemon=True).start()
    waiter.wait()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
