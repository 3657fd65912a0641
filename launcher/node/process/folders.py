"""The containers of plain processes on disk, and their states: `~/.launcher/<run>/.node/<node>/`.

In such a folder: `spec.json` (which makes it a container), the code, the kit, and the files of its supervisor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.model.container import ContainerState, Phase
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
    return Path.home() / ".launcher"


def every() -> Sequence[Container]:
    """Every container of this machine."""
    found = []
    for path in sorted(root().glob(f"*/{NODES}/*/{supervisor.SPEC}")):
        try:
            record = json.loads(path.read_bytes())
        except FileNotFoundError:  # removed since
            continue
        if record["machine"] == machine_id():  # a home may be shared by several machines
            found.append(Container(path.parent, record["spec"]))
    return found


def find(name: str) -> Container | None:
    return next((found for found in every() if found.name == name), None)


def supervisor_of(container: Container) -> int:
    """Its pid, 0 where there was none."""
    return int(_record(container).get("supervisor", 0))


def program_of(container: Container) -> int:
    """The pid of what runs in it, 0 where nothing does."""
    record = _record(container)
    running = supervisor.is_supervised(str(container.folder)) and record.get("phase") == "running"
    return int(record.get("pid", 0)) if running else 0


def state(container: Container) -> ContainerState:
    """What the supervisor recorded, corrected where it has been killed."""
    supervised = supervisor.is_supervised(str(container.folder))  # first: it may end between the two
    record = _record(container)
    phase = Phase(record.get("phase", "created"))
    error, code, finished = record.get("error", ""), record.get("exit_code"), record.get("finished", 0.0)
    if not supervised and phase in (Phase.RUNNING, Phase.RESTARTING):
        phase, code = Phase.EXITED, _KILLED
        left = len(supervisor.processes(container.name))
        error = f"its supervisor, process {record['supervisor']}, was killed or the machine went down"
        if left:
            error += f"; {left} of its processes still run, and `launcher down` ends them"
    return ContainerState(
        id=container.name,
        name=container.name,
        image=container.spec["image"],
        labels=container.spec["labels"],
        phase=phase,
        exit_code=code if phase.ended else None,
        restarts=record.get("restarts", 0),
        started=record.get("started", 0.0),
        finished=finished,
        error=error,
    )


def machine_id() -> str:
    """Distinguishes this machine from others that share its home."""
    try:
        found = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except OSError:
        found = ""
    return found or os.uname().nodename


def _record(container: Container) -> dict[str, Any]:
    """The supervisor's own; empty before its start."""
    try:
        record: dict[str, Any] = json.loads((container.folder / supervisor.STATE).read_bytes())
    except FileNotFoundError:
        return {}
    return record
