"""The one seam to machines: Docker, here or over ssh, plain processes, Slurm. All above it is written once."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from launcher.errors import EngineFailed, NodeUnfit
from launcher.model.container import ContainerSpec, ContainerState
from launcher.model.facts import NodeFacts
from launcher.model.forward import Forward
from launcher.node import facts as node_facts
from launcher.node.files import Files
from launcher.node.machine import Machine, run_script

if TYPE_CHECKING:  # plain processes do without docker-py
    from launcher.node.docker.images import DockerImages

UID = 'echo "@@uid $(id -u)"'  # marked: a login shell may print lines of its own
# What PyTorch, Python, NCCL, OpenMP and UCX leave in /dev/shm with --ipc=host when they are killed. No other name is
# touched: a user's data set may be there.
SHARED = ("torch_*", "psm_*", "sem.mp-*", "sem.loky-*", "nccl-*", "__KMP_REGISTERED_LIB_*", "cuda.shm.*", "ucx_shm_*")
# Removes such files of this user that no process has open and prints their names. $1: seconds since the epoch, by this
# node's clock; older ones stay.
SWEEP = f"""
since=$1
for pattern in {" ".join(f"'{name}'" for name in SHARED)}; do
  find /dev/shm -maxdepth 1 -type f -user "$(id -u)" -name "$pattern" 2>/dev/null
done | while IFS= read -r file; do
  changed=$(stat -c %Y -- "$file" 2>/dev/null) || continue
  [ "$changed" -ge "$since" ] || continue
  grep -qsF -- "$file" /proc/[0-9]*/maps && continue
  find /proc/[0-9]*/fd -lname "$file" 2>/dev/null | grep -q . && continue
  rm -f -- "$file" && printf '%s\\n' "${{file##*/}}"
done
"""


class Engine(Protocol):
    """One node. Every call has a time limit and raises an error of launcher.errors that names the node.

    To be inherited from: what needs no containers is done here.
    """

    node: str
    host: str
    machine: Machine
    files: Files
    _uid: int | None  # once it is known

    def __init__(self, node: str, host: str, machine: Machine) -> None:
        self.node = node
        self.host = host
        self.machine = machine
        self.files = Files(machine)
        self._uid = None

    @property
    def images(self) -> DockerImages | None:
        """None where there are none: for plain processes, on a cluster."""
        return None

    def uid(self) -> int:
        """The ssh user's on the node, asked for once. Raises NodeUnreachable, NodeUnfit."""
        if self._uid is None:
            found = re.search(rb"@@uid ([0-9]{1,10})\n", self.sh(UID))
            if found is None:
                raise NodeUnfit(self.node, "its shell does not tell the uid of its user", "look at its login shell")
            self._uid = int(found.group(1))
        return self._uid

    def look(self) -> node_facts.Look:
        """What the machine tells of itself. Raises NodeUnfit, NodeUnreachable."""
        seen = node_facts.look(self.machine, self.host)
        self._uid = seen.node.uid
        return seen

    def facts(self) -> NodeFacts:
        """One look at the node."""

    def create(self, spec: ContainerSpec) -> str:
        """Create a container, do not start it; its id. The output folder must exist."""

    def claim(self, name: str, image: str, labels: Mapping[str, str]) -> ContainerState | None:
        """Take a name that only one can have on this node; atomic. None: it is ours now; else who has it.

        A claim is listed, and removed, as a created container with these labels. image: any that is there.
        """

    def put(self, container: str, archive: bytes) -> None:
        """Unpack a tar archive (names relative to /, owners as in the archive) into a created container."""

    def start(self, container: str) -> None: ...

    def list(self, labels: Mapping[str, str | None]) -> Sequence[ContainerState]:
        """Containers that carry all these labels (None: any value), ended ones too."""

    def apart(self, states: Sequence[ContainerState]) -> Sequence[ContainerState]:
        """Those to be stopped and removed, of containers listed here: of several that end together, the first."""
        return states

    def wait(self, container: str, timeout: float) -> ContainerState:
        """Its state when it has ended, or as it is after `timeout` seconds. A restart by the engine is not an end."""

    def stop(self, container: str, grace: float) -> ContainerState:
        """SIGTERM, SIGKILL after `grace` seconds; the state after. A restart policy ends here."""

    def signal(self, container: str, name: str) -> None:
        """Send a signal (`QUIT`) to its first process; nothing to do where it does not run. A restart policy ends."""

    def remove(self, container: str) -> None:
        """Remove a stopped or never started container; nothing to do where it is missing."""

    def logs(self, container: str, tail: int = 200) -> bytes:
        """The engine's own log of it, for when the entry script never ran."""

    def interact(self, container: str, argv: Sequence[str], *, terminal: bool, ports: Sequence[Forward] = ()) -> int:
        """Run a command in a running container, joined to the caller's stdin, stdout and stderr; its exit code.

        It has the variables of the job's own processes, by the kit's within.sh.
        terminal: with a terminal of its own there, of the caller's size. Ctrl-C reaches it either way. ports: forwarded
        meanwhile, where the node is not this machine; containers share its network.
        """

    def guard(self, container: str) -> AbstractContextManager[object]:
        """While this is held, the container goes when the caller does, also when that is killed."""

    def run_probe(self, spec: ContainerSpec, timeout: float = 60) -> tuple[int, bytes]:
        """Run a short container to its end and remove it: exit code, output. Without containers: run `argv` there."""
        variables = [f"{name}={value}" for name, value in spec.env.items()]
        done = self.machine.run(["env", *variables, *spec.argv], timeout=timeout)
        return done.code, done.out + done.err

    def granted_ulimits(self, image: str) -> tuple[tuple[str, int], ...]:  # noqa: ARG002
        """Those of model.container.WANTED_ULIMITS that this engine grants, tried once with `image` and remembered.

        Without containers the caller's or the cluster's own limits stay.
        """
        return ()

    def sweep_shared_memory(self, since: float) -> Sequence[str]:
        """Remove what dead processes of this user left in /dev/shm since then, of time.time() there; the names."""
        done = run_script(self.machine, SWEEP, str(math.floor(since)))
        if done.code:
            raise EngineFailed(self.node, f"could not look through /dev/shm: {done.complaint}")
        lines = done.out.decode("utf-8", "replace").splitlines()
        return tuple(line for line in lines if line and "/" not in line)

    def sh(self, script: str, *arguments: str, timeout: float | None = None) -> bytes:
        """Run a POSIX shell script on the node itself, as the ssh user; what it printed, whatever its exit code.

        The script is ours; what comes from a user goes into `arguments`. Raises NodeUnreachable, NodeUnfit.
        """
        return run_script(self.machine, script, *arguments, timeout=timeout).out

    def close(self) -> None:
        """End what is held open."""
        return
