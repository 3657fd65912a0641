"""Containers of plain processes on disk, and their states: `~/.launcher/<run>/.node/<node>/`.

Such a folder has `spec.json` (which marks a container), the kit, and the files of its supervisor.
Locks between the runs of this machine (claims) are files in `~/.launcher/.claims-<machine>/`.
A full disk and the programs of runs can leave anything in these files: what has another form is not there.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.model import checked
from launcher.model.checked import OUTPUT_ROOT
from launcher.model.container import ContainerState, Phase
from launcher.model.home import home
from launcher.node.process import supervisor

NODES = ".node"  # in a run's output folder
OWN_LOG = "supervisor.log"  # the supervisor's own stderr
_KILLED = 137  # 128 + SIGKILL: the exit code of a program if its supervisor was killed
_LARGEST_PID = 1 << 22  # PID_MAX_LIMIT
_LAYOUT = {"code": str, "output": str, "kit": str}
_SPEC = {"name": str, "image": str, "labels": dict, "env": dict, "layout": _LAYOUT}
_STATE = {"exit_code": int | None, "restarts": int, "started": int | float, "finished": int | float, "error": str}


@dataclass(frozen=True)
class Container:
    """A container's folder and its ContainerSpec, as a mapping."""

    folder: Path
    spec: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.spec["name"])


def root() -> Path:
    """Return ~/.launcher. Raises UsageError if there is no home folder."""
    return home(os.environ) / OUTPUT_ROOT


def every() -> Sequence[Container]:
    """Return all containers of this machine."""
    found, folder = [], root()
    # Path.glob() raises if a folder is removed meanwhile
    for name in sorted(glob.glob(f"*/{NODES}/*/{supervisor.SPEC}", root_dir=folder)):  # noqa: PTH207
        path = folder / name
        made = _read(path, {"machine": str, "spec": _SPEC})
        spec = made.get("spec", {})
        if _is_whole(spec) and made.get("machine") == machine_id():  # a home may be shared by several machines
            found.append(Container(path.parent, spec))
    return found


def _is_whole(spec: Mapping[str, Any]) -> bool:
    return (
        spec.keys() >= _SPEC.keys()
        and spec["layout"].keys() >= _LAYOUT.keys()
        and all(isinstance(value, str) for value in (*spec["labels"].values(), *spec["env"].values()))
    )


def find(name: str) -> Container | None:
    return next((found for found in every() if found.name == name), None)


def supervisor_of(container: Container) -> int:
    """Return the pid of its supervisor, 0 if it was never started."""
    return int(record(container).get("supervisor", 0))


def state(container: Container) -> ContainerState:
    """Return the state that the supervisor recorded, corrected if it was killed."""
    supervised = supervisor.is_supervised(str(container.folder))  # first: it may exit between the two
    recorded = record(container)
    phase = Phase(recorded.get("phase", "created"))
    error, code = recorded.get("error", ""), recorded.get("exit_code")
    if not supervised and phase in (Phase.RUNNING, Phase.RESTARTING):
        phase, code = Phase.EXITED, _KILLED
        left = len(supervisor.processes(container.name))
        error = f"its supervisor, process {supervisor_of(container)}, was killed or the machine went down"
        if left:
            error += f"; {left} of its processes are still running; to stop them: launcher down"
    return ContainerState(
        id=container.name,
        name=container.name,
        image=container.spec["image"],
        labels=container.spec["labels"],
        phase=phase,
        exit_code=code if phase.ended else None,
        restarts=recorded.get("restarts", 0),
        started=recorded.get("started", 0.0),
        finished=recorded.get("finished", 0.0),
        error=error,
    )


def machine_id() -> str:
    """Return an id that distinguishes this machine from others with the same home folder."""
    try:
        found = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except OSError:
        found = ""
    return found or os.uname().nodename


def record(container: Container) -> dict[str, Any]:
    """Return the state file of the supervisor; empty before its start, or if the disk was full then."""
    found = _read(container.folder / supervisor.STATE, _STATE)
    try:
        found["phase"] = Phase(found.get("phase")).value
        for name in ("supervisor", "pid"):
            found[name] = checked.number(found.get(name, 0), _LARGEST_PID)
    except ValueError:
        return {}
    return found


def _read(path: Path, form: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a JSON object that have this form (checked.fitting); empty for any other file."""
    try:
        found: dict[str, Any] = checked.fitting(json.loads(supervisor.read_whole(str(path))), form)
    except (FileNotFoundError, PermissionError, ValueError, RecursionError):
        return {}
    return found


def claim(name: str, labels: Mapping[str, str]) -> ContainerState | None:
    """Take the lock and return None, or return the existing one."""
    with _claims() as folder:
        file = folder / name
        existing = _claim_in(file)
        if existing is None:
            supervisor.write_whole(str(file), json.dumps(dict(labels)).encode())
        return existing


def claims() -> list[ContainerState]:
    """Return the locks of this machine, for any of its nodes."""
    if not _claims_folder().exists():
        return []
    with _claims() as folder:
        found = [_claim_in(file) for file in sorted(folder.iterdir())]
    return [each for each in found if each is not None]


def release(chosen: Callable[[ContainerState], bool]) -> None:
    """Remove the chosen locks, and files without one."""
    with _claims() as folder:
        for file in folder.iterdir():
            existing = _claim_in(file)
            if existing is None or chosen(existing):
                file.unlink()


def _claims_folder() -> Path:
    """A home may be shared by several machines, and each has its own GPUs and ports.

    Not below `.claims`, in which earlier launchers expect nothing but files.
    """
    return root() / f".claims-{machine_id()}"


@contextlib.contextmanager
def _claims() -> Iterator[Path]:
    """The folder of this machine's locks, for one process at a time; removed if it is left empty."""
    folder = _claims_folder()
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


def _claim_in(file: Path) -> ContainerState | None:
    """Return the lock that a file holds, as a container that never started; None for a file that is missing, or that a
    full disk has left without its whole content.

    Its id is that of this file: later, another run may hold the lock of this name.
    """
    labels = _read(file, {})  # of any form: who needs them checks them (model.labels)
    if not labels:
        return None
    found = file.stat()
    identity = f"{file.name}@{found.st_ino}.{found.st_mtime_ns}"
    return ContainerState(id=identity, name=file.name, image="", labels=labels, phase=Phase.CREATED)
