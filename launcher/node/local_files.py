"""The files of this machine."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.errors import NodeUnfit
from launcher.node.engine import FileEntry


class LocalFiles:
    """Implements Files. Several nodes may share a folder of this machine: what vanishes meanwhile is no error."""

    def __init__(self, node: str) -> None:
        self.node = node

    def make_dir(self, path: str) -> None:
        """Raises NodeUnfit when it cannot be made."""
        try:
            for folder in reversed([_absolute(path), *_absolute(path).parents]):
                with contextlib.suppress(FileExistsError):  # mkdir(parents=True) gives its mode to the last one only
                    folder.mkdir(mode=0o700)
            if not Path(path).is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "is a file, not a folder", path)
        except OSError as error:
            raise self._unfit(f"make the folder {path}", error) from error

    def read(self, path: str, offset: int = 0, limit: int = 1 << 20) -> bytes:
        """Raises FileNotFoundError, PermissionError, OSError of the file."""
        with _absolute(path).open("rb") as file:
            file.seek(offset)
            return file.read(limit)

    def write(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """All of it or nothing: a temporary file beside it takes its name. Raises NodeUnfit."""
        temporary = _absolute(path).with_name(f"{Path(path).name}.{secrets.token_hex(4)}.part")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            temporary.chmod(mode)
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise self._unfit(f"write {path}", error) from error

    def scan(self, root: str) -> Sequence[FileEntry]:
        """Raises NodeUnfit for a folder that may not be read."""
        try:
            return list(_entries(_absolute(root), ""))
        except OSError as error:
            raise self._unfit(f"list {root}", error) from error

    def copy_tree(self, source: str, target: str) -> bool:
        """Raises NodeUnfit, also where there is no room for it."""
        if not _absolute(source).is_dir():
            return False
        try:
            shutil.copytree(source, _absolute(target), symlinks=True, dirs_exist_ok=True)
        except shutil.Error as error:
            raise NodeUnfit(self.node, f"could not copy {source}: {error}", "make room: launcher clean") from error
        except OSError as error:
            raise self._unfit(f"copy {source}", error) from error
        return True

    def remove_tree(self, path: str) -> None:
        """Raises NodeUnfit when something of it cannot be removed."""
        folder = _absolute(path)
        if len(folder.parts) < 3 or ".." in folder.parts:
            raise ValueError(f"{path} is no folder that the launcher may remove")
        while folder.exists():
            try:
                shutil.rmtree(folder)
            except FileNotFoundError:
                continue  # something in it vanished meanwhile: somebody else is removing it too
            except OSError as error:
                raise self._unfit(f"remove {path}", error) from error

    def _unfit(self, doing: str, error: OSError) -> NodeUnfit:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cure = "make room: launcher clean" if full else "look at its owner and mode with ls -ld"
        return NodeUnfit(self.node, f"could not {doing}: {error.strerror} ({error.filename})", cure)


def _entries(folder: Path, prefix: str) -> Iterator[FileEntry]:
    try:
        with os.scandir(folder) as found:
            for entry in found:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        yield from _entries(Path(entry.path), f"{prefix}{entry.name}/")
                    elif entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        yield FileEntry(f"{prefix}{entry.name}", status.st_size, status.st_mtime)
    except (FileNotFoundError, NotADirectoryError):
        return


def _absolute(path: str) -> Path:
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"{path!r} is no absolute path")
    return Path(path)
