"""Run a step on many nodes in parallel, with a thread for each, and report every failure.

Daemon threads, not an executor: Ctrl-C ends the program immediately, even while a node is not responding.
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
    """Run all jobs in parallel and return their results, in order.

    Raises NodesFailed with every LauncherError, in order; any other error unchanged.
    """
    outcomes = run_all_catching(jobs)
    failures = [outcome for outcome in outcomes if isinstance(outcome, LauncherError)]
    if failures:
        raise NodesFailed(failures, of=len(jobs))
    return [outcome for outcome in outcomes if not isinstance(outcome, LauncherError)]


def on_each(nodes: Iterable[A], ask: Callable[[A], T]) -> dict[A, T]:
    """Call `ask` for each distinct node in parallel; return the results by node. Raises the errors of run_all()."""
    asked = dict.fromkeys(nodes)
    return dict(zip(asked, run_all([partial(ask, node) for node in asked]), strict=True))


def run_all_catching(jobs: Sequence[Callable[[], T]]) -> list[T | LauncherError]:
    """Run all jobs in parallel; return the result or the LauncherError of each. Any other error is raised unchanged."""
    futures = [in_background(job) for job in jobs]
    outcomes: list[T | LauncherError] = []
    for future in futures:
        try:
            outcomes.append(future())
        except LauncherError as error:
            outcomes.append(error)
    return outcomes


def run_both(first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """Run both in parallel. Raises the first's error, else the second's."""
    other = in_background(second)
    return first(), other()


class Future(Generic[T]):
    """A job in a thread. Call the future to wait for the job's result, or its error.

    That of concurrent.futures needs an executor, whose threads keep the program from exiting.
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
        except BaseException as error:  # noqa: BLE001 - raised by the call for the result
            self._error = error
        self._done.set()

    def wait(self, timeout: float) -> bool:
        """Wait for at most `timeout` seconds; return whether the job has finished."""
        return self._done.wait(timeout)

    def __call__(self, timeout: float | None = None) -> T:
        """Raises TimeoutError after `timeout` seconds."""
        while not self._done.wait(1.0 if timeout is None else timeout):
            if timeout is not None:
                raise TimeoutError("did not finish in time")
            # in slices: a signal just before a wait without a limit would only be handled after it
        if self._error is not None:
            raise self._error
        return self._result


def in_background(job: Callable[[], T]) -> Future[T]:
    """Start a job in a thread. Call what is returned to wait for its result, or its error.

    The error of a job for which nobody waits is lost.
    """
    return Future(job)


@contextmanager
def periodically(report: Callable[[float], object], every: float) -> Iterator[None]:
    """While the block runs, call `report` each `every` seconds with the seconds since its start."""
    over, began = threading.Event(), time.monotonic()

    def run() -> None:
        while not over.wait(every):
            report(time.monotonic() - began)

    threading.Thread(target=run, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def uninterrupted(job: Callable[[], T]) -> T:
    """Return a job's result, or raise its error. A Ctrl-C while it runs is raised after it, from its error if any; also
    a SIGTERM, if that is handled.

    Otherwise a container could be created after the caller stopped waiting, and never be removed. The signal itself is
    deferred, as KeyboardInterrupt could be raised between any two instructions, and a Thread.join() that it interrupts
    takes the thread for finished from then on (Python 3.11).
    """
    if threading.current_thread() is not threading.main_thread():
        return job()  # signals go to the main thread
    interrupts: list[int] = []
    deferred = [signal.SIGINT, *([signal.SIGTERM] if callable(signal.getsignal(signal.SIGTERM)) else [])]
    before = {number: signal.signal(number, lambda which, _: interrupts.append(which)) for number in deferred}
    failed: BaseException | None = None
    try:
        return job()
    except BaseException as error:
        failed = error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if interrupts:
            try:
                signal.raise_signal(interrupts[0])  # no effect if it was ignored before
            except KeyboardInterrupt as stop:
                raise stop from failed
