"""From bytes that arrive in pieces to lines that a person reads."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

MASK = "***"


class Lines:
    """Cuts a byte stream into lines, wherever its pieces end, also in the middle of a character.

    Broken UTF-8 becomes U+FFFD. Of a line that a progress bar rewrote with carriage returns the last state remains.
    """

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """The lines that are complete now, without their ends."""
        text = self._decode.decode(piece)
        if "\n" not in text:
            self._rest.append(text)
            return []
        *whole, rest = ("".join(self._rest) + text).split("\n")
        self._rest = [rest]
        return [_last_state(line) for line in whole]

    def end(self) -> list[str]:
        """What is left when the stream has ended without a line end."""
        rest = "".join(self._rest) + self._decode.decode(b"", final=True)
        self._rest = []
        return [_last_state(rest)] if rest else []


def _last_state(line: str) -> str:
    """`10%\\r20%\\r` reads as `20%`."""
    if "\r" not in line:
        return line
    return next((part for part in reversed(line.split("\r")) if part), "")


class Masker:
    """Replaces the values of secrets. A value shorter than 4 characters is left: masking it would garble every line."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        # The longest first: one secret may contain another.
        parts = {part for value in values for part in (value, *value.splitlines()) if len(part) >= 4}
        self._values: Sequence[str] = sorted(parts, key=len, reverse=True)

    def __call__(self, line: str) -> str:
        for value in self._values:
            if value in line:
                line = line.replace(value, MASK)
        return line
