"""A data set as a list of entries and the hashes of its pieces: what is copied, and what a copy is compared with.

Names are bytes, as the kernel has them. A list that came from another machine is refused unless `check` accepts it: no
entry of it can lead out of the folder that it describes. Python 3.8 without packages.
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

PIECE = 1 << 20  # bytes: a hash each, and what a lost connection costs
DIGEST = 32
UNKNOWN = bytes(DIGEST)
_ZEROS = memoryview(bytes(PIECE))
BATCH = 2048  # entries a message
MOST_BYTES = 1 << 56
FILE, FOLDER, LINK = "f", "d", "l"


def is_zero(piece: bytes) -> bool:
    return piece == _ZEROS[: len(piece)]  # a comparison ends at the first byte that differs


class RefusedError(Exception):
    """The data, or a message, cannot be used; the text is for a person."""


class Entry(NamedTuple):
    """One name of a data set, relative to its folder. mtime (ns) and inode: of the source, by which hashes are kept."""

    path: bytes
    kind: str
    mode: int
    size: int = 0
    target: bytes = b""  # of a link
    mtime: int = 0
    inode: int = 0

    @property
    def pieces(self) -> int:
        return -(-self.size // PIECE)


def shown(path: bytes) -> str:
    return path.decode("utf-8", "replace")


def walk(root: bytes) -> list[Entry]:
    """Of a folder in the order of its names, or of a single file. Raises RefusedError, OSError."""
    found = os.stat(root)
    if stat.S_ISREG(found.st_mode):
        return [_entry(posixpath.basename(os.path.realpath(root)), root, found)]
    if not stat.S_ISDIR(found.st_mode):
        raise RefusedError(f"{shown(root)} is no file and no folder")
    return sorted(_below(root, b""))


def _below(root: bytes, prefix: bytes) -> Iterator[Entry]:
    with os.scandir(posixpath.join(root, prefix) if prefix else root) as listed:
        children = [(prefix + child.name, child.stat(follow_symlinks=False)) for child in listed]
    for path, found in children:
        entry = _entry(path, posixpath.join(root, path), found)
        yield entry
        if entry.kind == FOLDER:
            yield from _below(root, path + b"/")


def _entry(path: bytes, place: bytes, found: os.stat_result) -> Entry:
    mode = stat.S_IMODE(found.st_mode) & 0o777
    if stat.S_ISDIR(found.st_mode):
        return Entry(path, FOLDER, mode | 0o700)
    if stat.S_ISREG(found.st_mode):
        return Entry(path, FILE, mode | 0o400, found.st_size, b"", found.st_mtime_ns % (1 << 63), found.st_ino)
    if stat.S_ISLNK(found.st_mode):
        target = os.readlink(place)
        if not leads_inside(path, target):
            raise RefusedError(f"{shown(path)} is a link out of the data, to {shown(target)}: copy what it leads to")
        return Entry(path, LINK, 0o777, 0, target)
    raise RefusedError(f"{shown(path)} is no file, folder or link, and cannot be copied")


def leads_inside(path: bytes, target: bytes) -> bool:
    if not target or target.startswith(b"/"):
        return False
    end = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return end != b".." and not end.startswith(b"../")


def check(entries: list[Entry]) -> None:
    """Raises RefusedError for a list that no `walk` could have made."""
    folders = {b""}
    last = b""
    for entry in entries:
        path = entry.path
        parts = path.split(b"/")
        if not path or path <= last or b"\0" in path or {b"", b".", b".."} & set(parts):
            raise RefusedError(f"the list of files has a name that cannot be: {path[:80]!a}")
        if posixpath.dirname(path) not in folders:
            raise RefusedError(f"the list of files has no folder for {path[:80]!a}")
        if entry.kind == FOLDER:
            folders.add(path)
        elif entry.kind == LINK:
            if not leads_inside(path, entry.target) or b"\0" in entry.target:
                raise RefusedError(f"the list of files has a link out of the data: {path[:80]!a}")
        elif entry.kind != FILE or entry.size > MOST_BYTES:
            raise RefusedError(f"the list of files has something else than files: {path[:80]!a}")
        last = path


def rows(entries: Iterable[Entry]) -> list[list[Any]]:
    """As JSON takes them: Latin-1 has a character for each byte."""
    return [
        [e.path.decode("latin-1"), e.kind, e.mode, e.size, e.target.decode("latin-1"), e.mtime, e.inode]
        for e in entries
    ]


def entries_of(found: Any) -> list[Entry]:
    """From another machine. Raises RefusedError."""
    try:
        return [
            Entry(_bytes(path), str(kind), _whole(mode) & 0o777, _whole(size), _bytes(to), _whole(mtime), _whole(inode))
            for path, kind, mode, size, to, mtime, inode in found
        ]
    except (TypeError, ValueError):
        raise RefusedError("the list of files is not as we write it") from None


def _bytes(value: Any) -> bytes:
    return str(value).encode("latin-1")


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def signature(source: str, entries: list[Entry]) -> str:
    """Of one state of one source, as its file system tells it without a byte being read."""
    found = hashlib.sha256(source.encode("utf-8", "surrogateescape"))
    for start in range(0, len(entries), BATCH):
        found.update(json.dumps(rows(entries[start : start + BATCH])).encode())
    return found.hexdigest()


def content(entries: list[Entry], digests: bytes | bytearray) -> str:
    """The name of a copy: of its names, modes, sizes and bytes, wherever it came from."""
    found, at = hashlib.sha256(), 0
    for entry in entries:
        found.update(json.dumps(rows([entry._replace(mtime=0, inode=0)])).encode())
        found.update(digests[at : at + entry.pieces * DIGEST])
        at += entry.pieces * DIGEST
    return found.hexdigest()


def pack(entries: list[Entry], digests: bytes) -> bytes:
    """A manifest as a file: the list, and the hashes of all pieces in its order."""
    listed = zlib.compress(json.dumps(rows(entries)).encode(), 1)
    return b"launcher data 1\n%d\n" % len(listed) + listed + digests


def unpack(data: bytes) -> tuple[list[Entry], bytearray]:
    """Raises RefusedError for a file that `pack` has not written."""
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
    """All pieces of a list, numbered in its order."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.files = [entry for entry in entries if entry.size]
        self.starts: list[int] = []  # the first piece of each of them
        self.count = 0
        for entry in self.files:
            self.starts.append(self.count)
            self.count += entry.pieces
        self.bytes = sum(entry.size for entry in self.files)

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """Number, file, offset and size of each."""
        number = 0
        for place, entry in enumerate(self.files):
            for offset in range(0, entry.size, PIECE):
                yield number, place, offset, min(PIECE, entry.size - offset)
                number += 1
