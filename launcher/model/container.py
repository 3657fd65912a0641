"""A container: its specification, and its state as the engine reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

CODE = "/workspace/code"  # where a container has the job's code, and its working directory
KIT = "/.launcher"  # where it has the launcher's own scripts, the secrets and a writable home

# What containers of NVIDIA's images need for pinned memory and NCCL's stacks; requested where the engine grants it.
WANTED_ULIMITS = (("memlock", -1), ("stack", 67108864))


@dataclass(frozen=True)
class Mount:
    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class DataSet:
    """Data that every node of a job gets: where it comes from, and where a container has it."""

    name: str
    source: str  # host:/path, or a path of the caller's machine
    at: str


@dataclass(frozen=True)
class Layout:
    """The folders of a run's processes: paths inside the container, or on this machine for plain processes."""

    code: str = ""  # working directory
    output: str = ""
    kit: str = ""  # launcher.container_scripts, the secrets, a writable home


@dataclass(frozen=True)
class ContainerSpec:
    """Everything that an engine needs to create one container; for plain processes, one process group.

    The defaults are those of a container that runs one command of an image and keeps nothing.

    Sizes are bytes, limits as the engine takes them. `restarts`: how often the engine may restart it after a failure.
    """

    name: str
    image: str
    argv: tuple[str, ...]  # the whole command, replaces the image's entrypoint; the image's own one is part of it
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    layout: Layout = Layout()
    output_dir: str = ""  # on the node; mounted at layout.output
    user: str = ""  # "uid:gid", "" for the image's own
    groups: tuple[int, ...] = ()
    mounts: tuple[Mount, ...] = ()
    gpus: tuple[str, ...] = ()  # UUIDs
    gpu_driver: str = ""  # "nvidia" (runtime) | "cdi"
    ipc: str = "host"
    network: str = "host"
    ulimits: tuple[tuple[str, int], ...] = ()
    devices: tuple[str, ...] = ()
    cap_add: tuple[str, ...] = ()
    extra_hosts: Mapping[str, str] = field(default_factory=dict)
    shm_size: int | None = None
    memory: int | None = None
    cpus: float | None = None
    restarts: int = 0
    init: bool = True


@dataclass(frozen=True)
class BatchSpec(ContainerSpec):
    """The first container of a run on a cluster, which starts all of them by one script."""

    script: str = ""  # what the scheduler runs, as `launcher export` prints it
    sweep: tuple[str, ...] = ()  # ids of the runs that are submitted together, this one among them


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
    """A container as its engine reports it. Times: seconds since the epoch by the node's clock, 0 before they come."""

    id: str
    name: str
    image: str  # image id
    labels: Mapping[str, str]
    phase: Phase
    exit_code: int | None = None  # while it has not ended
    oom_killed: bool = False
    restarts: int = 0
    started: float = 0.0
    finished: float = 0.0
    error: str = ""  # the engine's message if it could not start it
