"""Unpacks a tar archive into a folder of this machine; no member can be written anywhere else.

tarfile's filters are not used: Python before 3.10.12 and 3.11.4 (Debian 12) has none.
"""

from __future__ import annotations

import io
import stat
import tarfile
from pathlib import Path, PurePosixPath


def unpack(archive: bytes, folder: Path) -> None:
    """Unpack members with names relative to / into the folder; modes are kept, the owner is the caller.

    All names are checked before the first file is written. Nothing is written through a symbolic link; links may point
    anywhere. Raises tarfile.TarError for an invalid archive, and for a member outside the folder or of another type.
    """
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:*") as tar:
        targets = [(member, _target(member, folder)) for member in tar.getmembers()]
        for member, path in targets:
            _make_parents(path, folder)
            if path.is_symlink() or (path.is_file() and not member.isdir()):
                path.unlink()
            if member.isdir():
                path.mkdir(exist_ok=True)
                path.chmod(member.mode & 0o777 | stat.S_IRWXU)
            elif member.issym():
                path.symlink_to(member.linkname)
            else:
                source = tar.extractfile(member)
                assert source is not None  # a regular file
                path.touch(0o600, exist_ok=False)  # secrets are never readable by others, and no link is followed
                path.write_bytes(source.read())
                path.chmod(member.mode & 0o777)


def _target(member: tarfile.TarInfo, folder: Path) -> Path:
    """Return the path of the member."""
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\0" in member.name:
        raise tarfile.TarError(f"member {member.name!r} has an invalid path")
    path = Path("/") / name
    if not path.is_relative_to(folder):
        raise tarfile.TarError(f"member {member.name!r} is not in {folder}")
    if not (member.isreg() or member.isdir() or member.issym()):
        raise tarfile.TarError(f"member {member.name!r} is not a file, folder or symbolic link")
    if path == folder and not member.isdir():
        raise tarfile.TarError(f"member {member.name!r} would replace a folder")
    return path


def _make_parents(path: Path, top: Path) -> None:
    for parent in reversed(path.parents):
        if parent.is_relative_to(top):
            if parent.is_symlink():
                raise tarfile.TarError(f"{path} would be written through the link {parent}")
            parent.mkdir(mode=0o755, exist_ok=True)
