"""Unpacking a tar archive into folders of this machine, so that no member can be written anywhere else.

Not by tarfile's filters: Python before 3.10.12 and 3.11.4 (Debian 12's) has none, and `data_filter` refuses links that
lead out of the folder, which code may hold.
"""

from __future__ import annotations

import io
import stat
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath


def unpack(archive: bytes, allowed: Sequence[Path]) -> None:
    """Unpack members whose names are relative to / into the allowed folders; modes are kept, owners are the caller's.

    All names are checked before the first file is written. Nothing is written through a symbolic link; links may point
    anywhere, as they do in a folder of code. Raises tarfile.TarError for a member that would be written outside the
    folders or is of another kind, and for what is no archive.
    """
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:*") as tar:
        places = [(member, *_place(member, allowed)) for member in tar.getmembers()]
        for member, place, top in places:
            _make_parents(place, top)
            if place.is_symlink() or (place.is_file() and not member.isdir()):
                place.unlink()
            if member.isdir():
                place.mkdir(exist_ok=True)
                place.chmod(member.mode & 0o777 | stat.S_IRWXU)
            elif member.issym():
                place.symlink_to(member.linkname)
            else:
                source = tar.extractfile(member)
                assert source is not None  # a regular file
                place.touch(0o600, exist_ok=False)  # a secret is never readable by others, and no link is followed
                place.write_bytes(source.read())
                place.chmod(member.mode & 0o777)


def _place(member: tarfile.TarInfo, allowed: Sequence[Path]) -> tuple[Path, Path]:
    """Where the member goes, and the allowed folder that this is in."""
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\0" in member.name:
        raise tarfile.TarError(f"member {member.name!r} does not stay below /")
    place = Path("/") / name
    top = next((folder for folder in allowed if place.is_relative_to(folder)), None)
    if top is None:
        raise tarfile.TarError(f"member {member.name!r} is not in {' or '.join(map(str, allowed))}")
    if not (member.isreg() or member.isdir() or member.issym()):
        raise tarfile.TarError(f"member {member.name!r} is no file, folder or symbolic link")
    if place == top and not member.isdir():
        raise tarfile.TarError(f"member {member.name!r} would replace a folder")
    return place, top


def _make_parents(place: Path, top: Path) -> None:
    for parent in reversed(place.parents):
        if parent.is_relative_to(top):
            if parent.is_symlink():
                raise tarfile.TarError(f"{place} goes through the link {parent}")
            parent.mkdir(mode=0o755, exist_ok=True)
