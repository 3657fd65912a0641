"""The values of secrets, masked where they are shown and in what is kept of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

MASK = "***"


class Masker:
    """Replaces the values of secrets. A value shorter than 4 characters is left: masking it would garble every line."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        whole = [part for value in values for part in (value, *value.splitlines())]
        escaped = [json.dumps(part)[1:-1] for part in whole]  # as it is in error files and metrics
        # The longest first: one secret may contain another.
        parts = {part for part in (*whole, *escaped) if len(part) >= 4}
        self._values: Sequence[str] = sorted(parts, key=len, reverse=True)
        self._bytes = [value.encode("utf-8", "surrogateescape") for value in self._values]
        self.longest = max(map(len, self._bytes), default=0)  # bytes; 0 where there is nothing to mask

    def __call__(self, line: str) -> str:
        for value in self._values:
            line = line.replace(value, MASK)
        return line

    def in_place(self, data: bytes) -> bytes:
        """Every byte of a secret replaced by *: the length is that of the file on the node, where reading goes on."""
        for value in self._bytes:
            data = data.replace(value, b"*" * len(value))
        return data

    def deep(self, value: Any) -> Any:
        """All text in a value that JSON can hold."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, dict):
            return {key: self.deep(inner) for key, inner in value.items()}
        return [self.deep(inner) for inner in value] if isinstance(value, list) else value
