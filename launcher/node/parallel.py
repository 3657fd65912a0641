"""The same thing on many nodes at once, all failures gathered.

Daemon threads, not an executor: a Ctrl-C ends the program at once, even while a node does not answer.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from launcher.errors import LauncherError, NodesFailed

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")


def begin(job: Callable[[], T]) -> Callable[[], T]:
    """Start a job; call what is returned to wait for its value, or its error."""
    box: list[T | BaseException] = []
    thread = threading.Thread(target=_run, args=(job, box), daemon=True)
    thread.start()

    def value() -> T:
        thread.join()
        return _value(box)

    return value


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
    results: list[B | BaseException] = []
    thread = threading.Thread(target=_run, args=(second, results), daemon=True)
    thread.start()
    one = first()
    thread.join()
    return one, _value(results)


def every(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """All jobs at once, their results in order.

    Raises NodesFailed with every LauncherError, in order; an error that is none of ours as it is.
    """
    outcomes = settle(jobs)
    failures = [outcome for outcome in outcomes if isinstance(outcome, LauncherError)]
    if failures:
        raise NodesFailed(failures, of=len(jobs))
    return [outcome for outcome in outcomes if not isinstance(outcome, LauncherError)]


def settle(jobs: Sequence[Callable[[], T]]) -> list[T | LauncherError]:
    """All jobs at once: their results, or the LauncherError in its place. Any other error is raised as it is."""
    boxes: list[list[T | BaseException]] = [[] for _ in jobs]
    threads = [
        threading.Thread(target=_run, args=(job, box), daemon=True) for job, box in zip(jobs, boxes, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [box[0] if isinstance(box[0], LauncherError) else _value(box) for box in boxes]


def _run(job: Callable[[], T], box: list[T | BaseException]) -> None:
    try:
        box.append(job())
    except BaseException as error:  # noqa: BLE001 - it is raised again where the result is read
        box.append(error)


def _value(box: list[T | BaseException]) -> T:
    value = box[0]
    if isinstance(value, BaseException):
        raise value
    return value
