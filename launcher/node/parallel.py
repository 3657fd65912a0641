"""One step on many nodes at once: a thread each, and every failure is reported.

Daemon threads, not an executor: a Ctrl-C ends the program at once, even while a node does not answer.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

from launcher.errors import LauncherError, NodesFailed

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")


def run_all(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """All jobs at once, their results in order.

    Raises NodesFailed with every LauncherError, in order; any other error as it is.
    """
    outcomes = run_all_settled(jobs)
    failures = [outcome for outcome in outcomes if isinstance(outcome, LauncherError)]
    if failures:
        raise NodesFailed(failures, of=len(jobs))
    return [outcome for outcome in outcomes if not isinstance(outcome, LauncherError)]


def on_each(nodes: Iterable[A], ask: Callable[[A], T]) -> dict[A, T]:
    """Each once, all at the same time: the answers by node. Raises as run_all()."""
    asked = dict.fromkeys(nodes)
    return dict(zip(asked, run_all([partial(ask, node) for node in asked]), strict=True))


def run_all_settled(jobs: Sequence[Callable[[], T]]) -> list[T | LauncherError]:
    """All jobs at once: their results, or the LauncherError in its place. Any other error is raised as it is."""
    futures = [in_background(job) for job in jobs]
    outcomes: list[T | LauncherError] = []
    for future in futures:
        try:
            outcomes.append(future())
        except LauncherError as error:
            outcomes.append(error)
    return outcomes


def run_both(first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """Both at once; the first's error, else the second's."""
    other = in_background(second)
    return first(), other()


class Future(Generic[T]):
    """Call it to wait for the job's result, or its error.

    concurrent.futures' own needs an executor, whose threads keep the program from ending.
    """

    def __init__(self, job: Callable[[], T]) -> None:
        self._job = job
        self._done = threading.Event()
        self._result: T
        self._error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._job()
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error
        self._done.set()

    def wait(self, timeout: float) -> bool:
        """Whether the job has ended, after `timeout` seconds at most."""
        return self._done.wait(timeout)

    def __call__(self, timeout: float | None = None) -> T:
        """Raises TimeoutError after `timeout` seconds."""
        while not self._done.wait(1.0 if timeout is None else timeout):
            if timeout is not None:
                raise TimeoutError("not done in time")
            # in slices: a signal just before a wait without a limit begins would only be noticed at its end
        if self._error is not None:
            raise self._error
        return self._result


def in_background(job: Callable[[], T]) -> Future[T]:
    """Start a job in a thread."""
    return Future(job)


@contextmanager
def meanwhile(tell: Callable[[float], object], every: float) -> Iterator[None]:
    """While the block runs, `tell` is called each `every` seconds with the seconds since it began."""
    over, began = threading.Event(), time.monotonic()

    def run() -> None:
        while not over.wait(every):
            tell(time.monotonic() - began)

    threading.Thread(target=run, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def uninterrupted(job: Callable[[], T]) -> T:
    """Its result, or its error: a Ctrl-C meanwhile is raised when it has ended.

    A container that is created while nothing waits for it would never be removed. The signal itself is put off, not
    KeyboardInterrupt caught around a wait: it may be raised between any two steps, and a Thread.join() that it
    interrupts takes the thread for ended from then on (Python 3.11).
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
        signal.raise_signal(signal.SIGINT)  # ignored where it was ignored before
    return result
