"""The packed format: one file with consecutive records and an index at the end. Random access, so a true shuffle.

0   8 bytes  magic: TRNPACK2
8   uint64   offset of the index
16  uint64   length of the index
24  32 bytes SHA-256 of the index
56  records  JPEG files, or raw pixels (height, width, 3)
index        one line of JSON {classes, splits: {train: n, val: m}}, then int64 offsets (n + m + 1), int32 labels,
             int32 heights, int32 widths (0 for JPEG files), uint32 CRC-32 of the records, and the names in the original
             data set, separated by zero bytes
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from train.data.source import Dataset, Pixels, Place
from train.errors import TrainError

KIND, MAGIC = b"TRNPACK", b"TRNPACK2"
HEADER = struct.Struct("<8sQQ32s")


@dataclass(frozen=True)
class PackedSource:
    """One split of a packed file; reads from the page cache, without a lock. A record's checksum is verified once."""

    path: Path
    file: BinaryIO
    memory: mmap.mmap  # the same file, for raw pixels
    offsets: NDArray[np.int64]  # (n + 1,)
    labels: NDArray[np.int64]
    shapes: NDArray[np.int32]  # (n, 2): height and width of raw pixels, 0 for a file
    checksums: NDArray[np.uint32]  # (n,)
    files: Sequence[str]
    verified: NDArray[np.bool_]  # (n,): checksum verified before

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def name(self, index: int) -> str:
        """Return the file, and the image's name in the original data set."""
        return f"{self.path}:{self.files[index]}"

    def read(self, index: int) -> bytes | Pixels:
        """Read the record; raw pixels are a view of the mapped file.

        Raises:
            OSError: the checksum does not match.
        """
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        height, width = self.shapes[index]
        # pread releases the GIL while it waits for the disk; copying from the mapping would not.
        data = memoryview(self.memory)[start:end] if height else os.pread(self.file.fileno(), end - start, start)
        if not self.verified[index]:
            if zlib.crc32(data) != self.checksums[index]:
                raise OSError("its checksum does not match: the packed file is damaged")
            self.verified[index] = True
        if isinstance(data, bytes):
            return data
        return np.frombuffer(data, np.uint8).reshape(height, width, 3)

    def place(self, index: int) -> Place | None:
        """Return the record's part of the file, if it is a JPEG whose checksum was verified before."""
        if self.shapes[index, 0] or not self.verified[index]:
            return None
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return Place(None, self.file.fileno(), start, end - start)


def is_packed(path: Path) -> bool:
    """Whether the file starts with the packed format's magic number."""
    with path.open("rb") as file:
        return file.read(len(KIND)) == KIND


def open_packed(path: Path) -> Dataset:
    """Open the data set in a packed file.

    Raises:
        TrainError: the file is truncated or damaged.
    """
    file = path.open("rb")  # open as long as the data set is used
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    magic, start, length, digest = HEADER.unpack(memory[: HEADER.size].ljust(HEADER.size, b"\0"))
    if magic != MAGIC:
        found = f"{magic.decode(errors='replace')}, not {MAGIC.decode()}"
        raise TrainError(f"--data {path}: packed by another version ({found}); pack it again")
    index = memory[start : start + length]
    if not start or hashlib.sha256(index).digest() != digest:
        raise TrainError(f"--data {path}: the packed file is damaged or incomplete; pack it again")
    head, _, body = index.partition(b"\n")
    meta: dict[str, Any] = json.loads(head)
    total = sum(meta["splits"].values())
    offsets = np.frombuffer(body, np.int64, total + 1)
    labels, heights, widths = np.frombuffer(body, np.int32, 3 * total, offsets.nbytes).reshape(3, total)
    position = offsets.nbytes + 12 * total
    checksums = np.frombuffer(body, np.uint32, total, position)
    names = body[position + checksums.nbytes :].decode(errors="surrogateescape").split("\0")
    shapes = np.stack([heights, widths], axis=1)
    sources, first = {}, 0
    for split, count in meta["splits"].items():
        part = slice(first, first + count)
        sources[split] = PackedSource(
            path,
            file,
            memory,
            offsets=offsets[first : first + count + 1],
            labels=labels[part].astype(np.int64),
            shapes=shapes[part],
            checksums=checksums[part],
            files=names[part],
            verified=np.zeros(count, np.bool_),
        )
        first += count
    return Dataset(tuple(meta["classes"]), sources["train"], sources["val"])


@dataclass
class PackWriter:
    """Writes a packed file, with one `add` per split. The file gets its final name only if everything succeeds."""

    path: Path
    classes: Sequence[str]
    _splits: dict[str, int] = field(default_factory=dict)
    _rows: list[tuple[int, int, int]] = field(default_factory=list)  # label, height, width
    _checksums: list[int] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _offsets: list[int] = field(default_factory=lambda: [HEADER.size])

    def __enter__(self) -> PackWriter:
        self._fresh = self.path.with_name(self.path.name + ".tmp")
        self._file = self._fresh.open("wb")
        self._file.write(bytes(HEADER.size))
        return self

    def add(self, split: str, records: Iterable[tuple[str, int, bytes | Pixels]]) -> None:
        """Write the records (name, label, JPEG file or pixels) of one split."""
        before = len(self._rows)
        for name, label, record in records:
            height, width = record.shape[:2] if isinstance(record, np.ndarray) else (0, 0)
            data = record.tobytes() if isinstance(record, np.ndarray) else record
            self._file.write(data)
            self._offsets.append(self._offsets[-1] + len(data))
            self._rows.append((label, height, width))
            self._checksums.append(zlib.crc32(data))
            self._names.append(name)
        self._splits[split] = len(self._rows) - before

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            head = json.dumps({"classes": list(self.classes), "splits": self._splits}).encode() + b"\n"
            table = np.array(self._rows, np.int32).T.tobytes() + np.array(self._checksums, np.uint32).tobytes()
            names = "\0".join(self._names).encode(errors="surrogateescape")
            index = head + np.array(self._offsets, np.int64).tobytes() + table + names
            self._file.write(index)
            self._file.seek(0)
            self._file.write(HEADER.pack(MAGIC, self._offsets[-1], len(index), hashlib.sha256(index).digest()))
        self._file.close()
        if kind is None:
            self._fresh.replace(self.path)
        else:
            self._fresh.unlink()
