"""Names that only one run of this machine's plain processes can have: files in `~/.launcher/.claims/`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from launcher.model.container import ContainerState, Phase
from launcher.node.process import folders


def claim(name: str, labels: Mapping[str, str]) -> ContainerState | None:
    """None: the caller has it now; else the claim that has it."""
    with _claims() as folder:
        file = folder / name
        if file.exists():
            return _state(file)
        file.write_text(json.dumps(dict(labels)))
        return None


def release(chosen: Callable[[ContainerState], bool]) -> None:
    with _claims() as folder:
        for file in folder.iterdir():
            if chosen(_state(file)):
                file.unlink()


@contextlib.contextmanager
def _claims() -> Iterator[Path]:
    """Their folder, for one process at a time; it is removed with its last claim."""
    folder = folders.root() / ".claims"
    folders.root().mkdir(mode=0o700, exist_ok=True)
    lock = os.open(folders.root(), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder.mkdir(mode=0o700, exist_ok=True)
        yield folder
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
    finally:
        os.close(lock)


def _state(file: Path) -> ContainerState:
    made = file.stat()
    claim = f"{file.name}@{made.st_ino}.{made.st_mtime_ns}"
    return ContainerState(claim, file.name, "", labels=json.loads(file.read_text()), phase=Phase.CREATED)
