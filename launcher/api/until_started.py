"""What a Ctrl-C says before a run has started. Loaded before everything else that starts one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from launcher.errors import LauncherError


@contextmanager
def until_started(started: threading.Event | None = None) -> Iterator[None]:
    """Make Ctrl-C report whether anything was started. started: set when every container is running."""
    try:
        yield
    except KeyboardInterrupt as stop:
        nothing = "nothing was started, and nothing remains on the nodes"
        if isinstance(stop.__cause__, LauncherError):  # it failed as well, or something remains there
            nothing = str(stop.__cause__)
        raise KeyboardInterrupt(
            "to see the run: launcher status" if started and started.is_set() else nothing
        ) from None
