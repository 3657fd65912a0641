"""What the planner needs to know of a node and of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from launcher.model.container import Mount


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    user: str = ""  # "" where it is not known: its /proc is hidden, or it is in another container
    memory_mib: int = 0  # on this GPU
    name: str = ""
    age: float = 0.0  # seconds, 0 where it is not known


@dataclass(frozen=True)
class MigInstance:
    """A part of a GPU that is divided (MIG, Multi-Instance GPU)."""

    uuid: str  # MIG-...
    profile: str  # "1g.10gb"


@dataclass(frozen=True)
class Gpu:
    index: int
    uuid: str
    name: str
    memory_mib: int
    driver: str
    used_mib: int = 0
    bus: str = ""  # its PCI address as the kernel writes it: 0000:07:00.0
    compute_mode: str = ""  # "Default", "Exclusive_Process", "Prohibited"
    persistence: bool | None = None
    mig: bool = False  # in MIG mode: only its instances can be used
    instances: tuple[MigInstance, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    minor: int = -1  # of its device file /dev/nvidia<minor>
    instance_files: tuple[str, ...] = ()  # device files of all its instances: /dev/nvidia-caps/nvidia-cap12, ...
    fault: str = ""  # nvidia-smi's words where it answers for the other GPUs only: "GPU requires reset"


@dataclass(frozen=True)
class PciGpu:
    """A GPU of NVIDIA's on the PCI bus, whatever its driver says."""

    address: str  # 0000:07:00.0
    driver: str  # the kernel driver that has it: "nvidia", "nouveau", "vfio-pci", "" for none


@dataclass(frozen=True)
class NvidiaFacts:
    """What a machine has of NVIDIA's; all empty on a machine without."""

    pci: tuple[PciGpu, ...] = ()
    switches: int = 0  # NVSwitches on the PCI bus: such a machine needs the fabric manager
    device_files: tuple[str, ...] = ()  # /dev/nvidia0, /dev/nvidiactl, /dev/nvidia-uvm, ...
    smi: bool = False  # it has an nvidia-smi
    smi_exit: int | None = None  # None: it did not end within 20 s
    smi_error: str = ""  # what it printed beside its answer
    driver: str = ""  # version of the driver: nvidia-smi's, else the kernel module's
    module: str = ""  # version of the kernel module that is loaded
    cuda: str = ""  # the newest CUDA that the driver runs: "12.4"
    toolkit: str = ""  # version of the NVIDIA Container Toolkit
    toolkit_mode: str = ""  # of its runtime's configuration: "auto", "legacy", "cdi", "csv"
    cdi_specs: tuple[str, ...] = ()  # files that describe nvidia.com/gpu
    fabric_manager: str = ""  # as systemctl is-active says: "active", "inactive", "failed"; "" where it is not known


@dataclass(frozen=True)
class GpuClaim:
    """A GPU, or an instance of one, that a run of the launcher has."""

    uuid: str
    run: str
    owner: str  # user@host
    age: float  # seconds


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

    id: str  # the key of caches of what this engine grants
    version: str
    rootless: bool
    runtimes: tuple[str, ...]  # "nvidia" where the container toolkit is configured as a runtime
    cdi_devices: tuple[str, ...]  # "nvidia.com/gpu=..." where the engine lists CDI devices
    root_dir: str
    disk_free: int = -1  # bytes free below root_dir, -1 where unknown
    kind: str = "Docker"  # or "podman", which speaks Docker's API
    store: str = ""  # how it keeps images, for people
    cgroup: str = ""  # its cgroup driver: "systemd", "cgroupfs"


@dataclass(frozen=True)
class NodeFacts:
    """A node's state at one moment, as far as it is known. Bytes and seconds throughout."""

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
    memory: int = 0
    shm_size: int = 0  # of the node's own /dev/shm
    clock_offset: float = 0.0  # node's clock minus the caller's, corrected for half the round trip
    interfaces: tuple[Interface, ...] = ()
    routes: tuple[Route, ...] = ()
    listening: tuple[int, ...] = ()  # TCP ports with a listener
    gpus: tuple[Gpu, ...] = ()
    nvidia: NvidiaFacts = NvidiaFacts()
    claims: tuple[GpuClaim, ...] = ()  # where they were asked for (run.claims.claimed_gpus)
    infiniband: bool = False  # /dev/infiniband exists
    python: str = ""  # the interpreter that runs plain processes; empty for docker
    engine: EngineFacts | None = None  # None for plain processes
    # Limits that a probe showed the engine to grant, as `docker run --ulimit` takes them: memlock=-1, stack=67108864
    ssh_port: int = 0  # of its sshd as the node itself sees it, which other nodes reach; 0 where ssh is not used
    ulimits: tuple[tuple[str, int], ...] = ()
    image: str = ""  # id of the job's image in this node's store, if known
    data: tuple[Mount, ...] = ()  # where the job's data is on this node


class Launch(str, Enum):
    """The module that starts one process a GPU (torch.distributed.run exists since torch 1.9)."""

    RUN = "torch.distributed.run"
    LAUNCH = "torch.distributed.launch"
    NONE = "none"  # no torch found: `run.command` only


@dataclass(frozen=True)
class ImageFacts:
    """The job's image; for plain processes, the caller's Python."""

    reference: str
    id: str  # on the first node; every node has the same image, which was verified
    python: str  # "python3", else "python", or a path
    launch: Launch
    flags: frozenset[str]  # long options of its launch module, underscored: {"no_python", "rdzv_backend", ...}
    torch: str  # version, "" if it has none
    entrypoint: tuple[str, ...]  # the image's own
    cuda: str = ""  # version, "" if it has none


@dataclass(frozen=True)
class ImageInfo:
    """An image as an engine's store shows it."""

    id: str  # what `docker image inspect` calls Id: config digest in the classic store, manifest digest in containerd's
    tags: tuple[str, ...]
    repo_digests: tuple[str, ...]
    arch: str
    entrypoint: tuple[str, ...]
    labels: Mapping[str, str]
    layers: tuple[str, ...]  # diff ids, base first
    size: int
    user: str = ""  # of its config; "" is root
    created: str = ""  # RFC 3339
    cuda: str = ""  # CUDA_VERSION of its environment
    content: str = ""  # digest of layers and configuration: the same in stores that give different ids


class Reach(str, Enum):
    """The outcome of a TCP connection from one node to an address."""

    OPEN = "open"  # accepted
    REFUSED = "refused"  # the machine is reached and has no listener there
    SILENT = "silent"  # no answer within the time limit, or no route
    OTHER = "other"  # accepted, but by another machine than the target node
    UNKNOWN = "unknown"  # the node cannot run the probe

    @property
    def reached(self) -> bool:
        return self in (Reach.OPEN, Reach.REFUSED)


@dataclass(frozen=True)
class Probe:
    """One connection attempt between two nodes."""

    source: str  # node name
    target: str  # node name
    address: str
    port: int
    reach: Reach
