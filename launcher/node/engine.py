"""The interface to nodes, implemented by Docker (local or over ssh), plain processes and Slurm."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from launcher.errors import EngineFailed, NodeUnfit
from launcher.model.container import ContainerSpec, ContainerState, Tool
from launcher.model.facts import NodeFacts
from launcher.model.forward import Forward
from launcher.node import ends, shared_memory
from launcher.node import facts as node_facts
from launcher.node.ends import Ends, EndsWanted
from launcher.node.files import FileEntry, Files
from launcher.node.machine import CommandStream, Machine
from launcher.node.shared_memory import CLEAR, Shared

if TYPE_CHECKING:  # plain processes do not need docker-py
    from launcher.node.docker.images import DockerImages

GROWN_WITHIN = 5.0  # seconds in which the files of a container's own layer are listed
UID = 'echo "@@uid $(id -u)"'  # marked, because a login shell may print other lines


class Engine(ABC):
    """A node. Every call has a time limit and raises an error of launcher.errors that names the node.

    A base class: everything that needs no containers is implemented here.
    """

    node: str
    host: str
    machine: Machine
    files: Files
    _uid: int | None  # None until it is read

    def __init__(self, node: str, host: str, machine: Machine) -> None:
        self.node = node
        self.host = host
        self.machine = machine
        self.files = Files(machine)
        self._uid = None

    @property
    def images(self) -> DockerImages | None:
        """None if the engine has no images: plain processes, clusters."""
        return None

    def uid(self) -> int:
        """Return the ssh user's ID on the node, which is read once. Raises NodeUnreachable, NodeUnfit."""
        if self._uid is None:
            found = re.search(rb"@@uid ([0-9]{1,10})\n", self.machine.script(UID).out)
            if found is None:
                what = "could not read the user ID: unexpected output from the login shell"
                raise NodeUnfit(self.node, what, "check the login shell's startup files, such as ~/.bashrc")
            self._uid = int(found.group(1))
        return self._uid

    def machine_facts(self) -> node_facts.MachineFacts:
        """Return the facts of the machine, without those of its engine. Raises NodeUnfit, NodeUnreachable."""
        found = node_facts.collect(self.machine, self.host)
        self._uid = found.node.uid
        return found

    @abstractmethod
    def facts(self) -> NodeFacts:
        """Return the facts of the node."""

    @abstractmethod
    def create(self, spec: ContainerSpec) -> str:
        """Create a container without starting it and return its ID. The output folder must exist."""

    @abstractmethod
    def claim(self, name: str, image: str, labels: Mapping[str, str]) -> ContainerState | None:
        """Take a lock on this node; atomic. Return None if the caller has it now, else the state of its owner.

        A lock is listed, and removed, as a created container with these labels. image: any image on the node.
        """

    @abstractmethod
    def put(self, container: str, archive: bytes) -> None:
        """Unpack a tar archive (names relative to /, owners as in the archive) into a created container."""

    @abstractmethod
    def start(self, container: str) -> None: ...

    @abstractmethod
    def list(self, labels: Mapping[str, str | None]) -> Sequence[ContainerState]:
        """Return the containers that have all these labels (None: any value), including exited ones."""

    def to_stop(self, states: Sequence[ContainerState]) -> Sequence[ContainerState]:
        """Return those of the listed containers to stop and remove: of several that stop together, the first."""
        return states

    @abstractmethod
    def wait(self, container: str, timeout: float) -> ContainerState:
        """Return its state once it has exited, or after `timeout` seconds. A restart by the engine is not an exit."""

    @abstractmethod
    def stop(self, container: str, grace: float) -> ContainerState:
        """Send SIGTERM, SIGKILL after `grace` seconds; return the state. Disables the restart policy.

        Raises ContainerGone if it does not exist.
        """

    @abstractmethod
    def signal(self, container: str, name: str) -> None:
        """Send a signal (`QUIT`) to its first process, if it is running. Disables the restart policy."""

    @abstractmethod
    def remove(self, container: str) -> None:
        """Remove a stopped or never started container; do nothing if it does not exist."""

    @abstractmethod
    def logs(self, container: str, tail: int = 200) -> bytes:
        """Return the engine's own log of the container, for when the entry script never ran."""

    def grown(self, container: str, timeout: float | None = GROWN_WITHIN) -> Sequence[FileEntry]:  # noqa: ARG002
        """Return the files that a program wrote to the container's own layer, which go with it, if they are of a size
        to miss. timeout: seconds to list them; after that one entry without a path has the size of all. None: no limit.

        Plain processes and clusters have none, nor has a container that does not exist.
        """
        return ()

    def read_grown(self, container: str, file: FileEntry) -> Iterator[bytes]:
        """Return the content of such a file. Raises EngineFailed, NodeUnreachable."""
        raise EngineFailed(self.node, f"{container} has no files of its own, such as {file.path}")

    @abstractmethod
    def interact(self, container: str, argv: Sequence[str], *, terminal: bool, ports: Sequence[Forward] = ()) -> int:
        """Run a command in a running container, attached to the caller's terminal or pipes; return its exit code.

        The kit's within.sh gives it the environment of the job's processes.
        terminal: allocate a terminal of the caller's size. Ctrl-C reaches the command in both cases. ports: forwarded
        while it runs, unless the node is this machine; containers share its network.
        """

    @abstractmethod
    def guard(self, container: str) -> AbstractContextManager[object]:
        """Return a context in which the container is removed if this process exits, even if it is killed."""

    def run_probe(self, spec: ContainerSpec, timeout: float = 60) -> tuple[int, bytes]:
        """Run a short container, remove it, return its exit code and output. Without containers: run `argv` itself."""
        variables = [f"{name}={value}" for name, value in spec.env.items()]
        done = self.machine.run(["env", *variables, *spec.argv], timeout=timeout)
        return done.code, done.out + done.err

    def tool(self, wanted: Tool) -> CommandStream:
        """Start a tool; the stream is its input and output. Raises NodeUnreachable; NodeUnfit without containers."""
        raise NodeUnfit(self.node, f"has no containers for {wanted.image}", "use nodes with Docker")

    def granted_ulimits(self, image: str) -> tuple[tuple[str, int], ...]:  # noqa: ARG002
        """Return those of model.container.WANTED_ULIMITS that this engine grants; tried once with `image` and cached.

        Without containers, the limits of the caller or of the cluster apply.
        """
        return ()

    def ends(self, output: str, wanted: Mapping[str, EndsWanted]) -> Mapping[str, Ends]:
        """Return the ends of the files of nodes that this engine represents, by node.

        output: the folder that contains them all. Raises NodeUnreachable, NodeUnfit.
        """
        return {node: ends.read(self.machine, output, files) for node, files in wanted.items()}

    def clear_shared_memory(self, since: float) -> Sequence[str]:
        """Remove what dead processes of this user left in /dev/shm since then (node's clock); return the file names."""
        done = self.machine.script(CLEAR, str(math.floor(since)))
        if done.code:
            raise EngineFailed(self.node, f"could not search /dev/shm: {done.message}")
        lines = done.out.decode("utf-8", "replace").splitlines()
        return tuple(line for line in lines if line and "/" not in line)

    def shared_memory(self, since: float) -> Sequence[Shared]:
        """Return what is left in /dev/shm of this user, under any name, since then (node's clock), and that no process
        has open. Raises NodeUnreachable, NodeUnfit.
        """
        return shared_memory.parse(self.machine.script(shared_memory.LEFT, str(math.floor(since))).out)

    def remove_shared_memory(self, names: Sequence[str]) -> None:
        """Remove such files. Raises EngineFailed."""
        done = self.machine.script(shared_memory.REMOVE, *names)
        if done.code:
            raise EngineFailed(self.node, f"could not remove files of /dev/shm: {done.message}")

    def close(self) -> None:
        """Close connections and other open resources."""
        return
