"""The launcher's own messages: a line each, on stderr."""

from __future__ import annotations

import sys
from functools import cached_property
from typing import TYPE_CHECKING

from launcher.cli import terminal
from launcher.cli.options import interactive

if TYPE_CHECKING:  # rich is loaded where it is first needed, which in a start is after the containers run
    from rich.console import Console


class Reporter:
    """Plain lines where stderr is no terminal."""

    @cached_property
    def err(self) -> Console:
        return terminal.console(stderr=True)

    def warn(self, text: str) -> None:
        self.log(f"warning: {text}")

    def log(self, text: str) -> None:
        if not interactive():
            print(f"launcher: {terminal.escaped(text)}", file=sys.stderr, flush=True)
            return
        from rich.markup import escape

        self.err.print(f"[dim]launcher:[/] {escape(text)}")
