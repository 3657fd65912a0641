"""A container as it is asked for, and as it is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

# What the containers of NVIDIA's images need for pinned memory and for NCCL's stacks; asked for where it is granted.
WANTED_ULIMITS = (("memlock", -1), ("stack", 67108864))


@dataclass(frozen=True)
class Mount:
    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Layout:
    """Where things are for a run's processes: paths inside the container, or on this machine for plain processes."""

    code: str  # working directory
    output: str
    kit: str  # the launcher's own small scripts, the secrets file, a writable home


@dataclass(frozen=True)
class ContainerSpec:
    """Everything that an engine needs to create one container; for plain processes, one process group.

    Sizes are bytes, limits as the engine takes them. `restarts`: how often the engine may start it again after failing.
    """

    name: str
    image: str
    argv: tuple[str, ...]  # replaces the image's entrypoint; the image's own entrypoint stands inside it
    env: Mapping[str, str]
    labels: Mapping[str, str]
    layout: Layout
    output_dir: str  # on the node; mounted at layout.output
    user: str  # "uid:gid", "" for the image's own
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


class Phase(str, Enum):
    """Where a container is in its life, as its engine tells."""

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
    """A container as its engine shows it now. Times: seconds since the epoch by the node's clock, 0 where not yet."""

    id: str
    name: str
    image: str  # image id
    labels: Mapping[str, str]
    phase: Phase
    exit_code: int | None  # None while it has not ended
    oom_killed: bool
    restarts: int
    started: float
    finished: float
    error: str = ""  # the engine's own words when it could not start it
