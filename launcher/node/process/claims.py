"""Names that only one run of this machine's plain processes can have: files in `~/.launcher/.claims/`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.model.container import ContainerState, Phase
from launcher.model.labels import RUN
from launcher.node.process import folders


def claim(name: str, labels: Mapping[str, str]) -> ContainerState | None:
    """None: it is ours now; else who has it."""
    with _turn() as folder:
        file = folder / name
        if file.exists():
            return _state(file)
        file.write_text(json.dumps(dict(labels)))
        return None


def let_go(claim_id: str) -> bool:
    """Give up a claim by its id; False where there is no such claim (any more)."""
    with _turn() as folder:
        for file in folder.iterdir():
            if file.is_file() and _state(file).id == claim_id:
                file.unlink()
                return True
    return False


def let_go_all(run: str) -> None:
    """Those of a run, of which nothing is left."""
    if not _folder().exists():
        return
    with _turn() as folder:
        for file in folder.iterdir():
            if file.is_file() and _state(file).labels.get(RUN) == run:
                file.unlink()


def _folder() -> Path:
    return folders.root() / ".claims"


@contextlib.contextmanager
def _turn() -> Iterator[Path]:
    """One process at a time; the folder goes with its last claim."""
    folder = _folder()
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
    labels = json.loads(file.read_text())
    made = file.stat()
    return ContainerState(
        id=f"{file.name}@{made.st_ino}.{made.st_mtime_ns}",
        name=file.name,
        image="",
        labels=labels,
        phase=Phase.CREATED,
        exit_code=None,
        oom_killed=False,
        restarts=0,
        started=0.0,
        finished=0.0,
    )
