"""The copies of data sets on one node: partial copies, and whole copies in `copies/<content>/files`.

A partial copy stores its pieces at their final offsets, and afterwards their numbers and hashes in a journal: a killed
process loses only unwritten data. After a reboot the journal may be ahead of the disk: its pieces are then read and
compared once. Python 3.8 without packages.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.features.data.container_scripts import data_tree as tree
else:
    import data_tree as tree

LOCK_TIMEOUT = 30, 60  # seconds without progress of the transfer that has the lock: two may wait for each other
BOOT = Path("/proc/sys/kernel/random/boot_id")
SLACK = 64 << 20  # bytes to leave free on a disk
_RECORD = struct.Struct(f">I{tree.DIGEST}s")


def digest(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def at(digests: bytes | bytearray, number: int) -> bytes:
    return bytes(digests[number * tree.DIGEST : (number + 1) * tree.DIGEST])


def put(digests: bytearray, number: int, found: bytes) -> None:
    digests[number * tree.DIGEST : (number + 1) * tree.DIGEST] = found


def save(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")  # containers have the same process ids
    part.write_bytes(data)
    part.replace(path)


class MovedError(Exception):
    """The folder was completed, demoted or removed before this process had its lock: look for a copy again."""


class BusyError(Exception):
    """Another transfer of the same data to this node makes no progress; the message is shown to the user."""


class NoRoomError(Exception):
    """The disk of this node has too little space for the data."""


class FetchError(Exception):
    """A download that ends, as worker.FIXES has it, or `failed`. The message is shown."""

    def __init__(self, end: str, why: str) -> None:
        super().__init__(why)
        self.end = end


def require_room(folder: Path, needed: int) -> None:
    """Raises NoRoomError."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if needed + SLACK > free:
        raise NoRoomError(f"{size_text(free)} free; {size_text(needed)} and a reserve of {size_text(SLACK)} are needed")


class StoredFiles:
    """The pieces of a data set on disk. Keeps the last file open, because pieces are accessed in order."""

    def __init__(self, root: bytes, pieces: tree.Pieces, write: bool = False) -> None:
        self._root, self._pieces, self._write = root, pieces, write
        self._index, self._fd = -1, -1

    def read(self, index: int, offset: int, size: int) -> bytes:
        """Return up to `size` bytes, fewer at the end of the file. Raises OSError."""
        data = os.pread(self._open(index), size, offset)
        while len(data) < size and (more := os.pread(self._fd, size - len(data), offset + len(data))):
            data += more
        return data

    def write(self, index: int, offset: int, data: bytes | memoryview) -> None:
        fd, done = self._open(index), 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)

    def status(self, index: int) -> os.stat_result:
        return os.fstat(self._open(index))

    def path(self, index: int) -> bytes:
        return os.path.join(self._root, self._pieces.files[index].path)

    def _open(self, index: int) -> int:
        if index != self._index:
            self.close()
            path = self.path(index)
            flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_RDWR | os.O_CREAT if self._write else os.O_RDONLY)
            try:
                self._fd = os.open(path, flags, 0o600)
            except PermissionError:
                if not self._write:
                    raise
                os.chmod(path, 0o600)  # formerly a whole copy: its files have the modes of the source
                self._fd = os.open(path, flags)
            self._index = index
            if self._write and os.fstat(self._fd).st_size != self._pieces.files[index].size:
                os.ftruncate(self._fd, self._pieces.files[index].size)  # unwritten ranges remain holes
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._index = self._fd = -1


class Whole:
    """A copy that has all pieces."""

    def __init__(self, folder: Path, pieces: tree.Pieces) -> None:
        self._folder, self.content = folder, folder.name
        _, self._digests = tree.unpack((folder / "manifest").read_bytes())
        self.files = StoredFiles(os.fsencode(folder / "files"), pieces)

    def has(self, number: int) -> bool:
        return 0 <= number < len(self._digests) // tree.DIGEST

    def digest(self, number: int) -> bytes:
        return at(self._digests, number)

    def put(self, number: int, index: int, offset: int, data: bytes) -> None:
        raise tree.RefusedError(
            f"received piece {number} for a whole copy: {len(data)} bytes at {offset} of file {index}"
        )

    def lose(self, number: int) -> None:
        """Make it a partial copy without this piece."""
        demote(self._folder, {number})

    def finish(self, digests: bytes) -> int:
        """See Partial.finish()."""
        used(self._folder)
        return sum(at(digests, n) != self.digest(n) for n in range(len(digests) // tree.DIGEST))


class Partial:
    """An incomplete copy of one state of one source. Holds a lock while it is open."""

    def __init__(self, root: Path, signature: str, entries: list[tree.DataEntry], about: dict[str, Any]) -> None:
        """Wait for other transfers of it while they progress. Raises BusyError, MovedError, OSError."""
        self.pieces, self._root, self._about = tree.Pieces(entries), root, about
        self.folder = root / "partial" / signature
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder)
        self.digests = bytearray(self.pieces.count * tree.DIGEST)
        self._journal, self._unflushed = bytearray(), 0  # pending records, and bytes of their pieces
        self._files.mkdir(exist_ok=True)
        self._remove_others()
        for entry in entries:
            if entry.kind == tree.FOLDER:
                (self._files / os.fsdecode(entry.path)).mkdir(mode=0o700, exist_ok=True)
        self.files = StoredFiles(os.fsencode(self._files), self.pieces, write=True)
        save(self.folder / "manifest", tree.pack(entries, bytes(len(self.digests))))
        self._write_about(bytes=self.pieces.bytes, files=len(entries))
        self._resume()
        self._log = (self.folder / "journal").open("ab")

    @property
    def _files(self) -> Path:
        return self.folder / "files"

    def _write_about(self, **more: Any) -> None:
        """Write about.json, which `launcher data ls` reads."""
        save(self.folder / "about.json", json.dumps({**self._about, "signature": self.folder.name, **more}).encode())

    def has(self, number: int) -> bool:
        return self.digest(number) != tree.UNKNOWN

    def digest(self, number: int) -> bytes:
        return at(self.digests, number)

    def missing_bytes(self) -> int:
        return sum(size for number, _, _, size in self.pieces if not self.has(number))

    def require_room(self) -> None:
        """Raises NoRoomError."""
        require_room(self.folder, self.missing_bytes())

    def put(self, number: int, index: int, offset: int, data: bytes) -> None:
        """Store a piece; a piece of zeros takes no disk space."""
        if not tree.is_zero(data) or self.files.read(index, offset, len(data)) != data:
            self.files.write(index, offset, data)
        self._record(number, digest(data))
        self._unflushed += len(data)
        if self._unflushed >= tree.PIECE:
            self.flush()

    def _record(self, number: int, found: bytes) -> None:
        put(self.digests, number, found)
        self._journal += _RECORD.pack(number, found)

    def lose(self, number: int) -> None:
        self._record(number, tree.UNKNOWN)
        self.flush()

    def discard(self, index: int) -> None:
        """Forget a file, and free its room."""
        first = self.pieces.starts[index]
        for number in range(first, first + self.pieces.files[index].pieces):
            self._record(number, tree.UNKNOWN)
        self.flush()
        self.files.close()
        os.truncate(self.files.path(index), 0)

    def remove_if_empty(self) -> None:
        """Remove a copy of which nothing has come."""
        if self.pieces.count and not any(self.digests):
            shutil.rmtree(self.folder, ignore_errors=True)  # it may have been removed

    def flush(self) -> None:
        self._log.write(self._journal)
        self._log.flush()
        self._journal.clear()
        self._unflushed = 0

    def adopt(self, known: bytes | bytearray) -> None:
        """Reuse pieces of other copies on this node: same file name, same known hash."""
        names = {entry.path: index for index, entry in enumerate(self.pieces.files)}
        for folder in [*self._root.glob("copies/*"), *self._root.glob("partial/*")]:
            if folder == self.folder:
                continue
            with contextlib.suppress(OSError, tree.RefusedError):  # another process may be changing it
                entries, theirs = tree.unpack((folder / "manifest").read_bytes())
                if folder.parent.name == "partial":
                    _read_journal(folder / "journal", theirs)
                self._adopt_from(folder / "files", tree.Pieces(entries), theirs, names, known)
        self.flush()

    def _adopt_from(
        self, folder: Path, other: tree.Pieces, theirs: bytearray, names: dict[bytes, int], known: bytes | bytearray
    ) -> None:
        source = StoredFiles(os.fsencode(folder), other)
        for number, index, offset, size in other:
            mine = names.get(other.files[index].path)
            if mine is None or offset + size > self.pieces.files[mine].size:
                continue
            wanted = self.pieces.starts[mine] + offset // tree.PIECE
            same = at(theirs, number)
            if same == tree.UNKNOWN or self.has(wanted) or same != at(known, wanted):
                continue
            if digest(data := source.read(index, offset, size)) == same:
                self.put(wanted, mine, offset, data)
        source.close()

    def finish(self, digests: bytes) -> int:
        """Compare with the source's hashes; move the copy to `copies` if all pieces are correct.

        Returns how many pieces are missing or differ; those are discarded.
        """
        self.flush()
        wrong = [number for number in range(self.pieces.count) if self.digest(number) != at(digests, number)]
        if wrong:
            for number in wrong:
                self._record(number, tree.UNKNOWN)
            self.flush()
            return len(wrong)
        self.files.close()
        entries = self.pieces.entries
        self._remove_others()
        for entry in entries:
            path = os.path.join(os.fsencode(self._files), entry.path)
            if entry.kind == tree.LINK:
                with contextlib.suppress(FileExistsError):  # with this target
                    os.symlink(entry.target, path)
            elif entry.kind == tree.FILE:
                os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))  # creates empty files
                if os.stat(path).st_size != entry.size:
                    os.truncate(path, entry.size)
                os.chmod(path, entry.mode)
        for entry in reversed(entries):
            if entry.kind == tree.FOLDER:
                os.chmod(os.path.join(os.fsencode(self._files), entry.path), entry.mode)
        name = tree.content(entries, digests)
        save(self.folder / "manifest", tree.pack(entries, digests))
        self._write_about(bytes=self.pieces.bytes, files=len(entries), content=name)
        os.sync()  # before the rename: a kill must leave a usable partial copy
        target = self._root / "copies" / name
        target.parent.mkdir(exist_ok=True)
        try:
            self.folder.rename(target)
        except OSError:
            if not target.exists():
                raise
            (self.folder / "about.json").replace(target / "about.json")  # the same content, from another source
            shutil.rmtree(self.folder)
        else:
            (target / "journal").unlink()
        used(target)
        self._remove_older()
        return 0

    def _remove_older(self) -> None:
        """Remove partial copies of earlier states of the same source."""
        for folder in (self._root / "partial").glob("*"):
            with contextlib.suppress(OSError, ValueError, BusyError, MovedError):
                if json.loads((folder / "about.json").read_text())["source"] == self._about["source"]:
                    lock = _locked(folder, 0.0)
                    shutil.rmtree(folder)
                    os.close(lock)

    def _remove_others(self) -> None:
        """Remove what was added to a copy that was whole before, or put in the place of a file, a folder or a link."""
        named = {entry.path: (entry.kind, entry.target) for entry in self.pieces.entries}
        top = os.fsencode(self._files)
        for folder, folders, files in os.walk(top):
            for name in files + folders:
                path = os.path.join(folder, name)
                kind, _, _, target = _found(path)
                if named.get(path[len(top) + 1 :]) == (kind, target):
                    if kind == tree.FOLDER:
                        os.chmod(path, 0o700)
                elif kind == tree.FOLDER:
                    folders.remove(name)
                    shutil.rmtree(path)
                else:
                    os.unlink(path)

    def _resume(self) -> None:
        boot = BOOT.read_bytes() if BOOT.exists() else b""
        mark = self.folder / "boot"
        _read_journal(self.folder / "journal", self.digests)
        if not mark.exists() or mark.read_bytes() != boot:
            for number, index, offset, size in self.pieces:
                if self.has(number) and digest(self.files.read(index, offset, size)) != self.digest(number):
                    put(self.digests, number, tree.UNKNOWN)
        kept = b"".join(_RECORD.pack(n, self.digest(n)) for n in range(self.pieces.count) if self.has(n))
        save(self.folder / "journal", kept)
        save(mark, boot)


def _read_journal(path: Path, digests: bytearray) -> None:
    """The last record of a piece is valid; an incomplete record at the end is ignored."""
    data = path.read_bytes() if path.exists() else b""
    for number, found in _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size]):
        if (number + 1) * tree.DIGEST <= len(digests):
            put(digests, number, found)


def _locked(folder: Path, timeout: float | None = None) -> int:
    """Lock a copy; wait while the process that has the lock makes progress. Raises BusyError, MovedError, OSError.

    timeout: seconds without progress; by default a random time, so that of two transfers that wait for each other on
    two nodes one gives up first.
    """
    least, most = LOCK_TIMEOUT
    patience = least + secrets.randbelow(most - least) if timeout is None else timeout
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise MovedError from None
    seen, since = None, time.monotonic()
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if (written := _written(folder)) != seen:
                seen, since = written, time.monotonic()
            if time.monotonic() - since >= patience:
                os.close(fd)
                raise BusyError("another transfer of the same data to this node makes no progress") from None
            time.sleep(0.2)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(fd), os.stat(folder / "lock")):
            return fd
    os.close(fd)
    raise MovedError


def _written(folder: Path) -> tuple[int, int] | None:
    """Return the size and the time of the journal, to which a transfer adds each piece."""
    with contextlib.suppress(OSError):
        found = os.stat(folder / "journal")
        return found.st_size, found.st_mtime_ns
    return None


def size_text(number: int) -> str:
    return f"{number >> 20:,} MiB" if number >= 1 << 20 else f"{number / 1000:.0f} kB"


def used(copy: Path) -> None:
    (copy / "used").touch()


def whole(root: Path, content: str, signature: str) -> Path | None:
    """Return the copy with this content or, if the content is not known yet, with this signature."""
    for folder in (root / "copies").glob("*"):
        if folder.name == content:
            return folder
        with contextlib.suppress(OSError, ValueError):
            if not content and json.loads((folder / "about.json").read_text())["signature"] == signature:
                return folder
    return None


def opened(
    root: Path, entries: list[tree.DataEntry], signature: str, content: str, about: dict[str, Any]
) -> Partial | Whole:
    """Return the whole copy or, once no other process writes to it, the partial one. Raises BusyError, OSError."""
    while True:
        if found := whole(root, content, signature):
            try:
                different = [bytes_differ for _, bytes_differ in differences(found, entries)]
            except FileNotFoundError:
                continue  # another process has found a difference
            if not different:
                return Whole(found, tree.Pieces(entries))
            demote(found, None if any(different) else (), signature)
        with contextlib.suppress(MovedError):
            return Partial(root, signature, entries, about)


def damages(folder: Path) -> list[tuple[str, list[int]]]:
    """Read a whole copy; return each path that differs, as it is shown, with the numbers of its wrong pieces."""
    entries, digests = tree.unpack((folder / "manifest").read_bytes())
    bad: dict[bytes, list[int]] = {path: [] for path, _ in differences(folder, entries)}
    for path, number in _wrong_pieces(folder, entries, digests):
        bad.setdefault(path, []).append(number)
    named = {entry.path for entry in entries}
    return [
        (tree.shown(path) if path in named else f"{tree.shown(path)} (not part of the data)", numbers)
        for path, numbers in bad.items()
    ]


def _wrong_pieces(
    folder: Path, entries: list[tree.DataEntry], digests: bytes | bytearray
) -> Iterator[tuple[bytes, int]]:
    """Read all pieces of a whole copy; yield the file and the number of each that differs or cannot be read."""
    pieces = tree.Pieces(entries)
    with contextlib.closing(StoredFiles(os.fsencode(folder / "files"), pieces)) as files:
        for number, index, offset, size in pieces:
            try:
                if digest(files.read(index, offset, size)) == at(digests, number):
                    continue
            except OSError:
                files.close()  # the next piece opens its file again
            yield pieces.files[index].path, number


def differences(folder: Path, entries: list[tree.DataEntry]) -> Iterator[tuple[bytes, bool]]:
    """Yield each path of a whole copy with another kind, mode, size or target, without reading any file.

    Also yields whether the bytes of the data may differ. Raises FileNotFoundError if the copy is demoted meanwhile.
    """
    top = os.fsencode(folder / "files")
    existing = {}
    for parent, folders, files in os.walk(top):
        for name in files + folders:
            path = os.path.join(parent, name)
            existing[path[len(top) + 1 :]] = _found(path)
    for entry in entries:
        kind, mode, size, target = existing.pop(entry.path, ("", 0, 0, b""))
        if (kind, mode, size, target) != (entry.kind, entry.mode, entry.size, entry.target):
            yield entry.path, entry.size > 0 and (kind, size) != (entry.kind, entry.size)
    for path in existing:
        yield path, False


def _found(path: bytes) -> tuple[str, int, int, bytes]:
    """Return kind, mode, size and target of a path in a copy, as an entry has them; "" for other kinds."""
    found = os.lstat(path)
    mode = found.st_mode & 0o777
    if stat.S_ISREG(found.st_mode):
        return tree.FILE, mode, found.st_size, b""
    if stat.S_ISLNK(found.st_mode):
        return tree.LINK, 0o777, 0, os.readlink(path)
    return (tree.FOLDER if stat.S_ISDIR(found.st_mode) else ""), mode, 0, b""


def demote(folder: Path, bad: Iterable[int] | None, signature: str = "") -> None:
    """Turn a whole copy that differs into a partial one, which the next push completes.

    bad: the wrong pieces; None: unknown, so that the next push reads all of them. signature: of the state of the source
    that has this content; by default that from which the copy was made. Raises BusyError, OSError.
    """
    try:
        lock = _locked(folder)
    except MovedError:
        return  # another process has found a difference
    try:
        about = json.loads((folder / "about.json").read_text())
        target = folder.parents[1] / "partial" / (signature or about["signature"])
        target.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError, MovedError):
            os.close(_locked(target))
            shutil.rmtree(target)
        entries, digests = tree.unpack((folder / "manifest").read_bytes())
        wrong = set(bad or ())
        numbers = [number for number in range(tree.Pieces(entries).count) if number not in wrong]
        save(folder / "journal", b"".join(_RECORD.pack(number, at(digests, number)) for number in numbers))
        if bad is None:
            (folder / "boot").unlink(missing_ok=True)
        folder.rename(target)
    finally:
        os.close(lock)
