"""A data set as a list of entries and the hashes of its pieces, for copying and for verifying copies.

Names are bytes, as in the kernel. A list from another machine is refused unless `check` accepts it: no entry can
resolve to a path outside the folder. Python 3.8 without packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import stat
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

PIECE = 1 << 20  # bytes: the unit of hashing and of resending after a lost connection
DIGEST = 32
UNKNOWN = bytes(DIGEST)
_ZEROS = memoryview(bytes(PIECE))
BATCH = 2048  # entries per message
MOST_BYTES = 1 << 56
FILE, FOLDER, LINK = "f", "d", "l"


def is_zero(piece: bytes) -> bool:
    return piece == _ZEROS[: len(piece)]  # stops at the first byte that differs


class RefusedError(Exception):
    """The data or a message is invalid; the message is shown to the user."""


class DataEntry(NamedTuple):
    """A path of a data set, relative to its folder. mtime, ctime (ns) and inode: of the source, keys of its hashes."""

    path: bytes
    kind: str
    mode: int
    size: int = 0
    target: bytes = b""  # of a link
    mtime: int = 0
    inode: int = 0
    ctime: int = 0  # also changes if a program restores the mtime of a file that it has rewritten

    @property
    def pieces(self) -> int:
        return -(-self.size // PIECE)


def shown(path: bytes) -> str:
    return path.decode("utf-8", "replace")


def walk(root: bytes) -> list[DataEntry]:
    """Return the entries of a folder, sorted by name, or of a single file. Raises RefusedError, OSError."""
    found = os.stat(root)
    if stat.S_ISREG(found.st_mode):
        return [_entry(posixpath.basename(os.path.realpath(root)), root, found)]
    if not stat.S_ISDIR(found.st_mode):
        raise RefusedError(f"{shown(root)} is neither a file nor a folder")
    return sorted(_below(root, b""))


def _below(root: bytes, prefix: bytes) -> Iterator[DataEntry]:
    with os.scandir(posixpath.join(root, prefix) if prefix else root) as listed:
        children = [(prefix + child.name, child.stat(follow_symlinks=False)) for child in listed]
    for path, found in children:
        entry = _entry(path, posixpath.join(root, path), found)
        yield entry
        if entry.kind == FOLDER:
            yield from _below(root, path + b"/")


def _entry(path: bytes, full_path: bytes, found: os.stat_result) -> DataEntry:
    mode = stat.S_IMODE(found.st_mode) & 0o777
    if stat.S_ISDIR(found.st_mode):
        return DataEntry(path, FOLDER, mode | 0o700)
    if stat.S_ISREG(found.st_mode):
        times = found.st_mtime_ns % (1 << 63), found.st_ino, found.st_ctime_ns % (1 << 63)
        return DataEntry(path, FILE, mode | 0o400, found.st_size, b"", *times)
    if stat.S_ISLNK(found.st_mode):
        target = os.readlink(full_path)
        if not is_inside(path, target):
            raise RefusedError(f"{shown(path)} is a link to {shown(target)}, outside the data: replace it by a copy")
        return DataEntry(path, LINK, 0o777, 0, target)
    raise RefusedError(f"{shown(path)} is not a file, folder or link, and cannot be copied")


def is_inside(path: bytes, target: bytes) -> bool:
    if not target or target.startswith(b"/"):
        return False
    end = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return end != b".." and not end.startswith(b"../")


def check(entries: list[DataEntry]) -> None:
    """Raises RefusedError for a list that `walk` cannot have produced."""
    folders = {b""}
    last = b""
    for entry in entries:
        path = entry.path
        parts = path.split(b"/")
        if not path or path <= last or b"\0" in path or {b"", b".", b".."} & set(parts):
            raise RefusedError(f"the list of files has an invalid name: {path[:80]!a}")
        if posixpath.dirname(path) not in folders:
            raise RefusedError(f"the list of files has no folder for {path[:80]!a}")
        if entry.kind == FOLDER:
            folders.add(path)
        elif entry.kind == LINK:
            if not is_inside(path, entry.target) or b"\0" in entry.target:
                raise RefusedError(f"the list of files has a link to a target outside the data: {path[:80]!a}")
        elif entry.kind != FILE or entry.size > MOST_BYTES:
            raise RefusedError(f"the list of files has an entry of another type: {path[:80]!a}")
        last = path


def rows(entries: Iterable[DataEntry]) -> list[list[Any]]:
    """Return entries as JSON values: Latin-1 maps each byte to a character."""
    return [
        [e.path.decode("latin-1"), e.kind, e.mode, e.size, e.target.decode("latin-1"), e.mtime, e.inode, e.ctime]
        for e in entries
    ]


def entries_of(found: Any) -> list[DataEntry]:
    """Parse entries from another machine. Raises RefusedError."""
    try:
        return [
            DataEntry(_bytes(path), str(kind), _whole(mode) & 0o777, _whole(size), _bytes(to), *map(_whole, times))
            for path, kind, mode, size, to, *times in found
        ]
    except (TypeError, ValueError):
        raise RefusedError("the list of files is invalid") from None


def _bytes(value: Any) -> bytes:
    return str(value).encode("latin-1")


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def signature(source: str, entries: list[DataEntry]) -> str:
    """Return a hash of one state of one source, from its file system's metadata only."""
    found = hashlib.sha256(source.encode("utf-8", "surrogateescape"))
    for start in range(0, len(entries), BATCH):
        found.update(json.dumps(rows(entries[start : start + BATCH])).encode())
    return found.hexdigest()


def content(entries: list[DataEntry], digests: bytes | bytearray) -> str:
    """Return the name of a copy: a hash of its names, modes, sizes and bytes, independent of the source."""
    found, at = hashlib.sha256(), 0
    for entry in entries:
        found.update(json.dumps([rows([entry._replace(mtime=0, inode=0)])[0][:-1]]).encode())
        found.update(digests[at : at + entry.pieces * DIGEST])
        at += entry.pieces * DIGEST
    return found.hexdigest()


def pack(entries: list[DataEntry], digests: bytes) -> bytes:
    """Return a manifest file: the list, and the hashes of all pieces in order."""
    listed = zlib.compress(json.dumps(rows(entries)).encode(), 1)
    return b"launcher data 1\n%d\n" % len(listed) + listed + digests


def unpack(data: bytes) -> tuple[list[DataEntry], bytearray]:
    """Parse a manifest file. Raises RefusedError if `pack` did not write it."""
    try:
        magic, size, rest = data.split(b"\n", 2)
        entries = entries_of(json.loads(zlib.decompress(rest[: int(size)])))
        digests = bytearray(rest[int(size) :])
    except (ValueError, zlib.error):
        raise RefusedError("the manifest is damaged") from None
    if magic != b"launcher data 1" or len(digests) != sum(e.pieces for e in entries) * DIGEST:
        raise RefusedError("the manifest is damaged")
    check(entries)
    return entries, digests


class Pieces:
    """All pieces of a list of entries, numbered in order."""

    def __init__(self, entries: list[DataEntry]) -> None:
        self.entries = entries
        self.files = [entry for entry in entries if entry.size]
        self.starts: list[int] = []  # number of the first piece of each file
        self.count = 0
        for entry in self.files:
            self.starts.append(self.count)
            self.count += entry.pieces
        self.bytes = sum(entry.size for entry in self.files)

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield number, index of the file, offset and size of each piece."""
        number = 0
        for index, entry in enumerate(self.files):
            for offset in range(0, entry.size, PIECE):
                yield number, index, offset, min(PIECE, entry.size - offset)
                number += 1
