"""The Engine for plain processes: no Docker, no ssh, the caller's own Python. Linux only (checked in connect).

A container is a folder (`folders`) in which a supervisor (`supervisor`) runs a program. All state is on disk: any
process of the same user can find, follow and stop containers that another one started.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from launcher.errors import ContainerGone, EngineFailed, NameTaken, NodeUnfit
from launcher.faults import disk
from launcher.model.container import ContainerSpec, ContainerState, Phase
from launcher.model.facts import NodeFacts
from launcher.model.forward import Forward
from launcher.model.home import user_name, with_home
from launcher.model.inherited import without_a_run
from launcher.model.labels import NODE, PURPOSE, RUN
from launcher.model.limits import DEFAULT_LIMITS, AnswerLimits
from launcher.model.plan import plain
from launcher.node.engine import Engine
from launcher.node.machine import LocalMachine, kill_on_disconnect, shell
from launcher.node.process import folders, supervisor
from launcher.node.process.unpack import unpack
from launcher.node.terminal import run_attached

LOCAL = "local"  # the node for the whole machine; local-0, local-1, ... are parts of it
_START_TIMEOUT = 20.0
_STOP_MARGIN = 15.0  # seconds beyond the grace for the supervisor to kill remaining processes
_POLL = 0.05  # seconds between checks if pidfd_open is not available
FULL = 64 << 10  # bytes: a disk with less room is full


class ProcessEngine(Engine):
    """A container's id is its name. Calls are idempotent."""

    def __init__(self, node: str, limits: AnswerLimits = DEFAULT_LIMITS) -> None:
        super().__init__(node, LOCAL, LocalMachine(node, user_name(), limits))

    def facts(self) -> NodeFacts:
        """Raises NodeUnfit."""
        return replace(self.machine_facts().node, python=sys.executable)

    def create(self, spec: ContainerSpec) -> str:
        """Raises NameTaken, NodeUnfit if its folder cannot be created."""
        folder = Path(spec.layout.kit).parent
        if (folder / supervisor.SPEC).exists() or folders.find(spec.name):
            raise NameTaken(self.node, f"container {spec.name} already exists", "find its run with: launcher status")
        self.files.make_dir(spec.layout.kit)
        record = {"spec": plain(spec), "machine": folders.machine_id(), "created": time.time()}
        try:
            supervisor.write_whole(str(folder / supervisor.SPEC), json.dumps(record).encode())
        except OSError as error:
            raise self._unwritten(folder / supervisor.SPEC, error) from error
        return spec.name

    def claim(self, name: str, image: str, labels: Mapping[str, str]) -> ContainerState | None:  # noqa: ARG002 - no images
        try:
            return folders.claim(name, labels)
        except OSError as error:
            raise self._unwritten(folders.root(), error) from error

    def put(self, container: str, archive: bytes) -> None:
        """Only into the kit. Raises EngineFailed for an invalid archive or other destinations."""
        found = self._get(container)
        try:
            unpack(archive, Path(found.spec["layout"]["kit"]))
        except tarfile.TarError as error:
            raise EngineFailed(self.node, f"refused the archive for {container}: {error}") from error
        except OSError as error:
            raise self._unwritten(found.folder, error) from error

    def _unwritten(self, path: Path, error: OSError) -> NodeUnfit:
        if disk.is_full(error):
            found = disk.full(disk.OUTPUT, error)
            return NodeUnfit(self.node, f"{found.what}: could not write {path}", found.fix)
        return NodeUnfit(self.node, f"could not write {path}: {error.strerror}", "check the permissions of that folder")

    def start(self, container: str) -> None:
        """Raises EngineFailed with the system's message if the program cannot be started, ContainerGone."""
        found = self._get(container)
        if _is_running(found):
            return
        for old in (supervisor.STOP, supervisor.STATE):
            (found.folder / old).unlink(missing_ok=True)
        try:
            with (found.folder / folders.OWN_LOG).open("ab") as own_log:
                subprocess.run(
                    [sys.executable, "-I", "-S", supervisor.__file__, str(found.folder)],
                    env=_environment(found),
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=own_log,
                    stderr=own_log,
                    start_new_session=True,
                    check=True,
                    timeout=_START_TIMEOUT,
                )
            state = folders.state(found)
            reason = "its supervisor recorded no state" if state.phase is Phase.CREATED else state.error
        except (OSError, subprocess.SubprocessError) as error:
            reason = str(error)
        if reason and shutil.disk_usage(found.folder).free < FULL:
            _supervised_after(found, _STOP_MARGIN)  # it exits, as it could not record its state
            raise self._unwritten(found.folder, OSError(errno.ENOSPC, reason))
        if reason:
            self._get(container)  # removed while it started
            raise EngineFailed(self.node, f"could not start {container}: {reason}", _start_fix(found))

    def list(self, labels: Mapping[str, str | None]) -> Sequence[ContainerState]:
        """The node `local` lists all containers of this machine, `local-0` only its own.

        Locks (claims) are listed only if requested by label.
        """
        if labels.get(PURPOSE) == "claim":
            return folders.claims()
        wanted = dict(labels) if self.node == LOCAL else {NODE: self.node, **labels}
        return [
            folders.state(found)
            for found in folders.every()
            if all(k in found.spec["labels"] and v in (None, found.spec["labels"][k]) for k, v in wanted.items())
        ]

    def wait(self, container: str, timeout: float) -> ContainerState:
        """Raises ContainerGone if the container does not exist."""
        until = time.monotonic() + timeout
        while True:
            found = self._get(container)
            state = folders.state(found)
            left = until - time.monotonic()
            if state.phase.ended or left <= 0:
                return state
            _until_end(folders.supervisor_of(found), left)

    def stop(self, container: str, grace: float) -> ContainerState:
        """All its processes have exited when this returns, even if its supervisor was killed before."""
        found = self._get(container)
        if supervisor.is_supervised(str(found.folder)):
            try:
                supervisor.write_whole(str(found.folder / supervisor.STOP), str(grace).encode())
            except OSError:  # a full disk must not keep it running
                grace = max(grace, supervisor.GRACE)
            supervisor.send(folders.supervisor_of(found), signal.SIGTERM)
            _supervised_after(found, grace + _STOP_MARGIN)
        elif not (found.folder / supervisor.STATE).exists():
            return folders.state(found)  # never started
        state = folders.state(found)
        supervisor.end(found.name)
        return state

    def signal(self, container: str, name: str) -> None:
        found = self._get(container)
        if folders.state(found).phase is Phase.RUNNING:
            supervisor.send(folders.record(found).get("pid", 0), signal.Signals[f"SIG{name}"])

    def remove(self, container: str) -> None:
        """Remove its folder; keep the run's output. Raises EngineFailed if it is running."""
        found = folders.find(container)
        if found is None:
            folders.release(lambda claim: claim.id == container)
            return
        if _is_running(found):
            raise EngineFailed(self.node, f"{container} is still running", "stop it first: launcher down")
        supervisor.end(found.name)
        # Remove the spec first: if this is interrupted, no partial container is listed
        (found.folder / supervisor.SPEC).unlink(missing_ok=True)
        try:
            while found.folder.exists():
                with contextlib.suppress(FileNotFoundError):  # another process removes it at the same time
                    shutil.rmtree(found.folder)
        except OSError as error:
            what = f"could not remove {found.folder}: {error}"
            raise NodeUnfit(self.node, what, "check the owner and permissions of its files") from error
        run = found.spec["labels"].get(RUN, "")
        if not any(other.spec["labels"].get(RUN) == run for other in folders.every()):
            folders.release(lambda claim: claim.labels.get(RUN) == run)
        with contextlib.suppress(OSError):  # in use by other nodes of this machine, or already removed by them
            found.folder.parent.rmdir()

    def logs(self, container: str, tail: int = 200) -> bytes:
        try:
            text = supervisor.read_whole(str(self._get(container).folder / supervisor.LOG))
        except FileNotFoundError:
            return b""
        return b"".join(text.splitlines(keepends=True)[-tail:])

    def interact(
        self,
        container: str,
        argv: Sequence[str],
        *,
        terminal: bool,
        ports: Sequence[Forward] = (),  # noqa: ARG002 - already local
    ) -> int:
        """The command is killed with the container. Raises EngineFailed."""
        found = self._get(container)
        within = ("sh", f"{found.spec['layout']['kit']}/within.sh")
        try:
            code = found.spec["layout"]["code"]
            return run_attached((*within, *argv), terminal=terminal, env=_environment(found), cwd=code)
        except OSError as error:
            raise EngineFailed(self.node, f"could not run {argv[0]}: {error.strerror}") from error

    def guard(self, container: str) -> AbstractContextManager[object]:
        script = 'while read -r word; do [ "$word" = done ] && exit; done; kill "$1"'
        return kill_on_disconnect(self.machine, shell(script, str(folders.supervisor_of(self._get(container)))))

    def _get(self, container: str) -> folders.Container:
        found = folders.find(container)
        if found is None:
            what = f"container {container} no longer exists"
            fix = "`launcher down` has removed it, or its folder in ~/.launcher was deleted"
            raise ContainerGone(self.node, what, fix)
        return found


def _is_running(found: folders.Container) -> bool:
    """Whether the supervisor runs. One that has recorded the exit of its program gets time to exit."""
    return _supervised_after(found, _STOP_MARGIN if folders.state(found).phase.ended else 0.0)


def _supervised_after(found: folders.Container, timeout: float) -> bool:
    """Wait for its supervisor to exit; return whether it still runs after `timeout` seconds."""
    until = time.monotonic() + timeout
    while supervised := supervisor.is_supervised(str(found.folder)):
        left = until - time.monotonic()
        if left <= 0:
            break
        _until_end(folders.supervisor_of(found), left)
    return supervised


def _until_end(pid: int, timeout: float) -> None:
    """Wait until the process exits, at most `timeout` seconds; only _POLL if there is no pidfd_open."""
    handle = -1
    if sys.platform == "linux":
        # missing in some builds of Python; OSError: the process has exited, or the kernel is older than 5.3
        with contextlib.suppress(AttributeError, OSError):
            handle = os.pidfd_open(pid)
    if handle < 0:
        time.sleep(min(_POLL, timeout))
        return
    try:
        select.select([handle], [], [], timeout)
    finally:
        os.close(handle)


def _environment(container: folders.Container) -> dict[str, str]:
    """Return the caller's environment, its Python first in PATH as in an activated venv, and the container's own.

    The caller may be a program of another run, whose variables are not passed on.
    """
    own, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != own:
        path = f"{own}{os.pathsep}{path}"
    return {
        **without_a_run(with_home(os.environ)),
        "PATH": path,
        **container.spec["env"],
        supervisor.CONTAINER: container.name,
    }


def _start_fix(container: folders.Container) -> str:
    own_log = container.folder / folders.OWN_LOG
    text = own_log.read_text(errors="replace").strip() if own_log.exists() else ""
    return text[-500:] or "check the command and the code folder"
