"""The code as one reproducible archive: the same files give the same bytes, so the digest names the code."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from launcher.errors import JobInvalid
from launcher.job.files import code_folder
from launcher.job.models import Job
from launcher.model.progress import Log
from launcher.records.code_files import CodeFile, code_files, readable
from launcher.records.trainer import TRAINER, needed_trainer

LIMIT = 512 << 20
SLOW = 3.0  # seconds until a packing reports its progress; then each time after twice as many


@dataclass(frozen=True)
class Snapshot:
    """`archive` is a tar.gz of plain relative names; `digest` is of the files in it.

    With the launcher's trainer it is "DIGEST with train DIGEST", so that each can be compared.
    """

    archive: bytes
    digest: str


def snapshot(folder: Path, log: Log = lambda _: None) -> Snapshot:
    """Pack the folder, without what .gitignore and .dockerignore name.

    Symbolic links are kept as links. Raises JobInvalid where the code is larger than 512 MiB, naming the largest files,
    before anything of it is read; and for a file or a folder that cannot be read.
    """
    with readable(folder):
        watch = _Watch(log)
        return _archive(_within_limit(folder, watch), (), watch)


def pack(job: Job, cwd: Path, log: Log) -> Snapshot:
    """A job's code, and the launcher's own trainer where the job runs the module `train` and the code has none.

    Raises JobInvalid as `snapshot` and `needed_trainer` do.
    """
    folder = code_folder(job, cwd)
    with readable(folder):
        watch = _Watch(log)
        files = _within_limit(folder, watch)
        trainer = needed_trainer(job, folder, files)
        if trainer is None:
            return _archive(files, (), watch)
        log(f"the code has no module {TRAINER}: adding the launcher's own, {trainer}")
        added = [replace(file, name=f"{TRAINER}/{file.name}") for file in code_files(trainer)]
        return _archive(files, added, watch)


def repack(archive: bytes, prefix: str, uid: int, gid: int) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """The members of a snapshot as they go into a container: below `prefix`, owned by the run's user."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for member in tar:
            source = tar.extractfile(member) if member.isreg() else None
            member.name = f"{prefix}/{member.name}"
            member.pax_headers = {}  # has the name that was read, and would be written in place of the new one
            member.uid, member.gid = uid, gid
            yield member, source.read() if source else None


class _Watch:
    """Reports the progress of a packing that takes long, with the fix."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._began = time.monotonic()
        self._next = self._began + SLOW

    def __call__(self, files: int, of: int | None = None) -> None:
        """of: None while they are listed."""
        now = time.monotonic()
        if now >= self._next:
            done = f"{files:,} files found" if of is None else f"{files:,} of {of:,} files"
            self._log(f"packing the code: {done}; list what is not code in .dockerignore")
            self._next = now + (now - self._began)


def _within_limit(folder: Path, watch: _Watch) -> list[CodeFile]:
    """What belongs to the code, from sizes alone: one file may be larger than memory. Raises JobInvalid."""
    found: list[CodeFile] = []
    total = 0
    for file in code_files(folder):
        found.append(file)
        watch(len(found))
        total += file.status.st_size
        if total > LIMIT:
            by_size = sorted(found, key=lambda file: file.status.st_size, reverse=True)
            largest = ", ".join(f"{file.name} ({file.status.st_size >> 20} MiB)" for file in by_size[:3])
            raise JobInvalid(
                f"code {folder}",
                f"is larger than {LIMIT >> 20} MiB; the largest: {largest}",
                "name data in .dockerignore and mount it instead: mounts: {/data: /data:ro}",
            )
    return found


def _archive(files: Sequence[CodeFile], trainer: Sequence[CodeFile], watch: _Watch) -> Snapshot:
    plain, ends = io.BytesIO(), [0]
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for part in (files, trainer):
            for place, file in enumerate(part):
                watch(place, len(part))
                info, content = _member(file)
                tar.addfile(info, io.BytesIO(content))
            ends.append(plain.tell())
    data = plain.getvalue()
    own, added = (hashlib.sha256(data[start:end]).hexdigest()[:16] for start, end in pairwise(ends))
    # mtime=0: gzip would put the time of day into its header
    archive = gzip.compress(data, compresslevel=1, mtime=0)
    return Snapshot(archive, f"{own} with {TRAINER} {added}" if trainer else own)


def _member(file: CodeFile) -> tuple[tarfile.TarInfo, bytes]:
    """Header and content, without what differs between two machines: owner, times, group and world write bits."""
    info = tarfile.TarInfo(file.name)
    if stat.S_ISLNK(file.status.st_mode):
        target = os.readlink(file.path)  # noqa: PTH115 - Path.readlink takes ./ and // out of it
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, target, 0o777
        return info, b""
    with Path(file.path).open("rb") as source:
        content = source.read(file.status.st_size)  # a file that grows, or one of /proc, may have no end
    info.size = len(content)
    info.mode = 0o755 if file.status.st_mode & stat.S_IXUSR else 0o644
    return info, content
