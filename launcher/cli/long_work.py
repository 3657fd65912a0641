"""Progress display of long steps before a run: pulling, sending, unpacking and building images, importing torch."""

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
from launcher.model.progress import StatusLine
from launcher.node.parallel import uninterrupted

EVERY = 30.0  # seconds between two lines of a node, if stderr is not a terminal
BAR = 20  # columns


@dataclass
class _Reported:
    """First report of a node, and the time of its last printed line."""

    since: float
    sent: int
    last: float
    lines: int = 0
    over: bool = False


class LongWork(Reporter):
    """Messages and progress of long steps. `log` and `progress` may be called by several threads.

    On a terminal, each node has a bar with bytes, rate and time left, and its last status line is shown below the bars.
    Otherwise each node gets a line every 30 s, a line for each `immediate` one, and a line at the end of a transfer
    that took longer than 30 s.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._bars: _Bars | None = None  # created with the first byte or StatusLine: most starts have none
        self._tasks: dict[str, TaskID] = {}
        self._reported: dict[str, _Reported] = {}
        self._lock = threading.RLock()
        self._over = False  # after a Ctrl-C, threads may still report progress; only messages are shown then

    def __enter__(self) -> LongWork:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._over = True
            if self._bars is not None:
                uninterrupted(self._bars.stop)

    def log(self, text: str) -> None:
        with self._lock:
            if not isinstance(text, StatusLine):
                if self._bars is not None:
                    self._bars.steps.clear()
                super().log(text)
            elif self._over:
                return
            elif interactive():
                self._live().steps[text.node] = text
            elif text.immediate or self._due(text.node + " step", 0) is not None:
                super().log(text)

    def progress(self, node: str, sent: int, total: int) -> None:
        """Report progress, as model.progress.OnProgress."""
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
        """Return the node's first report if a line is due now, else None."""
        now = self._now()
        reported = self._reported.setdefault(node, _Reported(now, sent, now))
        before, reported.over = reported.over, over
        if before and over:  # printed once; an engine that unpacks keeps reporting the end
            return None
        if now - reported.last < EVERY and not (over and reported.lines):
            return None
        reported.last, reported.lines = now, reported.lines + 1
        return reported


class _Bars(Progress):
    """Progress bars, with a line for each node below them."""

    def __init__(self, console: Console) -> None:
        self.steps: dict[str, StatusLine] = {}
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
