"""A progress bar per node while an image is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from launcher.cli import terminal
from launcher.cli.options import interactive
from launcher.image.image_locations import OnProgress, no_progress

if TYPE_CHECKING:  # rich is loaded when the first byte is sent, and most starts send none
    from rich.progress import Progress, TaskID


@contextmanager
def bars() -> Iterator[OnProgress]:
    """Show bytes and the time that is left, on a terminal only."""
    if not interactive():
        yield no_progress
        return
    shown: list[Progress] = []
    tasks: dict[str, TaskID] = {}
    lock = threading.Lock()  # each node is reported by a thread of its own
    with ExitStack() as stack:

        def show(node: str, sent: int, total: int) -> None:
            with lock:
                if not shown:
                    shown.append(stack.enter_context(_progress()))
                if node not in tasks:
                    tasks[node] = shown[0].add_task(node)
            shown[0].update(tasks[node], completed=sent, total=total)

        yield show


def _progress() -> Progress:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=terminal.console(stderr=True), transient=True)
