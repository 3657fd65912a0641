"""The code folder as one reproducible archive: the same files give the same bytes, so the digest names the code."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pathspec

from launcher.errors import JobInvalid

# Never code: version control, our own records, caches, environments.
_ALWAYS = (".git/", "/runs/", "__pycache__/", ".venv/", "*.pyc", ".mypy_cache/", ".ruff_cache/", ".pytest_cache/")
_IGNORE_FILES = (".gitignore", ".dockerignore")
LIMIT = 512 << 20


@dataclass(frozen=True)
class Snapshot:
    """`archive` is a tar.gz of plain relative names; `digest` is of its uncompressed bytes."""

    archive: bytes
    digest: str


def snapshot(folder: Path) -> Snapshot:
    """Pack the folder, without what .gitignore and .dockerignore name.

    Symbolic links are kept as links. Raises JobInvalid where the code is larger than 512 MiB, naming the largest files,
    before anything of it is read; and for a file that cannot be read.
    """
    plain = io.BytesIO()
    try:
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path, status in _within_limit(folder):
                info, content = _member(folder, path, status)
                tar.addfile(info, io.BytesIO(content))
    except OSError as error:
        cure = "make it readable for you, or name it in .dockerignore"
        raise JobInvalid(f"code {error.filename or folder}", f"cannot be read: {error.strerror}", cure) from error
    data = plain.getvalue()
    # mtime=0: gzip would put the time of day into its header
    return Snapshot(gzip.compress(data, compresslevel=1, mtime=0), hashlib.sha256(data).hexdigest()[:16])


def repack(archive: bytes, prefix: str, uid: int, gid: int) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """The members of a snapshot as they go into a container: below `prefix`, owned by the run's user."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for member in tar:
            source = tar.extractfile(member) if member.isreg() else None
            member.name = f"{prefix}/{member.name}"
            member.uid, member.gid = uid, gid
            yield member, source.read() if source else None


def _within_limit(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """What belongs to the code, from sizes alone: one file may be larger than memory. Raises JobInvalid."""
    found: list[tuple[Path, os.stat_result]] = []
    total = 0
    for path, status in _files(folder):
        found.append((path, status))
        total += status.st_size
        if total > LIMIT:
            by_size = sorted(found, key=lambda file: file[1].st_size, reverse=True)
            largest = ", ".join(f"{path.relative_to(folder)} ({st.st_size >> 20} MiB)" for path, st in by_size[:3])
            raise JobInvalid(
                f"code {folder}",
                f"is larger than {LIMIT >> 20} MiB; the largest: {largest}",
                "name data in .dockerignore and mount it instead: mounts: {/data: /data:ro}",
            )
    return found


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Files and links below the folder, sorted, ignored ones left out; an ignored folder is not entered."""
    rules: list[tuple[Path, pathspec.PathSpec[pathspec.Pattern]]] = [(folder, _spec(_ALWAYS))]
    for here, folders, names in os.walk(folder):
        at = Path(here)
        rules.extend(
            (at, _spec((at / name).read_text(encoding="utf-8", errors="replace").splitlines()))
            for name in _IGNORE_FILES
            if name in names and (name == ".gitignore" or at == folder)
        )
        folders[:] = sorted(f for f in folders if not _ignored(rules, at / f, is_folder=not (at / f).is_symlink()))
        links = [f for f in folders if (at / f).is_symlink()]
        for name in sorted([*names, *links]):
            path = at / name
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                status = path.lstat()
                kind = stat.S_IFMT(status.st_mode)
                if kind in (stat.S_IFREG, stat.S_IFLNK) and not _ignored(rules, path, is_folder=False):
                    yield path, status


def _spec(lines: tuple[str, ...] | list[str]) -> pathspec.PathSpec[pathspec.Pattern]:
    return pathspec.PathSpec.from_lines("gitignore", lines)


def _ignored(rules: list[tuple[Path, pathspec.PathSpec[pathspec.Pattern]]], path: Path, *, is_folder: bool) -> bool:
    """The deepest ignore file that says anything about the path decides, as git does."""
    for root, spec in reversed(rules):
        if not path.is_relative_to(root):
            continue
        name = path.relative_to(root).as_posix() + ("/" if is_folder else "")
        verdict = spec.check_file(name).include
        if verdict is not None:
            return verdict
    return False


def _member(folder: Path, path: Path, status: os.stat_result) -> tuple[tarfile.TarInfo, bytes]:
    """Header and content, without what differs between two machines: owner, times, group and world write bits."""
    info = tarfile.TarInfo(path.relative_to(folder).as_posix())
    if stat.S_ISLNK(status.st_mode):
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
        return info, b""
    with path.open("rb") as file:
        content = file.read(status.st_size)  # a file that grows, or one of /proc, may have no end
    info.size = len(content)
    info.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
    return info, content
