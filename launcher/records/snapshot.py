"""Reproducible archives of the code: the same files give the same bytes, so the digest identifies the code."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from launcher.errors import JobInvalid
from launcher.job.files import code_folder, secret_files
from launcher.job.models import Job
from launcher.job.overrides import short_commit
from launcher.model.plan import Revision
from launcher.model.progress import Log
from launcher.model.sizes import size_text
from launcher.naming import first_of
from launcher.records.code_files import CodeFile, code_files, holds_credentials, readable
from launcher.records.left_out import CREDENTIALS, ENVIRONMENT, REPORT, LeftOut
from launcher.records.links import check_links
from launcher.records.revisions import Exported
from launcher.records.trainer import TRAINER, needed_trainer
from launcher.records.wanted import is_saved
from launcher.records.workdir import SENT

LIMIT = 512 << 20
LARGE = 50_000_000  # bytes of code above which its largest files are named
SLOW = 3.0  # seconds until packing reports its progress; the interval doubles each time
_MOST_NAMED = 20


@dataclass(frozen=True)
class Snapshot:
    """`archive` is a tar.gz with relative names; `digest` is the digest of its files.

    With the launcher's trainer it is "DIGEST with train DIGEST", so that each part can be compared. folder: the code's.
    revision: of which the code is.
    """

    archive: bytes
    digest: str
    folder: Path = field(compare=False)
    left_out: LeftOut = field(compare=False)
    revision: Revision | None = field(default=None, compare=False)


@dataclass(frozen=True)
class CodeListing:
    """The files of a job's code, before any of them is read. trainer: the launcher's own, if it is to be added.

    folder: where they are. place: the job's code folder, if they are not there, but exported.
    """

    folder: Path
    files: Sequence[CodeFile]
    left_out: LeftOut
    trainer: Path | None = None
    broken: Sequence[str] = ()  # links that lead nowhere, here neither
    place: Path | None = None
    revision: Revision | None = None


def snapshot(folder: Path, log: Log = lambda _: None) -> Snapshot:
    """Pack a folder without what `code_files` leaves out.

    Symbolic links are kept as links. Raises JobInvalid if the code is larger than 512 MiB, naming the largest files,
    before reading any file; and if a file or a folder cannot be read.
    """
    left_out = LeftOut()
    with readable(folder):
        return _archive(CodeListing(folder, _within_limit(folder, left_out, _Watch(log)), left_out), _Watch(log))[0]


def list_code(job: Job, cwd: Path, log: Log, *, bare: bool = False, exported: Exported | None = None) -> CodeListing:
    """List a job's code. The launcher's trainer is added if the job runs the module `train` and the code lacks it.

    bare: a cluster runs the job without containers. exported: its code, if that is not in the code folder. Raises
    JobInvalid like `snapshot` and `needed_trainer`, and if a link leads to something that is not sent.
    """
    place, left_out = code_folder(job, cwd), LeftOut()
    folder = exported.folder if exported else place
    with readable(folder):
        secrets = {os.path.relpath(path, place) for path in secret_files(job, cwd)}
        files = _within_limit(folder, left_out, _Watch(log), exported.names if exported else None)
        left_out.why.update((file.name, CREDENTIALS) for file in files if file.name in secrets and not file.wanted)
        files = [file for file in files if file.name not in left_out.why]
        _check_script(job, cwd, place, left_out)
        broken = check_links(job, folder, files, left_out, visible=bare or not job.traits.isolates)
        trainer = needed_trainer(job, folder, files)
    if exported is None:
        return CodeListing(folder, files, left_out, trainer, broken)
    for note in exported.notes:
        log(note)
    return CodeListing(folder, files, left_out, trainer, broken, place, exported.revision)


def _check_script(job: Job, cwd: Path, folder: Path, left_out: LeftOut) -> None:
    script = job.run.script
    if script is not None and (entry := left_out.entry(os.path.relpath(cwd / script, folder))):
        job.refuse([(("run", "script"), f"{script} is not sent: {entry} is left out ({left_out.why[entry]})")])


def pack(listing: CodeListing, log: Log) -> Snapshot:
    """Pack a job's code, and report what is sent and what is left out. Raises JobInvalid if a file cannot be read."""
    with readable(listing.folder):
        if listing.trainer is not None:
            log("using the launcher's trainer")
        packed, files = _archive(listing, _Watch(log))
    why = listing.left_out.why
    asked = f" ({listing.revision.asked})" if listing.revision and listing.revision.asked else ""
    of = f", of {short_commit(listing.revision.commit)}{asked}" if listing.revision else ""
    log(_summary(files, listing.left_out) + of)
    if error := listing.left_out.git_error:
        what = ".gitignore excludes files even if git tracks them, and git's other lists (info/exclude) exclude nothing"
        log(f"warning: {what}, as git cannot list them: {error}")
    if (lines := Counter(listing.left_out.lines())) and not files:
        line = lines.most_common(1)[0][0]
        names = [name for name, reason in why.items() if reason.endswith(f" {line}")]
        log(f"warning: no file of {listing.folder} is sent: {line} excludes {first_of(names, _MOST_NAMED)}")
    if secret := [name for name, reason in why.items() if reason == CREDENTIALS]:
        fix = f"pass values with `secrets`; to send it nevertheless, add a line `!{secret[0]}` to .dockerignore"
        log(f"left out of the code, as {CREDENTIALS}: {first_of(secret, _MOST_NAMED)}; {fix}")
    if environments := [name for name, reason in why.items() if reason == ENVIRONMENT]:
        log(f"left out of the code, as virtual environments: {first_of(environments, _MOST_NAMED)}")
    if reports := [name for name, reason in why.items() if reason == REPORT]:
        log(f"left out of the code, as archives of launcher report: {first_of(reports, _MOST_NAMED)}")
    if listing.broken:
        log(f"links in the code that lead nowhere: {first_of(listing.broken, _MOST_NAMED)}")
    return packed


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


def _within_limit(
    folder: Path, left_out: LeftOut, watch: _Watch, tracked: Collection[str] | None = None
) -> list[CodeFile]:
    """Return the code files. Checks sizes without reading: a file may be larger than memory. tracked: as for
    `code_files`. Raises JobInvalid.
    """
    found: list[CodeFile] = []
    total = 0
    for file in code_files(folder, left_out, tracked):
        found.append(file)
        watch(len(found))
        total += file.status.st_size
        if total > LIMIT:
            largest = ", ".join(f"{file.name} ({file.status.st_size >> 20} MiB)" for file in _largest(found))
            raise JobInvalid(
                f"code {folder}",
                f"is larger than {LIMIT >> 20} MiB; largest files: {largest}",
                "list data in .dockerignore and mount it instead: mounts: {/data: /data:ro}",
            )
    return found


def _largest(files: Sequence[CodeFile]) -> list[CodeFile]:
    return sorted(files, key=lambda file: file.status.st_size, reverse=True)[:3]


def _summary(files: Sequence[CodeFile], left_out: LeftOut) -> str:
    """Return `code: 214 files, 3.1 MB, 12 left out by .gitignore, 1 link`. A folder that is left out counts as one.

    Checkpoints of an earlier time, which nobody means to send, are named: git does not track them.
    """
    links = sum(file.is_link for file in files)
    size = sum(file.status.st_size for file in files if not file.is_link)
    parts = [_count(len(files) - links, "file"), size_text(size)]
    parts += [f"{count} left out by {file}" for file, count in sorted(Counter(left_out.ignore_files()).items())]
    parts += [_count(links, "link")] if links else []
    if size > LARGE:
        parts[-1] += "; the largest: " + ", ".join(f"{f.name} ({size_text(f.status.st_size)})" for f in _largest(files))
    if saved := [file.name for file in files if is_saved(file.name) and not file.tracked]:
        parts.append(f"with {first_of(saved, 3)}, from which a program may start")
    return f"code: {', '.join(parts)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _archive(listing: CodeListing, watch: _Watch) -> tuple[Snapshot, list[CodeFile]]:
    """Return the snapshot and the files in it: what turns out to be a private key is left out now."""
    plain, ends, sent = io.BytesIO(), [0], list[CodeFile]()
    own = [] if listing.trainer is None else list(code_files(listing.trainer))
    added = [replace(file, name=f"{TRAINER}/{file.name}") for file in own]
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for part in (listing.files, added):
            for index, file in enumerate(part):
                watch(index, len(part))
                info, content = _member(file)
                if holds_credentials(file, content):
                    listing.left_out.why[file.name] = CREDENTIALS
                    continue
                tar.addfile(info, io.BytesIO(content))
                if part is listing.files:
                    sent.append(file)
            ends.append(plain.tell())
    data = plain.getvalue()
    digests = [hashlib.sha256(data[start:end]).hexdigest()[:16] for start, end in pairwise(ends)]
    # mtime=0: gzip would write the current time into its header
    archive = gzip.compress(data, compresslevel=1, mtime=0)
    digest = f"{digests[0]} with {TRAINER} {digests[1]}" if added else digests[0]
    return Snapshot(archive, digest, listing.place or listing.folder, listing.left_out, listing.revision), sent


def _member(file: CodeFile) -> tuple[tarfile.TarInfo, bytes]:
    """Return header and content without what differs between machines: owner, times, group and world mode bits."""
    info = tarfile.TarInfo(file.name)
    info.mtime = SENT
    if stat.S_ISLNK(file.status.st_mode):
        target = os.readlink(file.path)  # noqa: PTH115 - Path.readlink removes ./ and //
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, target, 0o777
        return info, b""
    with Path(file.path).open("rb") as source:
        content = source.read(file.status.st_size)  # a growing file, or one of /proc, may be endless
    info.size = len(content)
    info.mode = 0o755 if file.status.st_mode & stat.S_IXUSR else 0o644
    return info, content
