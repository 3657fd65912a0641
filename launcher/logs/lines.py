"""Split byte streams that arrive in pieces into lines for display."""

from __future__ import annotations

import codecs

LONGEST = 1 << 21  # characters; a longer line is split there, so that it is shown in bounded pieces


class Lines:
    """Splits a byte stream into lines, however it is split into pieces, even within a character.

    Invalid UTF-8 becomes U+FFFD. Of a line that a progress bar rewrites with carriage returns, only the last state is
    kept; `state` has it until the line is complete.
    """

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest: list[str] = []
        self._length = 0  # of the rest

    def feed(self, piece: bytes) -> list[str]:
        """Return the lines that are complete now, without line ends."""
        text = self._decode.decode(piece)
        if "\n" not in text and "\r" not in text and self._length + len(text) < LONGEST:
            self._rest.append(text)
            self._length += len(text)
            return []
        *whole, rest = ("".join(self._rest) + text).split("\n")
        if len(rest) >= LONGEST:
            whole, rest = [*whole, rest], ""
        if "\r" in rest:
            rest = f"\r{_last_state(rest)}" + "\r" * rest.endswith("\r")
        self._rest, self._length = [rest], len(rest)
        return [_last_state(line) for line in whole]

    @property
    def state(self) -> str:
        """The current state of a line that is being rewritten; "" if there is none."""
        return _last_state("".join(self._rest)) if self._rest and self._rest[0].startswith("\r") else ""

    def end(self) -> list[str]:
        """Return the rest of a stream that has ended without a line end."""
        rest = "".join(self._rest) + self._decode.decode(b"", final=True)
        self._rest, self._length = [], 0
        return [_last_state(rest)] if rest.strip("\r") else []


def _last_state(line: str) -> str:
    """`10%\\r20%\\r` reads as `20%`."""
    if "\r" not in line:
        return line
    return next((part for part in reversed(line.split("\r")) if part), "")
