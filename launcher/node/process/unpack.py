"""Unpacking a tar archive into a folder of this machine, so that no member can write anywhere else."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath


class HostileArchiveError(ValueError):
    """A member would be written outside the folders that were allowed, or is of a kind that is not unpacked."""


def unpack(archive: bytes, allowed: Sequence[Path]) -> None:
    """Unpack members whose names are relative to / into the allowed folders; modes are kept, owners are the caller's.

    All names are checked before the first file is written. Nothing is written through a symbolic link; links may point
    anywhere, as they do in a folder of code. Raises HostileArchiveError; tarfile.TarError for what is no archive.
    """
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:*") as tar:
        members = tar.getmembers()
        links: set[Path] = set()
        places = [_place(member, allowed, links) for member in members]
        for member, place in zip(members, places, strict=True):
            _make_parents(place, allowed)
            if member.isdir():
                place.mkdir(exist_ok=True)
                place.chmod(member.mode & 0o777 | stat.S_IRWXU)
            elif member.issym():
                _clear(place)
                place.symlink_to(member.linkname)
            else:
                _clear(place)
                source = tar.extractfile(member)
                assert source is not None  # regular files only come here
                _write(place, source.read(), member.mode & 0o777)


def _place(member: tarfile.TarInfo, allowed: Sequence[Path], links: set[Path]) -> Path:
    """Where the member goes. `links`: the places of all symbolic links before it, to which it is added."""
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\0" in member.name:
        raise HostileArchiveError(f"member {member.name!r} does not stay below /")
    place = Path("/") / name
    if not any(place.is_relative_to(folder) for folder in allowed):
        raise HostileArchiveError(f"member {member.name!r} is not in {' or '.join(map(str, allowed))}")
    if any(parent in links for parent in place.parents):
        raise HostileArchiveError(f"member {member.name!r} goes through a link")
    if not (member.isreg() or member.isdir() or member.issym()):
        raise HostileArchiveError(f"member {member.name!r} is no file, folder or symbolic link")
    if member.issym():
        if place in allowed:
            raise HostileArchiveError(f"member {member.name!r} would replace a folder by a link")
        links.add(place)
    else:
        links.discard(place)
    return place


def _make_parents(place: Path, allowed: Sequence[Path]) -> None:
    """The folders above, none of them a link: one may be there from an earlier archive."""
    top = next(folder for folder in allowed if place.is_relative_to(folder))
    for parent in reversed([place, *place.parents]):
        if parent != place and parent.is_relative_to(top):
            if parent.is_symlink():
                raise HostileArchiveError(f"{parent} is a link")
            parent.mkdir(mode=0o755, exist_ok=True)


def _clear(place: Path) -> None:
    if place.is_symlink() or place.is_file():
        place.unlink()


def _write(place: Path, data: bytes, mode: int) -> None:
    # created with the final mode: a secret is never readable by others, not even for a moment
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    place.chmod(mode)  # the umask may have taken some of it
