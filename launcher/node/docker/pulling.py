"""How far an engine is with pulling an image, from the events of its API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

_LOADED = ("Verifying Checksum", "Download complete", "Extracting", "Pull complete")


@dataclass
class PullProgress:
    """The layers that the engine lacks, as far as its events tell."""

    _loaded: dict[str, int] = field(default_factory=dict)  # bytes by layer; 0: it waits
    _sizes: dict[str, int] = field(default_factory=dict)  # bytes by layer, once its download has begun
    _complete: set[str] = field(default_factory=set)  # downloaded
    _unpacked: set[str] = field(default_factory=set)

    def take(self, event: Mapping[str, Any]) -> None:
        """Any event of `POST /images/create`; what it does not tell stays as it was."""
        layer, status, detail = event.get("id"), event.get("status"), event.get("progressDetail")
        if not isinstance(layer, str) or not isinstance(status, str):
            return
        current, total = _number(detail, "current"), _number(detail, "total")
        if status == "Downloading":
            self._loaded[layer] = max(current, self._loaded.get(layer, 0))
            self._sizes[layer] = max(total, self._loaded[layer])
        elif status in ("Pulling fs layer", "Waiting"):
            self._loaded.setdefault(layer, 0)
        elif status in _LOADED and layer in self._loaded:
            self._complete.add(layer)
            self._loaded[layer] = self._sizes.setdefault(layer, self._loaded[layer])
            if status == "Pull complete":
                self._unpacked.add(layer)

    @property
    def received(self) -> int:
        """Bytes that were downloaded."""
        return sum(self._loaded.values())

    @property
    def total(self) -> int:
        """Bytes in all; a layer whose download has not begun, so that its size is not known, counts as the median."""
        waiting = len(self._loaded) - len(self._sizes)
        known = [size for size in self._sizes.values() if size]
        return sum(known) + (round(median(known)) * waiting if known else 0)

    @property
    def unpacking(self) -> str:
        """`unpacking, 3 of 7 layers done`, once all is downloaded; "" before, and when it is done."""
        count = len(self._loaded)
        if len(self._complete) < count or len(self._unpacked) == count:
            return ""
        return f"unpacking, {len(self._unpacked)} of {count} layers done"


def _number(detail: object, key: str) -> int:
    value = detail.get(key) if isinstance(detail, Mapping) else None
    return value if isinstance(value, int) and value > 0 else 0
