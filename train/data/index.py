"""Index of a tar archive, stored in the user's cache, because reading a header per image takes minutes.

A cache entry is valid for the archive's path, size and modification time. Otherwise, or if the entry cannot be read,
the archive is indexed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tarfile
import tempfile
from pathlib import Path

Member = tuple[str, int, int]  # name, offset of its content, size
FORMAT = 1


def members(path: Path) -> list[Member]:
    """Return the regular files of an uncompressed archive, in order, without links and other members.

    Raises:
        tarfile.TarError: not an uncompressed tar archive.
        OSError: the archive cannot be read.
    """
    entry = _entry(path)
    if (known := _read(entry, path.stat().st_size)) is not None:
        return known
    with tarfile.open(path, "r:") as tar:
        found = [(member.name, member.offset_data, member.size) for member in tar if member.isfile()]
    with contextlib.suppress(OSError, RuntimeError):  # without a writable cache it is indexed again next time
        _write(entry, found)
    return found


def _entry(path: Path) -> Path | None:
    status = path.stat()
    key = repr((FORMAT, str(path.resolve()), status.st_size, status.st_mtime_ns))
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home folder
        return None
    return cache / "launcher-train" / "tar" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(entry: Path | None, size: int) -> list[Member] | None:
    if entry is None:
        return None
    try:
        found = [(str(name), int(offset), int(length)) for name, offset, length in json.loads(entry.read_bytes())]
    except (OSError, ValueError, TypeError):
        return None
    return found if all(0 <= offset <= offset + length <= size for _, offset, length in found) else None


def _write(entry: Path | None, found: list[Member]) -> None:
    if entry is None:
        return
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False) as file:
        json.dump(found, file)
    Path(file.name).replace(entry)  # atomic: another rank may be writing the same file
