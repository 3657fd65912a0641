"""Which images a data set has, without reading them: whether two ranks, or a run and its checkpoint, have the same."""

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

    files: Sequence[str]  # empty where images have only numbers
    labels: NDArray[np.int64]
    sizes: NDArray[np.int64] | None  # bytes, where the index has them

    def name(self, index: int) -> str:
        return self.files[index] if self.files else f"image {index}"


@dataclass(frozen=True)
class Digest:
    """SHA-256 of names, order and labels, and of sizes; "" without sizes, which then differ from no others."""

    names: str
    sizes: str

    def same(self, other: Digest) -> bool:
        return self.names == other.names and (not self.sizes or not other.sizes or self.sizes == other.sizes)


@dataclass(frozen=True)
class Contents:
    """Classes and splits, as they can be sent to another rank."""

    classes: Sequence[str]
    splits: dict[str, Listed]

    @staticmethod
    def of(dataset: Dataset) -> Contents:
        return Contents(tuple(dataset.classes), {"train": _listed(dataset.train), "val": _listed(dataset.val)})

    def digest(self, *splits: str) -> Digest:
        """Of these splits and the classes."""
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
        """How this one differs from the other, with the first name that does."""
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
    """The first name by which two lists differ."""
    place = next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    if place == len(mine) == len(theirs):
        return None
    if place < len(theirs) and theirs[place] not in mine:
        return f"no {what} {theirs[place]}"
    if place < len(mine) and mine[place] not in theirs:
        return f"one more {what}, {mine[place]}"
    if place < min(len(mine), len(theirs)):
        return f"the {what} {mine[place]} in place of {theirs[place]}"
    return f"{len(mine)} times a {what}, not {len(theirs)}"
