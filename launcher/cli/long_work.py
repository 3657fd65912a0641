"""What a person sees of long work before a run: images pulled, sent, unpacked and built, torch imported."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from launcher.cli.terminal import Reporter, interactive
from launcher.model.progress import Step
from launcher.node.parallel import uninterrupted

EVERY = 30.0  # seconds between two lines of a node, if stderr is no terminal
BAR = 20  # columns


@dataclass
class _Reported:
    """The first report of a node, and when its last line was printed."""

    since: float
    sent: int
    last: float
    lines: int = 0
    over: bool = False


class LongWork(Reporter):
    """Messages, and how far long work is: `log` and `progress` may be called by several threads.

    On a terminal, a bar with bytes, rate and time left for each node, and below the bars the last Step of each node;
    else a line of each of them every 30 s, of a Step that is due at once each time, and one when a transfer that took
    longer than that is over.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._bars: _Bars | None = None  # from the first byte or Step on: most starts have none
        self._tasks: dict[str, TaskID] = {}
        self._reported: dict[str, _Reported] = {}
        self._lock = threading.RLock()
        self._over = False  # threads may still report then, after a Ctrl-C; messages are shown all along

    def __enter__(self) -> LongWork:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._over = True
            if self._bars is not None:
                uninterrupted(self._bars.stop)

    def log(self, text: str) -> None:
        with self._lock:
            if not isinstance(text, Step):
                if self._bars is not None:
                    self._bars.steps.clear()
                super().log(text)
            elif self._over:
                return
            elif interactive():
                self._live().steps[text.node] = text
            elif text.at_once or self._due(text.node + " step", 0) is not None:
                super().log(text)

    def progress(self, node: str, sent: int, total: int) -> None:
        """As model.progress.OnProgress."""
        with self._lock:
            if self._over:
                return
            if interactive():
                bars = self._live()
                if node not in self._tasks:
                    self._tasks[node] = bars.add_task(node, total=total)
                bars.update(self._tasks[node], completed=sent, total=total)
            elif reported := self._due(node, sent, over=sent >= total):
                super().log(_line(node, sent, total, reported, self._now()))

    def _live(self) -> _Bars:
        if self._bars is None:
            self._bars = _Bars(self.err)
            uninterrupted(self._bars.start)
        return self._bars

    def _due(self, node: str, sent: int, *, over: bool = False) -> _Reported | None:
        """Its first report, if a line is to be printed now."""
        now = self._now()
        reported = self._reported.setdefault(node, _Reported(now, sent, now))
        before, reported.over = reported.over, over
        if before and over:  # the end is said once, and an engine that unpacks goes on reporting it
            return None
        if now - reported.last < EVERY and not (over and reported.lines):
            return None
        reported.last, reported.lines = now, reported.lines + 1
        return reported


class _Bars(Progress):
    """With a line for each node below the bars."""

    def __init__(self, console: Console) -> None:
        self.steps: dict[str, Step] = {}
        columns = (BarColumn(BAR), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        super().__init__(TextColumn("{task.description}"), *columns, console=console, transient=True)

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.tasks:
            yield self.make_tasks_table(self.tasks)
        for step in [*self.steps.values()]:
            yield Text(step, style="dim", no_wrap=True, overflow="ellipsis")


def _line(node: str, sent: int, total: int, reported: _Reported, now: float) -> str:
    seconds = now - reported.since
    rate = (sent - reported.sent) / seconds if seconds > 0 else 0.0
    if sent >= total:
        return f"{node}: {decimal(sent)} in {_duration(seconds)}"
    left = f", {_duration((total - sent) / rate)} left" if rate else ""
    return f"{node}: {decimal(sent)} of {decimal(total)}, {decimal(round(rate))}/s{left}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
