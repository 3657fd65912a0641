"""What is known of a node and of an image before anything is planned."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Gpu:
    index: int
    uuid: str
    name: str
    memory_mib: int
    driver: str


@dataclass(frozen=True)
class Interface:
    """A network interface that is up. `addresses` are IPv4 (or IPv6) with prefix length: `10.0.0.5/24`."""

    name: str
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Route:
    """A route of the main table. `destination` is a network in CIDR form; the default route is `0.0.0.0/0`."""

    destination: str
    interface: str
    metric: int = 0


@dataclass(frozen=True)
class EngineFacts:
    """The container engine of a node."""

    id: str  # the engine's own identity: caches of what it grants are keyed by it
    version: str
    rootless: bool
    runtimes: tuple[str, ...]  # "nvidia" where the container toolkit is configured as a runtime
    cdi_devices: tuple[str, ...]  # "nvidia.com/gpu=..." where the engine lists CDI devices
    root_dir: str
    disk_free: int  # bytes free below root_dir, -1 where unknown
    images: tuple[str, ...]  # ids of the images that were asked for and are there


@dataclass(frozen=True)
class NodeFacts:
    """One look at one node. Bytes and seconds throughout."""

    name: str  # in the job file
    host: str  # ssh alias, user@host:port or "local"
    hostname: str
    arch: str  # uname -m
    user: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    cpus: int
    memory: int
    shm_size: int  # of the node's own /dev/shm
    disk_free: int  # where home lies
    clock_offset: float  # node's clock minus the caller's, corrected by half the round trip
    interfaces: tuple[Interface, ...]
    routes: tuple[Route, ...]
    listening: tuple[int, ...]  # TCP ports with a listener
    gpus: tuple[Gpu, ...]
    infiniband: bool  # /dev/infiniband is there
    python: str = ""  # the interpreter that runs plain processes; empty for docker
    engine: EngineFacts | None = None  # None for plain processes
    # Limits that this engine was seen to grant, as `docker run --ulimit` takes them: memlock=-1, stack=67108864
    ulimits: tuple[tuple[str, int], ...] = ()
    image: str = ""  # id of the job's image in this node's store, where that is known


class Launch(str, Enum):
    """How an image starts one process a GPU (facts: torchrun since torch 1.9 as a module)."""

    RUN = "torch.distributed.run"
    LAUNCH = "torch.distributed.launch"
    NONE = "none"  # no torch found: `run.command` only


@dataclass(frozen=True)
class ImageFacts:
    """What a container of the job's image can do; for plain processes, what the caller's Python can do."""

    reference: str
    id: str  # on the first node; the same image on every node, proven
    python: str  # "python3", else "python", or a path
    launch: Launch
    flags: frozenset[str]  # long options that its launcher knows, underscored: {"no_python", "rdzv_backend", ...}
    torch: str  # version, "" where there is none
    entrypoint: tuple[str, ...]  # the image's own


class Reach(str, Enum):
    """What came of a TCP connection tried from one node to an address."""

    OPEN = "open"  # somebody answered
    REFUSED = "refused"  # the machine answered that nobody listens: the way is free
    SILENT = "silent"  # no answer within the time limit, or no route
    OTHER = "other"  # somebody answered, but it is not the node that was meant
    UNKNOWN = "unknown"  # the node does not let us try


@dataclass(frozen=True)
class Probe:
    """The result of one connection tried between two nodes."""

    source: str  # node name
    target: str  # node name
    address: str
    port: int
    reach: Reach
