"""Contents of a data set, to compare two ranks, or a run and its checkpoint.

Names, labels and sizes are compared without reading images. Of the images themselves, ranks compare all checksums that
need no reading (a packed file's, or those of images in memory), otherwise those of some images.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from train.data import reading
from train.data.loader import POLL, Stalls
from train.data.source import Dataset, Source

READ = 32  # images per split; the same ones on every rank
READERS = 8  # threads


@dataclass(frozen=True)
class Listed:
    """One split of a data set."""

    files: Sequence[str]  # empty if images have only numbers
    labels: NDArray[np.int64]
    sizes: NDArray[np.int64] | None  # bytes, if the index has them
    checksums: NDArray[np.uint32] | None = None  # CRC-32 of all images, if known
    read: NDArray[np.uint32] | None = None  # CRC-32 of the images of `chosen`; 0 for an image that cannot be read

    def name(self, index: int) -> str:
        return self.files[index] if self.files else f"image {index}"


@dataclass(frozen=True)
class Digest:
    """SHA-256 of names, order and labels; of sizes, all checksums, some checksums: "" if unknown, which matches any."""

    names: str
    sizes: str
    checksums: str = ""
    read: str = ""

    def same(self, other: Digest) -> bool:
        pairs = ((self.sizes, other.sizes), (self.checksums, other.checksums), (self.read, other.read))
        return self.names == other.names and all(not mine or not theirs or mine == theirs for mine, theirs in pairs)


@dataclass(frozen=True)
class Contents:
    """Classes and splits, in a form that can be sent to another rank."""

    classes: Sequence[str]
    splits: dict[str, Listed]

    @staticmethod
    def of(dataset: Dataset, read_within: float | None = None) -> Contents:
        """Return the contents; `read_within`: seconds to read the images that ranks compare, None to read none.

        Raises:
            TrainError: a read takes longer.
        """
        sources = {"train": dataset.train, "val": dataset.val}
        return Contents(tuple(dataset.classes), {name: _listed(each, read_within) for name, each in sources.items()})

    def digest(self, *splits: str) -> Digest:
        """Return the digest of these splits and the classes."""
        names = hashlib.sha256()
        names.update("\0".join(self.classes).encode(errors="surrogateescape"))
        for split in splits:
            listed = self.splits[split]
            names.update(f"\0{split} {len(listed.labels)}\0".encode())
            names.update("\0".join(listed.files).encode(errors="surrogateescape"))
            names.update(listed.labels.tobytes())
        all_listed = [self.splits[split] for split in splits]
        return Digest(
            names.hexdigest(),
            _digest([listed.sizes for listed in all_listed]),
            _digest([listed.checksums for listed in all_listed]),
            _digest([listed.read for listed in all_listed]),
        )

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
            if mine.checksums is not None and theirs.checksums is not None:
                for index in np.flatnonzero(mine.checksums != theirs.checksums)[:1]:
                    yield f"{mine.name(index)} with other content"
            elif mine.read is not None and theirs.read is not None:
                for index in chosen(len(mine.labels))[mine.read != theirs.read][:1]:
                    yield f"{mine.name(index)} with other content"


def chosen(images: int) -> NDArray[np.int64]:
    """Return the indices of the images that are read, evenly distributed over the data set."""
    return np.linspace(0, images - 1, min(READ, images)).astype(np.int64)


def _digest(parts: Sequence[NDArray[np.generic] | None]) -> str:
    total = hashlib.sha256()
    for part in parts:
        if part is None:
            return ""
        total.update(part.tobytes())
    return total.hexdigest()


def _listed(source: Source, read_within: float | None) -> Listed:
    if read_within is None:
        return Listed(source.files, source.labels, source.sizes)
    known = source.checksums
    indices = chosen(len(source.labels))
    read = _read(source, indices, Stalls(read_within)) if known is None else known[indices]
    return Listed(source.files, source.labels, source.sizes, known, read)


def _read(source: Source, indices: NDArray[np.int64], stalls: Stalls) -> NDArray[np.uint32]:
    """Return the CRC-32 of these images. Raises TrainError if a read takes too long."""

    def one(index: int) -> int:
        try:
            data = reading.read(source, index)
            return zlib.crc32(data if isinstance(data, bytes) else data.tobytes())
        except OSError:  # the loader reports it; where only one rank cannot read it, it counts as a difference
            return 0

    pool = ThreadPoolExecutor(READERS, "compare")
    try:
        tasks = [pool.submit(one, int(index)) for index in indices]
        while wait(tasks, POLL).not_done:
            stalls.check()
        return np.array([task.result() for task in tasks], np.uint32)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a read may never return


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
