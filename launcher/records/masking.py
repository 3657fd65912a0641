"""Masking of secret values, in output and in the files of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

MASK = "***"


class Masker:
    """Replaces secret values. Values shorter than 4 characters are not masked: that would garble every line."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        whole = [part for value in values for part in (value, *value.splitlines())]
        escaped = [json.dumps(part)[1:-1] for part in whole]  # as written in error files and metrics
        # Longest first: one secret may contain another.
        parts = {part for part in (*whole, *escaped) if len(part) >= 4}
        self._values: Sequence[str] = sorted(parts, key=len, reverse=True)
        self._bytes = [value.encode("utf-8", "surrogateescape") for value in self._values]
        self.longest = max(map(len, self._bytes), default=0)  # bytes; 0 if there are no secrets
        lengths = "|".join(rf"\*{{{size}}}" for size in sorted({*map(len, self._bytes)}))
        self._in_place = re.compile(rf"(?<!\*)(?:{lengths})(?!\*)") if lengths else None

    def __call__(self, line: str) -> str:
        """Mask a text for display. One that was masked in a file gets the same mask, which does not show the length."""
        if self._in_place is not None and "****" in line:
            line = self._in_place.sub(MASK, line)
        for value in self._values:
            line = line.replace(value, MASK)
        return line

    def in_place(self, data: bytes) -> bytes:
        """Replace every byte of a secret by *, for a copy, whose length must stay that of the file on the node: it is
        the offset from which any launcher continues.
        """
        for value in self._bytes:
            data = data.replace(value, b"*" * len(value))
        return data

    def deep(self, value: Any) -> Any:
        """Mask all text in a JSON value."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, dict):
            return {key: self.deep(inner) for key, inner in value.items()}
        return [self.deep(inner) for inner in value] if isinstance(value, list) else value
