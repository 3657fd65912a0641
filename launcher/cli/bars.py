"""A bar a node while an image is on its way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from launcher.cli.options import interactive
from launcher.image.progress import Progress as Sent
from launcher.image.progress import Tell, silent

if TYPE_CHECKING:  # rich is loaded when the first byte travels, and in most starts none does
    from rich.progress import Progress, TaskID


@contextmanager
def bars() -> Iterator[Tell]:
    """A bar a node with bytes and the time that is left, where a person is watching."""
    if not interactive():
        yield silent
        return
    shown: list[Progress] = []
    tasks: dict[str, TaskID] = {}
    lock = threading.Lock()  # every node has a thread that tells
    with ExitStack() as stack:

        def tell(sent: Sent) -> None:
            with lock:
                if not shown:
                    shown.append(stack.enter_context(_progress()))
                if sent.node not in tasks:
                    tasks[sent.node] = shown[0].add_task(sent.node, total=sent.total)
            shown[0].update(tasks[sent.node], completed=sent.total if sent.done else sent.sent)

        yield tell


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
