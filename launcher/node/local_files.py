"""The files of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from launcher.node.engine import FileEntry


class LocalFiles:
    """Files of this machine, behind the seam."""

    def __init__(self, node: str) -> None:
        self.node = node

    def make_dir(self, path: str) -> None:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)

    def read(self, path: str, offset: int = 0, limit: int = 1 << 20) -> bytes:
        with Path(path).open("rb") as file:
            file.seek(offset)
            return file.read(limit)

    def write(self, path: str, data: bytes, mode: int = 0o600) -> None:
        Path(path).write_bytes(data)
        Path(path).chmod(mode)

    def scan(self, root: str) -> Sequence[FileEntry]:
        found = []
        for here, _, names in os.walk(root):
            for name in names:
                path = Path(here) / name
                if path.is_file() and not path.is_symlink():
                    status = path.stat()
                    found.append(FileEntry(path.relative_to(root).as_posix(), status.st_size, status.st_mtime))
        return found

    def remove_tree(self, path: str) -> None:
        shutil.rmtree(path, ignore_errors=True)
