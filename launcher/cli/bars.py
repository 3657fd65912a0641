"""A bar a node while an image is on its way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from launcher.cli.options import interactive
from launcher.image.ship import Progress as Sent
from launcher.image.ship import Tell


@contextmanager
def bars() -> Iterator[Tell]:
    """A bar a node with bytes and the time that is left, where a person is watching."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not interactive(), transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def tell(sent: Sent) -> None:
            if sent.node not in tasks:
                tasks[sent.node] = progress.add_task(sent.node, total=sent.total)
            progress.update(tasks[sent.node], completed=sent.total if sent.done else sent.sent)

        yield tell
