"""The containers of plain processes on disk, and their states: `~/.launcher/<run>/.node/<node>/`.

In such a folder: `spec.json` (which makes it a container), the code, the kit, and the files of its supervisor.
Names that only one run of this machine can have are files in `~/.launcher/.claims/`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.model.checked import OUTPUT_ROOT
from launcher.model.container import ContainerState, Phase
from launcher.model.home import home
from launcher.node.process import supervisor

NODES = ".node"  # in a run's output folder
OWN_LOG = "supervisor.log"  # the supervisor's own stderr
_KILLED = 137  # 128 + SIGKILL: the exit code of a program whose supervisor is dead


@dataclass(frozen=True)
class Container:
    """A container's folder and what was asked for in it."""

    folder: Path
    spec: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.spec["name"])


def root() -> Path:
    """Raises UsageError where there is no home folder."""
    return home(os.environ) / OUTPUT_ROOT


def every() -> Sequence[Container]:
    """Every container of this machine."""
    found = []
    for path in sorted(root().glob(f"*/{NODES}/*/{supervisor.SPEC}")):
        try:
            made = json.loads(path.read_bytes())
        except FileNotFoundError:  # removed since
            continue
        if made["machine"] == machine_id():  # a home may be shared by several machines
            found.append(Container(path.parent, made["spec"]))
    return found


def find(name: str) -> Container | None:
    return next((found for found in every() if found.name == name), None)


def supervisor_of(container: Container) -> int:
    """Its pid, 0 where there was none."""
    return int(record(container).get("supervisor", 0))


def state(container: Container) -> ContainerState:
    """What the supervisor recorded, corrected where it has been killed."""
    supervised = supervisor.is_supervised(str(container.folder))  # first: it may end between the two
    told = record(container)
    phase = Phase(told.get("phase", "created"))
    error, code = told.get("error", ""), told.get("exit_code")
    if not supervised and phase in (Phase.RUNNING, Phase.RESTARTING):
        phase, code = Phase.EXITED, _KILLED
        left = len(supervisor.processes(container.name))
        error = f"its supervisor, process {told['supervisor']}, was killed or the machine went down"
        if left:
            error += f"; {left} of its processes still run, and `launcher down` ends them"
    return ContainerState(
        id=container.name,
        name=container.name,
        image=container.spec["image"],
        labels=container.spec["labels"],
        phase=phase,
        exit_code=code if phase.ended else None,
        restarts=told.get("restarts", 0),
        started=told.get("started", 0.0),
        finished=told.get("finished", 0.0),
        error=error,
    )


def machine_id() -> str:
    """Distinguishes this machine from others that share its home."""
    try:
        found = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except OSError:
        found = ""
    return found or os.uname().nodename


def record(container: Container) -> dict[str, Any]:
    """The supervisor's own; empty before its start."""
    try:
        found: dict[str, Any] = json.loads((container.folder / supervisor.STATE).read_bytes())
    except FileNotFoundError:
        return {}
    return found


def claim(name: str, labels: Mapping[str, str]) -> ContainerState | None:
    """None: the caller has it now; else the claim that has it."""
    with _claims() as folder:
        file = folder / name
        if file.exists():
            return _claim_state(file)
        file.write_text(json.dumps(dict(labels)))
        return None


def claims() -> list[ContainerState]:
    """Those that processes of this machine have, whichever of its nodes they are for."""
    if not (root() / ".claims").exists():
        return []
    with _claims() as folder:
        return [_claim_state(file) for file in sorted(folder.iterdir())]


def release(chosen: Callable[[ContainerState], bool]) -> None:
    with _claims() as folder:
        for file in folder.iterdir():
            if chosen(_claim_state(file)):
                file.unlink()


@contextlib.contextmanager
def _claims() -> Iterator[Path]:
    """Their folder, for one process at a time; it is removed with its last claim."""
    folder = root() / ".claims"
    root().mkdir(mode=0o700, exist_ok=True)
    lock = os.open(root(), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder.mkdir(mode=0o700, exist_ok=True)
        yield folder
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
    finally:
        os.close(lock)


def _claim_state(file: Path) -> ContainerState:
    made = file.stat()
    claim = f"{file.name}@{made.st_ino}.{made.st_mtime_ns}"
    return ContainerState(claim, file.name, "", labels=json.loads(file.read_text()), phase=Phase.CREATED)
