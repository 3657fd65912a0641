"""The same thing on many nodes at once, all failures gathered.

Daemon threads, not an executor: a Ctrl-C ends the program at once, even while a node does not answer.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from launcher.errors import LauncherError, NodesFailed
from launcher.node.hub.loop import HUB
from launcher.node.hub.waits import Event

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")


class Jobs(Generic[T]):
    """Jobs that run at once, and what has come of each."""

    def __init__(self, jobs: Sequence[Callable[[], T]], in_hub: Sequence[bool] = ()) -> None:
        """Starts them. in_hub: of each whether it does nothing but wait for the network: that needs no thread."""
        self._outcomes: list[T | BaseException | None] = [None] * len(jobs)
        self._left = len(jobs)
        self._lock = threading.Lock()
        self._over = Event()
        if not jobs:
            self._over.set()
        for place, job in enumerate(jobs):
            step = partial(self._run, place, job)
            if in_hub[place] if in_hub else HUB.inside:
                HUB.spawn(step)
            else:
                threading.Thread(target=step, daemon=True).start()

    def outcomes(self) -> list[T | BaseException]:
        """Of each its value, or what it raised, when all are over."""
        self._over.wait()
        return self._outcomes  # type: ignore[return-value] # each has one now

    def _run(self, place: int, job: Callable[[], T]) -> None:
        try:
            self._outcomes[place] = job()
        except BaseException as error:  # noqa: BLE001 - it is raised again where the outcome is read
            self._outcomes[place] = error
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._over.set()


def begin(job: Callable[[], T]) -> Callable[[], T]:
    """Start a job; call what is returned to wait for its value, or its error."""
    begun = Jobs([job])
    return lambda: _value(begun.outcomes()[0])


def to_the_end(job: Callable[[], T]) -> T:
    """Its value, or its error, when it is over: a Ctrl-C meanwhile waits, and is raised then.

    What is created while nobody waits for it would never be taken back; half a clean-up is worse than a late one.
    The signal itself is put off, not KeyboardInterrupt caught around a wait: it may strike between any two steps, and
    a Thread.join() that it interrupts takes the thread for ended from then on (Python 3.11).
    """
    if threading.current_thread() is not threading.main_thread():
        return job()  # signals go to the main thread
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        result = job()
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        signal.raise_signal(signal.SIGINT)  # as it would have struck: ignored where it was ignored
    return result


def together(first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """Both at once; the first's error, else the second's."""
    other = begin(second)
    return first(), other()


def every(jobs: Sequence[Callable[[], T]], in_hub: Sequence[bool] = ()) -> list[T]:
    """All jobs at once, their results in order.

    Raises NodesFailed with every LauncherError, in order; an error that is none of ours as it is.
    """
    outcomes = settle(jobs, in_hub)
    failures = [outcome for outcome in outcomes if isinstance(outcome, LauncherError)]
    if failures:
        raise NodesFailed(failures, of=len(jobs))
    return [outcome for outcome in outcomes if not isinstance(outcome, LauncherError)]


def settle(jobs: Sequence[Callable[[], T]], in_hub: Sequence[bool] = ()) -> list[T | LauncherError]:
    """All jobs at once: their results, or the LauncherError in its place. Any other error is raised as it is."""
    outcomes = Jobs(jobs, in_hub).outcomes()
    return [outcome if isinstance(outcome, LauncherError) else _value(outcome) for outcome in outcomes]


def _value(outcome: T | BaseException) -> T:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
