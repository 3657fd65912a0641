"""Plain processes of this machine as an Engine: no Docker, no ssh, the caller's own Python. On Linux only (connect).

A container is a folder (`folders`), what runs in it is a supervisor (`supervisor`) and its program. Nothing is
remembered here: any process of the same user finds, follows and stops what another one started.
"""

from __future__ import annotations

import contextlib
import getpass
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
from launcher.model.container import ContainerSpec, ContainerState, Phase
from launcher.model.facts import NodeFacts
from launcher.model.forward import Forward
from launcher.model.labels import NODE, PURPOSE, RUN
from launcher.model.limits import DEFAULT_LIMITS, AnswerLimits
from launcher.model.plan import plain
from launcher.node.engine import Engine
from launcher.node.machine import LocalMachine, kill_on_disconnect, shell
from launcher.node.process import folders, supervisor
from launcher.node.process.unpack import unpack
from launcher.node.terminal import here

LOCAL = "local"  # the node that is this whole machine; local-0, local-1, ... are parts of it
_START_TIMEOUT = 20.0
_STOP_MARGIN = 15.0  # seconds above the grace for the supervisor to end what is left
_POLL = 0.05  # seconds between checks where the kernel has no event for the end of a process that is not a child


class ProcessEngine(Engine):
    """A container's id is its name. Every call may be repeated: what is done already is no error."""

    def __init__(self, node: str, limits: AnswerLimits = DEFAULT_LIMITS) -> None:
        super().__init__(node, LOCAL, LocalMachine(node, getpass.getuser(), limits))

    def facts(self) -> NodeFacts:
        """Raises NodeUnfit."""
        return replace(self.look().node, python=sys.executable)

    def create(self, spec: ContainerSpec) -> str:
        """Raises NameTaken, NodeUnfit when its folder cannot be made."""
        folder = Path(spec.layout.kit).parent
        if (folder / supervisor.SPEC).exists() or folders.find(spec.name):
            raise NameTaken(self.node, f"there is a container {spec.name} already", "see what it is: launcher status")
        for place in (spec.layout.code, spec.layout.kit):
            self.files.make_dir(place)
        record = {"spec": plain(spec), "machine": folders.machine_id(), "created": time.time()}
        supervisor.write_whole(str(folder / supervisor.SPEC), json.dumps(record).encode())
        return spec.name

    def claim(self, name: str, image: str, labels: Mapping[str, str]) -> ContainerState | None:  # noqa: ARG002 - no images
        return folders.claim(name, labels)

    def put(self, container: str, archive: bytes) -> None:
        """Only into the code folder and the kit. Raises EngineFailed for what is no archive or goes elsewhere."""
        found = self._get(container)
        places = [Path(found.spec["layout"][place]) for place in ("code", "kit")]
        try:
            unpack(archive, places)
        except tarfile.TarError as error:
            raise EngineFailed(self.node, f"the archive for {container} is refused: {error}") from error
        except OSError as error:
            what = f"could not unpack files into {found.folder}: {error}"
            raise NodeUnfit(self.node, what, "make room there") from error

    def start(self, container: str) -> None:
        """Raises EngineFailed with the system's reason when the program cannot be started."""
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
            reason = "its supervisor recorded nothing" if state.phase is Phase.CREATED else state.error
        except (OSError, subprocess.SubprocessError) as error:
            reason = str(error)
        if reason:
            raise EngineFailed(self.node, f"could not start {container}: {reason}", _cure(found))

    def list(self, labels: Mapping[str, str | None]) -> Sequence[ContainerState]:
        """An engine of the node `local` sees all of this machine, one of `local-0` its own containers only.

        Claims are listed where they are asked for.
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
        """Raises ContainerGone when there is no such container."""
        until = time.monotonic() + timeout
        while True:
            found = self._get(container)
            state = folders.state(found)
            left = until - time.monotonic()
            if state.phase.ended or left <= 0:
                return state
            _until_end(folders.supervisor_of(found), left)

    def stop(self, container: str, grace: float) -> ContainerState:
        """Everything of it has ended when this returns, also where its supervisor was killed before."""
        found = self._get(container)
        if supervisor.is_supervised(str(found.folder)):
            supervisor.write_whole(str(found.folder / supervisor.STOP), str(grace).encode())
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
        """Its folder; the run's output stays. Raises EngineFailed for one that still runs."""
        found = folders.find(container)
        if found is None:
            folders.release(lambda claim: claim.id == container)
            return
        if _is_running(found):
            raise EngineFailed(self.node, f"{container} still runs", "stop it first: launcher down")
        supervisor.end(found.name)
        # The spec goes first: from then on there is no such container, and no half of one should this be interrupted
        (found.folder / supervisor.SPEC).unlink(missing_ok=True)
        try:
            shutil.rmtree(found.folder)
        except OSError as error:
            raise NodeUnfit(self.node, f"could not remove {found.folder}: {error}", "see who owns its files") from error
        run = found.spec["labels"].get(RUN, "")
        if not any(other.spec["labels"].get(RUN) == run for other in folders.every()):
            folders.release(lambda claim: claim.labels.get(RUN) == run)
        with contextlib.suppress(OSError):  # other nodes of this machine use it, or have removed it a moment ago
            found.folder.parent.rmdir()

    def logs(self, container: str, tail: int = 200) -> bytes:
        log = self._get(container).folder / supervisor.LOG
        lines = log.read_bytes().splitlines(keepends=True) if log.exists() else []
        return b"".join(lines[-tail:])

    def interact(
        self,
        container: str,
        argv: Sequence[str],
        *,
        terminal: bool,
        ports: Sequence[Forward] = (),  # noqa: ARG002 - they are here
    ) -> int:
        """It ends with the container. Raises EngineFailed."""
        found = self._get(container)
        within = ("sh", f"{found.spec['layout']['kit']}/within.sh")
        try:
            return here((*within, *argv), terminal=terminal, env=_environment(found), cwd=found.spec["layout"]["code"])
        except OSError as error:
            raise EngineFailed(self.node, f"could not run {argv[0]}: {error.strerror}") from error

    def guard(self, container: str) -> AbstractContextManager[object]:
        script = 'while read -r word; do [ "$word" = done ] && exit; done; kill "$1"'
        return kill_on_disconnect(self.machine, shell(script, str(folders.supervisor_of(self._get(container)))))

    def _get(self, container: str) -> folders.Container:
        found = folders.find(container)
        if found is None:
            what = f"container {container} is gone"
            raise ContainerGone(self.node, what, "was its folder below ~/.launcher removed?")
        return found


def _is_running(found: folders.Container) -> bool:
    """A supervisor that has recorded the end is given the time that it needs to end itself."""
    return _supervised_after(found, _STOP_MARGIN if folders.state(found).phase.ended else 0.0)


def _supervised_after(found: folders.Container, timeout: float) -> bool:
    """Wait for the end of its supervisor; whether there still is one after `timeout` seconds."""
    until = time.monotonic() + timeout
    while supervised := supervisor.is_supervised(str(found.folder)):
        left = until - time.monotonic()
        if left <= 0:
            break
        _until_end(folders.supervisor_of(found), left)
    return supervised


def _until_end(pid: int, timeout: float) -> None:
    """Until that process has ended, `timeout` seconds at most; only _POLL where the kernel cannot tell."""
    handle = -1
    if sys.platform == "linux":
        # Python may lack it; else the process has ended already, or the kernel is older than 5.3
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
    """The caller's, with the caller's Python first in the PATH, as in an activated environment; and its own."""
    own, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != own:
        path = f"{own}{os.pathsep}{path}"
    return {**os.environ, "PATH": path, **container.spec["env"], supervisor.CONTAINER: container.name}


def _cure(container: folders.Container) -> str:
    own_log = container.folder / folders.OWN_LOG
    words = own_log.read_text(errors="replace").strip() if own_log.exists() else ""
    return words[-500:] or "look at the command and the code folder"
