"""Progress of an image pull, from the events of the Engine API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

_LOADED = ("Verifying Checksum", "Download complete", "Extracting", "Pull complete")


@dataclass
class PullProgress:
    """The layers that the engine has to pull, as far as its events report them."""

    _loaded: dict[str, int] = field(default_factory=dict)  # bytes by layer; 0: waiting
    _sizes: dict[str, int] = field(default_factory=dict)  # bytes by layer, known once its download has started
    _complete: set[str] = field(default_factory=set)  # downloaded
    _unpacked: set[str] = field(default_factory=set)

    def take(self, event: Mapping[str, Any]) -> None:
        """Update from an event of `POST /images/create`; events without progress are ignored."""
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
        """Bytes downloaded."""
        return sum(self._loaded.values())

    @property
    def total(self) -> int:
        """Total bytes; the median stands for layers of unknown size, whose download has not started."""
        waiting = len(self._loaded) - len(self._sizes)
        known = [size for size in self._sizes.values() if size]
        return sum(known) + (round(median(known)) * waiting if known else 0)

    @property
    def unpacking(self) -> str:
        """`unpacking, 3 of 7 layers done` after the download; "" before, and when all are unpacked."""
        count = len(self._loaded)
        if len(self._complete) < count or len(self._unpacked) == count:
            return ""
        return f"unpacking, {len(self._unpacked)} of {count} layers done"


def _number(detail: object, key: str) -> int:
    value = detail.get(key) if isinstance(detail, Mapping) else None
    return value if isinstance(value, int) and value > 0 else 0
