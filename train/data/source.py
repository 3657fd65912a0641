"""The interface of data sets: numbered, labelled, named items that can be read from any thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Data = bytes | memoryview  # an encoded image


class Place(NamedTuple):
    """Where an item is: in a file, or in a part of an open one."""

    path: bytes | None
    descriptor: int = -1
    offset: int = 0
    size: int = 0


class Source(Protocol):
    """Items 0..n-1. `read` is called from several threads concurrently."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """(n,) class numbers."""

    @property
    def files(self) -> Sequence[str]:
        """(n,) names, relative to the data set; empty if items have only numbers."""

    @property
    def sizes(self) -> NDArray[np.int64] | None:
        """(n,) bytes, if the index of the data set has them."""

    @property
    def checksums(self) -> NDArray[np.uint32] | None:
        """(n,) CRC-32 of the items, if they are known without reading each."""

    def name(self, index: int) -> str:
        """Return the item's origin, for messages."""

    def read(self, index: int) -> bytes | Pixels:
        """Read an encoded image, or decoded pixels (H, W, 3)."""

    def place(self, index: int) -> Place | None:
        """Return where the encoded image is, None if only `read` can read it."""


@dataclass(frozen=True)
class Dataset:
    """A training and a validation source over the same classes."""

    classes: Sequence[str]
    train: Source
    val: Source
