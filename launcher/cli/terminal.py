"""Terminal output: the launcher's messages, and text from nodes without escape sequences that control the terminal.

Only this module enforces it: every Console is created here, and plain lines and followed output pass through it. It
also masks the secrets that this process knows (records.masking): a text is masked before it is cut or escaped.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from functools import cached_property
from typing import Any, TextIO

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.text import Text

from launcher.cli import wrapping
from launcher.records.masking import printed

# All of C0 except tab and line feed, DEL, C1, bidirectional controls, and surrogates, which cannot be encoded
_CONTROL = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
# ECMA-48: CSI up to its final byte; OSC, DCS, SOS, PM and APC up to BEL or ST; other sequences
_SEQUENCE = (
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"
    "|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c)?"
    "|\x1b[ -/]*[0-~]"
)
_ESCAPED = re.compile(f"{_CONTROL}+")
# Runs of controls at once, but none that may begin a sequence: a program may print megabytes of them
_RUN = f"(?P<run>(?:(?![\x1b\x90\x98\x9b\x9d-\x9f]){_CONTROL})+|[\x1b\x9b]+(?=[\x1b\x9b]))"
_FILTERED = re.compile(f"{_SEQUENCE}|{_RUN}|{_CONTROL}")
_WIDEST = 10_000  # columns
_COLOUR = re.compile("\x1b\\[[0-9;:]*m")


def escaped(text: str) -> str:
    """Replace control characters by escapes such as `\\x1b`."""
    return _ESCAPED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def coloured(text: str) -> str:
    """Keep the colours of a program's line and remove all other escape sequences."""

    def keep(found: re.Match[str]) -> str:
        if len(found[0]) == 1 or found["run"]:
            return escaped(found[0])
        return found[0] if _COLOUR.fullmatch(found[0]) else ""

    return text if text.isprintable() else _FILTERED.sub(keep, text)


class SafeConsole(Console):
    """Passes all text through `escaped` before colours are added, and breaks long lines if it is a terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print lines of text, with a hanging indentation, or anything else as rich does.

        Messages without a place, as on a full disk, do not end the command.
        """
        try:
            self._print(*objects, **options)
        except OSError:
            if not self.stderr:
                raise
            discard(sys.stderr)

    def _print(self, *objects: Any, **options: Any) -> None:
        text, *more = objects or ("",)
        if isinstance(text, str):
            text = printed(text)
            objects = (text, *more)
        if more or not isinstance(text, (str, Text)) or not (self.is_terminal and self.soft_wrap):
            super().print(*objects, **options)
            return
        text = self.render_str(text) if isinstance(text, str) else text
        for line in wrapping.lines(text.plain, self.width):
            super().print(Text(" " * line.indent) + text[line.start : line.end], **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escaped(printed(segment.text)), segment.style)


def console(*, stderr: bool = False, soft_wrap: bool = True) -> Console:
    return SafeConsole(stderr=stderr, highlight=False, emoji=False, soft_wrap=soft_wrap)  # a file may be named :fire:


def table_console(*, stderr: bool = False) -> Console:
    """For a table. In a pipe its lines are as long as they need to be: what was cut there would be lost."""
    made = console(stderr=stderr, soft_wrap=False)
    if not made.is_terminal:
        made.width = _WIDEST
    return made


def say(text: str, *, nl: bool = True) -> None:
    """Print to stdout what a command was asked for."""
    typer.echo(escaped(printed(text)), nl=nl)


def say_json(value: Any) -> None:
    typer.echo(printed(json.dumps(value, indent=2)))


def note(text: str) -> None:
    """Print a line to stderr that is no message of the launcher about a run."""
    console(stderr=True).print(escape(printed(text)))


def show_error(text: str) -> None:
    console(stderr=True).print(f"[bold red]error[/] {escape(printed(text))}")


def interactive() -> bool:
    """Return whether stderr is a terminal that can show progress lines."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def discard(stream: TextIO) -> None:
    """Discard all further writes to a stream without a reader or a place, including those at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class Reporter:
    """Prints the launcher's messages to stderr, as plain lines if it is not a terminal."""

    @cached_property
    def err(self) -> Console:
        return console(stderr=True)

    def warn(self, text: str) -> None:
        self.log(f"warning: {text}")

    def log(self, text: str) -> None:
        text = printed(text)
        if not interactive():
            try:
                sys.stderr.write(f"launcher: {escaped(text)}\n")  # one write, or the exit comes between the two
                sys.stderr.flush()
            except OSError:  # without a reader, or a full disk
                discard(sys.stderr)
            return
        self.err.print(f"[dim]launcher:[/] {escape(text)}")
