"""Contents of a data set, to compare two ranks, or a run and its checkpoint, without reading images."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from train.data.source import Dataset, Source


@dataclass(frozen=True)
class Listed:
    """One split of a data set."""

    files: Sequence[str]  # empty if images have only numbers
    labels: NDArray[np.int64]
    sizes: NDArray[np.int64] | None  # bytes, if the index has them

    def name(self, index: int) -> str:
        return self.files[index] if self.files else f"image {index}"


@dataclass(frozen=True)
class Digest:
    """SHA-256 of names, order and labels, and of sizes; "" if sizes are unknown, which matches any sizes."""

    names: str
    sizes: str

    def same(self, other: Digest) -> bool:
        return self.names == other.names and (not self.sizes or not other.sizes or self.sizes == other.sizes)


@dataclass(frozen=True)
class Contents:
    """Classes and splits, in a form that can be sent to another rank."""

    classes: Sequence[str]
    splits: dict[str, Listed]

    @staticmethod
    def of(dataset: Dataset) -> Contents:
        return Contents(tuple(dataset.classes), {"train": _listed(dataset.train), "val": _listed(dataset.val)})

    def digest(self, *splits: str) -> Digest:
        """Return the digest of these splits and the classes."""
        names, sizes, sized = hashlib.sha256(), hashlib.sha256(), True
        names.update("\0".join(self.classes).encode(errors="surrogateescape"))
        for split in splits:
            listed = self.splits[split]
            names.update(f"\0{split} {len(listed.labels)}\0".encode())
            names.update("\0".join(listed.files).encode(errors="surrogateescape"))
            names.update(listed.labels.tobytes())
            if listed.sizes is None:
                sized = False
            else:
                sizes.update(listed.sizes.tobytes())
        return Digest(names.hexdigest(), sizes.hexdigest() if sized else "")

    def difference(self, other: Contents) -> str | None:
        """Describe the first difference from `other`, or return None."""
        return next(self._differences(other), None)

    def _differences(self, other: Contents) -> Iterator[str]:
        if text := _moved("class", self.classes, other.classes):
            yield text
        for split, mine in self.splits.items():
            theirs = other.splits[split]
            if text := _moved("image", mine.files, theirs.files):
                yield text
            if len(mine.labels) != len(theirs.labels):
                yield f"{len(mine.labels)} images in {split}, not {len(theirs.labels)}"
                continue
            for index in np.flatnonzero(mine.labels != theirs.labels)[:1]:
                yield f"{mine.name(index)} of class {mine.labels[index]}, not {theirs.labels[index]}"
            if mine.sizes is not None and theirs.sizes is not None:
                for index in np.flatnonzero(mine.sizes != theirs.sizes)[:1]:
                    yield f"{mine.name(index)} of {mine.sizes[index]} bytes, not {theirs.sizes[index]}"


def _listed(source: Source) -> Listed:
    return Listed(source.files, source.labels, source.sizes)


def _moved(what: str, mine: Sequence[str], theirs: Sequence[str]) -> str | None:
    """Describe the first difference between two lists of names."""
    index = next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    if index == len(mine) == len(theirs):
        return None
    if index < len(theirs) and theirs[index] not in mine:
        return f"no {what} {theirs[index]}"
    if index < len(mine) and mine[index] not in theirs:
        return f"an additional {what}, {mine[index]}"
    if index < min(len(mine), len(theirs)):
        return f"the {what} {mine[index]} instead of {theirs[index]}"
    return f"{len(mine)} {what} names, not {len(theirs)}"
