"""A container: its specification, and its state as the engine reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

CODE = "/workspace/code"  # the job's code and the working directory in a container
WORKDIR = "workdir"  # folder of the nodes' working directories, in the run's output folder
KIT = "/.launcher"  # the launcher's own scripts, the secrets and a writable home in a container

# NVIDIA's images need these for pinned memory and NCCL's stacks; requested if the engine grants them.
WANTED_ULIMITS = (("memlock", -1), ("stack", 67108864))


@dataclass(frozen=True)
class Mount:
    source: str  # on the node; in a job, `~/...` is below the ssh user's home
    target: str
    read_only: bool = False

    def with_home(self, home: str) -> Mount:
        """Return the mount on a node with that home folder."""
        below = self.source.removeprefix("~")
        return self if below == self.source else replace(self, source=f"{home.rstrip('/')}{below}" or "/")


@dataclass(frozen=True)
class DataSet:
    """Data that is copied to every node of a job: its source and its path in the container."""

    name: str
    source: str  # host:/path, or a path on the caller's machine
    at: str


@dataclass(frozen=True)
class Layout:
    """The folders of a run's processes: paths inside the container, or on this machine for plain processes."""

    code: str = ""  # working directory
    output: str = ""
    kit: str = ""  # launcher.container_scripts, the secrets, a writable home


@dataclass(frozen=True)
class ContainerSpec:
    """Specification from which an engine creates one container; for plain processes, one process group.

    The defaults are for a container that runs one command of an image and keeps no output.

    Sizes are in bytes; limits are in the engine's format. `restarts`: maximum number of restarts after a failure.
    """

    name: str
    image: str
    argv: tuple[str, ...]  # full command; replaces the image's entrypoint and includes it
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    layout: Layout = Layout()
    output_dir: str = ""  # on the node; mounted at layout.output
    workdir: str = ""  # on the node, in output_dir; has the code; mounted at layout.code
    output_root: str = ""  # real path of the folder that contains output_dir, if it is reached through a link
    user: str = ""  # "uid:gid"; "" for the image's user
    groups: tuple[int, ...] = ()
    mounts: tuple[Mount, ...] = ()
    caches: tuple[Mount, ...] = ()  # folders beside output_dir that outlive the container
    gpus: tuple[str, ...] = ()  # UUIDs
    gpu_driver: str = ""  # "nvidia" (runtime) | "cdi"
    network: str = "host"
    userns: str = ""  # "host" for an engine with userns-remap, which forbids the host's network otherwise
    ulimits: tuple[tuple[str, int], ...] = ()
    docker: Mapping[str, Any] = field(
        default_factory=dict
    )  # `docker` of the job file; devices: also the launcher's own
    shm_size: int | None = None
    memory: int | None = None
    cpus: float | None = None
    restarts: int = 0
    init: bool = True

    @property
    def ipc(self) -> str:
        """The IPC mode, as Docker's option --ipc."""
        return str(self.docker.get("ipc", "host"))


@dataclass(frozen=True)
class BatchSpec(ContainerSpec):
    """The first container of a run on a cluster; one script starts all containers of the run."""

    script: str = ""  # batch script for the scheduler, as `launcher export` prints it
    sweep: tuple[str, ...] = ()  # ids of the runs that are submitted together, including this one


TOOL = "launcher-tool-"  # beginning of the names of tools' containers


@dataclass(frozen=True)
class Tool:
    """A script in a container of its own, which sees nothing but its mounts and is removed at its end."""

    image: str
    script: tuple[str, ...]  # text for sh, and its $0, $1, ...
    purpose: str  # its label
    mounts: tuple[Mount, ...]
    user: str = "0:0"  # "uid:gid"
    groups: tuple[int, ...] = ()
    network: str = "none"
    recursive: bool = True  # it also sees what is mounted below a mount
    interactive: bool = False  # it reads stdin; at the end of the connection, its stdin ends


class Phase(str, Enum):
    """A container's state as its engine reports it."""

    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    RESTARTING = "restarting"
    EXITED = "exited"
    DEAD = "dead"

    @property
    def ended(self) -> bool:
        return self in (Phase.EXITED, Phase.DEAD)


@dataclass(frozen=True)
class ContainerState:
    """A container as its engine reports it. Times: seconds since the epoch by the node's clock; 0 if not yet known."""

    id: str
    name: str
    image: str  # image id
    labels: Mapping[str, str]
    phase: Phase
    exit_code: int | None = None  # None until it has exited
    oom_killed: bool = False
    restarts: int = 0
    started: float = 0.0
    finished: float = 0.0
    error: str = ""  # the engine's message if the start failed
    suspect: bool = False  # `error` may be a consequence of how another node ended
