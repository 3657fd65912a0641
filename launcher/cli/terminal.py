"""Text on its way to a person's terminal: what comes from a node cannot drive it.

The one place where that is seen to: every Console is made here, and plain lines and followed output pass here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rich is loaded where it is first needed, which in a start is after the containers run
    from rich.console import Console

# All of C0 but tab and line feed, DEL, C1, what reorders text, and what no terminal can encode
_CONTROL = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
# ECMA-48: CSI up to its final byte; OSC, DCS, SOS, PM and APC up to BEL or ST; other sequences
_SEQUENCE = (
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"
    "|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c)?"
    "|\x1b[ -/]*[0-~]"
)
_ESCAPED = re.compile(_CONTROL)
_FILTERED = re.compile(f"{_SEQUENCE}|{_CONTROL}")
_COLOUR = re.compile("\x1b\\[[0-9;:]*m")


def escaped(text: str) -> str:
    """With `\\x1b` in place of such a character."""
    return _ESCAPED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def coloured(text: str) -> str:
    """A program's line: its colours stay, its other sequences are taken out."""

    def keep(found: re.Match[str]) -> str:
        if len(found[0]) == 1:
            return escaped(found[0])
        return found[0] if _COLOUR.fullmatch(found[0]) else ""

    return text if text.isprintable() else _FILTERED.sub(keep, text)


def console(*, stderr: bool = False, soft_wrap: bool = True) -> Console:
    """Whatever is printed with it passes `escaped`; its own colours are added after that."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Safe(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(escaped(segment.text), segment.style)

    return Safe(stderr=stderr, highlight=False, soft_wrap=soft_wrap)
