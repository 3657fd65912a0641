"""Local commands on the caller's terminal or pipes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence


def is_terminal() -> bool:
    """Whether stdin and stdout are a terminal."""
    return os.isatty(0) and os.isatty(1)


def run_attached(
    argv: Sequence[str],
    *,
    terminal: bool,
    interrupt: Callable[[], None] | None = None,
    env: dict[str, str] | None = None,
    cwd: str | None = None,
) -> int:
    """Run a local command on the caller's terminal or pipes and return its exit code. Raises OSError.

    interrupt: called on Ctrl-C; None: Ctrl-C reaches the command itself, as any program in the foreground.
    """
    new_session = interrupt is not None and not terminal
    with subprocess.Popen(argv, env=env, cwd=cwd, start_new_session=new_session) as process:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the command handles it
        if new_session and interrupt is not None:
            signal.signal(signal.SIGINT, lambda *_: interrupt())
        try:
            process.wait()
        finally:
            signal.signal(signal.SIGINT, before)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
