"""Commands of this machine on the caller's own terminal, or pipes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence


def is_terminal() -> bool:
    """Whether stdin and stdout are a terminal."""
    return os.isatty(0) and os.isatty(1)


def here(
    argv: Sequence[str],
    *,
    terminal: bool,
    interrupt: Callable[[], None] | None = None,
    env: dict[str, str] | None = None,
    cwd: str | None = None,
) -> int:
    """Run a command of this machine to its end, on the caller's terminal or pipes; its exit code. Raises OSError.

    interrupt: what Ctrl-C does; None: the command gets it itself, as every program in the foreground does.
    """
    apart = interrupt is not None and not terminal
    with subprocess.Popen(argv, env=env, cwd=cwd, start_new_session=apart) as process:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the command's
        if apart and interrupt is not None:
            signal.signal(signal.SIGINT, lambda *_: interrupt())
        try:
            process.wait()
        finally:
            signal.signal(signal.SIGINT, before)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
