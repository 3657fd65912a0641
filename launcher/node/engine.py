"""The one seam to machines. Docker here, Docker over ssh and plain processes implement it; all else is written once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from launcher.model.container import ContainerSpec, ContainerState
from launcher.model.facts import NodeFacts, Reach
from launcher.node.files import Files
from launcher.node.machine import Machine

if TYPE_CHECKING:  # plain processes do without docker-py
    from launcher.node.docker.images import DockerImages


class Engine(Protocol):
    """One node. Every call has a time limit and raises an error of launcher.errors that names the node."""

    node: str
    host: str

    @property
    def machine(self) -> Machine: ...

    @property
    def files(self) -> Files: ...

    @property
    def images(self) -> DockerImages | None:
        """None for plain processes."""

    def uid(self) -> int:
        """The ssh user's on the node, asked for once. Raises NodeUnreachable, NodeUnfit."""

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

    def interact(self, container: str, argv: Sequence[str], *, terminal: bool) -> int:
        """Run a command in a running container, joined to the caller's stdin, stdout and stderr; its exit code.

        terminal: with a terminal of its own there, of the caller's size. Ctrl-C reaches it either way.
        """

    def guard(self, container: str) -> AbstractContextManager[object]:
        """While this is held, the container goes when the caller does, also when that is killed."""

    def run_probe(self, spec: ContainerSpec, timeout: float = 60) -> tuple[int, bytes]:
        """Run a short container to its end and remove it: exit code, output. For plain processes: run `argv` here."""

    def granted_ulimits(self, image: str) -> tuple[tuple[str, int], ...]:
        """Those of model.container.WANTED_ULIMITS that this engine grants, tried once with `image` and remembered."""

    def sweep_shared_memory(self, since: float) -> Sequence[str]:
        """Remove what dead processes of this user left in /dev/shm since then (node.shm_cleanup); the names."""

    def reach(self, address: str, port: int, timeout: float, expect: str | None = None) -> Reach:
        """Try a TCP connection from this node. `expect`: the target's ssh host key (base64), proven when given."""

    def sh(self, script: str, *arguments: str, timeout: float | None = None) -> bytes:
        """Run a POSIX shell script on the node itself, as the ssh user; what it printed, whatever its exit code.

        The script is ours; what comes from a user goes into `arguments`. Raises NodeUnreachable, NodeUnfit.
        """

    def host_key(self) -> str | None:
        """The ssh host key that this node proved (base64); None where it is not reached over ssh."""

    def most_sessions(self) -> int | None:
        """How many commands its sshd runs at once on a connection (MaxSessions); None where a run needs no more."""

    def close(self) -> None: ...
