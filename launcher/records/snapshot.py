"""Reproducible archives of the code: the same files give the same bytes, so the digest identifies the code."""

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
SLOW = 3.0  # seconds until packing reports its progress; the interval doubles each time


@dataclass(frozen=True)
class Snapshot:
    """`archive` is a tar.gz with relative names; `digest` is the digest of its files.

    With the launcher's trainer it is "DIGEST with train DIGEST", so that each part can be compared.
    """

    archive: bytes
    digest: str


def snapshot(folder: Path, log: Log = lambda _: None) -> Snapshot:
    """Pack the folder, without files that .gitignore or .dockerignore exclude.

    Symbolic links are kept as links. Raises JobInvalid if the code is larger than 512 MiB, naming the largest files,
    before reading any file; and if a file or a folder cannot be read.
    """
    with readable(folder):
        watch = _Watch(log)
        return _archive(_within_limit(folder, watch), (), watch)


def pack(job: Job, cwd: Path, log: Log) -> Snapshot:
    """Pack a job's code, with the launcher's trainer if the job runs the module `train` and the code does not have it.

    Raises JobInvalid like `snapshot` and `needed_trainer`.
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
    """Yield the members of a snapshot for a container: below `prefix`, owned by the run's user."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for member in tar:
            source = tar.extractfile(member) if member.isreg() else None
            member.name = f"{prefix}/{member.name}"
            member.pax_headers = {}  # they contain the old name, which would override the new one
            member.uid, member.gid = uid, gid
            yield member, source.read() if source else None


class _Watch:
    """Reports the progress of slow packing, with a hint."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._began = time.monotonic()
        self._next = self._began + SLOW

    def __call__(self, files: int, of: int | None = None) -> None:
        """of: total number of files; None while they are being listed."""
        now = time.monotonic()
        if now >= self._next:
            done = f"{files:,} files found" if of is None else f"{files:,} of {of:,} files"
            self._log(f"packing the code: {done}; add files that are not code to .dockerignore")
            self._next = now + (now - self._began)


def _within_limit(folder: Path, watch: _Watch) -> list[CodeFile]:
    """Return the code files. Checks sizes without reading: a file may be larger than memory. Raises JobInvalid."""
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
                f"is larger than {LIMIT >> 20} MiB; largest files: {largest}",
                "list data in .dockerignore and mount it instead: mounts: {/data: /data:ro}",
            )
    return found


def _archive(files: Sequence[CodeFile], trainer: Sequence[CodeFile], watch: _Watch) -> Snapshot:
    plain, ends = io.BytesIO(), [0]
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for part in (files, trainer):
            for index, file in enumerate(part):
                watch(index, len(part))
                info, content = _member(file)
                tar.addfile(info, io.BytesIO(content))
            ends.append(plain.tell())
    data = plain.getvalue()
    own, added = (hashlib.sha256(data[start:end]).hexdigest()[:16] for start, end in pairwise(ends))
    # mtime=0: gzip would write the current time into its header
    archive = gzip.compress(data, compresslevel=1, mtime=0)
    return Snapshot(archive, f"{own} with {TRAINER} {added}" if trainer else own)


def _member(file: CodeFile) -> tuple[tarfile.TarInfo, bytes]:
    """Return header and content without what differs between machines: owner, times, group and world mode bits."""
    info = tarfile.TarInfo(file.name)
    if stat.S_ISLNK(file.status.st_mode):
        target = os.readlink(file.path)  # noqa: PTH115 - Path.readlink removes ./ and //
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, target, 0o777
        return info, b""
    with Path(file.path).open("rb") as source:
        content = source.read(file.status.st_size)  # a growing file, or one of /proc, may be endless
    info.size = len(content)
    info.mode = 0o755 if file.status.st_mode & stat.S_IXUSR else 0o644
    return info, content
