"""Lines for a terminal: broken at spaces, with each command that a user may copy on a line of its own. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rich.cells import cell_len

HANGING = 2  # columns by which the lines after the first one are indented
_PROGRAMS = r"chmod|df|docker|kill|launcher|mount|nvidia-smi|pip|python|rsync|ssh|ssh-\w+|sudo|systemctl"
# After a colon or an arrow, until the sentence ends or goes on
_COMMAND = re.compile(rf"(?:(?<=: )|(?<=> ))(?:{_PROGRAMS}) (?:(?![;,.](?: |$)| {{2}}| \().)+")
_BETWEEN = re.compile(r"[;,.]? +|[;,.]$")  # what separates a command from the text that follows


@dataclass(frozen=True)
class Line:
    """A part of the text, from start to end, and its indentation."""

    start: int
    end: int
    indent: int = 0


def lines(text: str, width: int) -> Iterator[Line]:
    """Yield the lines of the text; those that fit into `width` columns are not changed."""
    at = 0
    for paragraph in text.split("\n"):
        if cell_len(paragraph) <= width:
            yield Line(at, at + len(paragraph))
        else:
            yield from _broken(text, at, at + len(paragraph), width)
        at += len(paragraph) + 1


def _broken(text: str, start: int, end: int, width: int) -> Iterator[Line]:
    own = len(text[start:end]) - len(text[start:end].lstrip())  # the first line has it already
    rest = own + HANGING
    at, indent = start, 0
    for command in _COMMAND.finditer(text, start, end):
        yield from _words(text, at, command.start(), width, indent, rest)
        yield Line(command.start(), command.end(), rest + HANGING)
        between = _BETWEEN.match(text, command.end(), end)
        at, indent = between.end() if between else command.end(), rest
    yield from _words(text, at, end, width, indent, rest)


def _words(text: str, start: int, end: int, width: int, indent: int, rest: int) -> Iterator[Line]:
    """Yield lines of whole words. indent: of the first one; rest: of the others."""
    last = start
    for word in re.compile(r"\S+").finditer(text, start, end):
        if last > start and indent + cell_len(text[start : word.end()]) > width:
            yield Line(start, last, indent)
            start, indent = word.start(), rest
        last = word.end()
    if last > start:
        yield Line(start, last, indent)
