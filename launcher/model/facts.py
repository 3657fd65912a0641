"""Facts about nodes and images that the planner needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from launcher.model.container import Mount
from launcher.model.rdma import Port

CLOCK_SLACK = 5.0  # seconds by which a node's clock may differ without a word


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    user: str = ""  # "" if unknown: its /proc entry is hidden, or it runs in another container
    memory_mib: int = 0  # on this GPU
    name: str = ""
    age: float = 0.0  # seconds; 0 if unknown


@dataclass(frozen=True)
class MigInstance:
    """An instance of a partitioned GPU (MIG, Multi-Instance GPU)."""

    uuid: str  # MIG-...
    profile: str  # "1g.10gb"


@dataclass(frozen=True)
class Gpu:
    index: int
    uuid: str
    name: str
    memory_mib: int  # of the machine if it is shared
    driver: str
    used_mib: int = 0
    bus: str = ""  # PCI address in the kernel's format: 0000:07:00.0
    compute_mode: str = ""  # "Default", "Exclusive_Process", "Prohibited"
    persistence: bool | None = None
    mig: bool = False  # in MIG mode: only its instances can be used
    instances: tuple[MigInstance, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    minor: int = -1  # number of its device file /dev/nvidia<minor>
    instance_files: tuple[str, ...] = ()  # device files of all its instances: /dev/nvidia-caps/nvidia-cap12, ...
    fault: str = ""  # nvidia-smi's error message for this GPU: "GPU requires reset"
    shared: bool = False  # it has no memory of its own, and uses the machine's (GB10 of DGX Spark)
    capability: str = ""  # compute capability: "9.0"; "" if the driver does not report it


@dataclass(frozen=True)
class PciGpu:
    """An NVIDIA GPU on the PCI bus, with or without a working driver."""

    address: str  # 0000:07:00.0
    driver: str  # kernel driver bound to it: "nvidia", "nouveau", "vfio-pci"; "" for none


@dataclass(frozen=True)
class NvidiaFacts:
    """NVIDIA hardware and software of a machine; all fields are empty without any."""

    pci: tuple[PciGpu, ...] = ()
    switches: int = 0  # NVSwitches on the PCI bus; they require the fabric manager
    device_files: tuple[str, ...] = ()  # /dev/nvidia0, /dev/nvidiactl, /dev/nvidia-uvm, ...
    smi: bool = False  # nvidia-smi is installed
    smi_exit: int | None = None  # None: it did not exit within 20 s
    smi_error: str = ""  # its error output
    driver: str = ""  # driver version from nvidia-smi, else from the kernel module
    module: str = ""  # version of the loaded kernel module
    cuda: str = ""  # newest CUDA version that the driver supports: "12.4"
    toolkit: str = ""  # version of the NVIDIA Container Toolkit
    toolkit_mode: str = ""  # mode in its runtime's configuration: "auto", "legacy", "cdi", "csv"
    cdi_specs: tuple[str, ...] = ()  # files that describe nvidia.com/gpu
    fabric_manager: str = ""  # from systemctl is-active: "active", "inactive", "failed"; "" if unknown


@dataclass(frozen=True)
class GpuClaim:
    """A GPU or MIG instance that is reserved for a run."""

    uuid: str
    run: str
    owner: str  # user@host
    age: float  # seconds
    variant: str = ""  # of its sweep, as tables show it


@dataclass(frozen=True)
class PortClaim:
    """A rendezvous port that is reserved for a run. hosts: of all nodes of that run, as its caller named them; none of
    a `doctor --bench`."""

    port: int
    run: str
    owner: str  # user@host
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Interface:
    """A network interface that is up. `addresses` are IPv4 (or IPv6) with prefix length: `10.0.0.5/24`."""

    name: str
    addresses: tuple[str, ...]
    speed: int = 0  # Mb/s; 0 if unknown (virtual interfaces)
    mtu: int = 0  # bytes; 0 if unknown


@dataclass(frozen=True)
class MountedAs:
    """The file system of output folders. kind: "ext4", "nfs4"; "" if unknown."""

    kind: str = ""
    noexec: bool = False


@dataclass(frozen=True)
class Route:
    """A route of the main table. `destination` is a network in CIDR form; the default route is `0.0.0.0/0`, `::/0`."""

    destination: str
    interface: str
    metric: int = 0


@dataclass(frozen=True)
class EngineFacts:
    """The container engine of a node."""

    id: str  # key of caches about this engine's capabilities
    version: str
    rootless: bool
    runtimes: tuple[str, ...]  # "nvidia" if the container toolkit is configured as a runtime
    cdi_devices: tuple[str, ...]  # "nvidia.com/gpu=..." if the engine lists CDI devices
    root_dir: str
    disk_free: int = -1  # free bytes on the file system of root_dir; -1 if unknown
    kind: str = "Docker"  # or "podman", which speaks Docker's API
    store: str = ""  # image store, for display
    cgroup: str = ""  # its cgroup driver: "systemd", "cgroupfs"
    remapped: bool = False  # whether users in containers are others on the node (userns-remap)
    inodes_free: int = -1  # free inodes on the file system of root_dir; -1 if unknown


@dataclass(frozen=True)
class NodeFacts:
    """A snapshot of what is known about a node. Sizes are in bytes and times in seconds, if no name says otherwise."""

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
    shm_size: int = 0  # size of the node's own /dev/shm
    proxies: tuple[tuple[str, str], ...] = ()  # of the ssh user's Docker configuration: HTTP_PROXY and its value
    machine: str = ""  # its machine-id, or else its name
    output_root: str = ""  # real path of ~/.launcher, which may be a link; "" if it does not exist
    output_broken: str = ""  # target of ~/.launcher if it is a link that leads nowhere
    output_free: int = -1  # free bytes on the file system of output folders; -1 if unknown
    output_inodes: int = -1  # free inodes there; -1 if unknown
    output_mount: MountedAs = MountedAs()
    boot: str = ""  # kernel's boot ID
    clock_offset: float = 0.0  # the node's clock minus the caller's, corrected by half the round-trip time
    interfaces: tuple[Interface, ...] = ()
    routes: tuple[Route, ...] = ()
    listening: tuple[int, ...] = ()  # TCP ports with a listener
    gpus: tuple[Gpu, ...] = ()
    nvidia: NvidiaFacts = NvidiaFacts()
    claims: tuple[GpuClaim, ...] = ()  # filled on request (run.begin.claims.with_claims)
    port_claims: tuple[PortClaim, ...] = ()  # filled on request
    infiniband: bool = False  # /dev/infiniband exists
    rdma: tuple[Port, ...] = ()  # InfiniBand and RoCE ports
    peermem: bool = False  # nvidia_peermem is loaded, with which cards read and write the GPUs' memory
    dmabuf: bool = False  # the driver is the open one, which has DMA-BUF for that
    python: str = ""  # the interpreter for plain processes; "" with Docker
    engine: EngineFacts | None = None  # None for plain processes
    ssh_port: int = 0  # port on which other nodes reach its sshd (as seen on the node); 0 if ssh is not used
    # Limits that the engine granted to a probe, in the format of `docker run --ulimit`: memlock=-1, stack=67108864
    ulimits: tuple[tuple[str, int], ...] = ()
    image: str = ""  # id of the job's image in this node's store; "" if unknown
    data: tuple[Mount, ...] = ()  # the job's data on this node


def login_of(node: NodeFacts) -> tuple[str, tuple[int, ...]]:
    """Return who the ssh user is in a container: "uid:gid", and the other groups.

    A rootless engine runs as the ssh user, who is root in its containers.
    """
    if node.engine is not None and node.engine.rootless:
        return "0:0", ()
    return f"{node.uid}:{node.gid}", tuple(group for group in node.groups if group != node.gid)


class Launch(str, Enum):
    """The module that starts one process per GPU (torch.distributed.run exists since torch 1.9)."""

    RUN = "torch.distributed.run"
    LAUNCH = "torch.distributed.launch"
    NONE = "none"  # torch is missing: only `run.command` is possible


@dataclass(frozen=True)
class ImageFacts:
    """The job's image; for plain processes, the caller's Python."""

    reference: str
    id: str  # on the first node; the image was verified to be the same on every node
    python: str  # "python3", "python" or a path
    launch: Launch
    flags: frozenset[str]  # long options of the launch module, with underscores: {"no_python", "rdzv_backend", ...}
    torch: str  # version; "" if not installed
    entrypoint: tuple[str, ...]  # the image's own
    cuda: str = ""  # version; "" without CUDA
    hidden: tuple[str, ...] = ()  # names in its own /workspace/code, where the job's code is mounted
    decoder: str | None = None  # where the trainer's is: in the "image", from its "compiler", "" nowhere; None: unknown


@dataclass(frozen=True)
class ImageInfo:
    """An image in an engine's store."""

    id: str  # Id in `docker image inspect`: config digest in the classic store, manifest digest in containerd's
    tags: tuple[str, ...]
    repo_digests: tuple[str, ...]
    arch: str
    entrypoint: tuple[str, ...]
    labels: Mapping[str, str]
    layers: tuple[str, ...]  # diff ids, base first
    size: int
    user: str = ""  # in its config; "" is root
    created: str = ""  # RFC 3339
    cuda: str = ""  # CUDA_VERSION in its environment
    gpu_code: str = ""  # TORCH_CUDA_ARCH_LIST in its environment
    content: str = ""  # digest of layers and configuration; does not depend on the store, unlike `id`


class Reach(str, Enum):
    """The result of a TCP connection attempt from a node to an address."""

    OPEN = "open"  # accepted
    REFUSED = "refused"  # the machine is reachable, but nothing listens on the port
    SILENT = "silent"  # timeout or no route
    OTHER = "other"  # accepted by a machine other than the target node
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
