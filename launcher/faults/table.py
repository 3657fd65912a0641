"""The table of faults. A rule is a text's pattern, who must have said it, its meaning, and the fix if it is known.

The same words from anyone else mean nothing: a program of a user may say "not yet initialized" too. One fault has one
rule, wherever it is seen. docs/gpu.md and docs/troubleshooting.md list them; tests/gpu_rows.py and
tests/unit/test_faults.py have a recorded text of each, and words of users' programs to which none applies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from launcher.container_scripts.words import Raised
from launcher.faults import disk
from launcher.faults.cause import Cause

_NEVER = r"(?!)"


@dataclass(frozen=True)
class Origin:
    """Who says a text. Without patterns, the caller knows: it ran the program.

    kind: the whole class of an exception. file: the file whose call failed. words: the beginning of the message of a
    RuntimeError, which errors of C++ become. line: part of a line that was printed without a traceback. code: the exit
    code that goes with it. anywhere: its lines count in the whole log, not only at its end.
    """

    name: str
    kind: str = _NEVER
    file: str = _NEVER
    words: str = _NEVER
    line: str = _NEVER
    code: int | None = None
    anywhere: bool = False

    def raised(self, error: Raised) -> bool:
        """Whether it raised this exception."""
        if re.fullmatch(self.kind, error.kind):
            return True
        if error.kind == "RuntimeError" and re.match(self.words, error.message):
            return True
        return any(re.search(self.file, file) for file in error.files[-1:])

    def printed(self, line: str, code: int | None) -> bool:
        """Whether it printed this line. code: the program's exit code."""
        return self.code in (None, code) and re.search(self.line, line) is not None


# --- who is asked by the launcher
IMAGE, NODE = "image", "node"  # the places that a program's libraries and modules come from
UNLIMITED = "unlimited"  # of the limit `memlock`
NOT_EXECUTABLE = "is not executable"  # or its disk is mounted noexec

SMI = Origin("nvidia-smi")
ENGINE = Origin("the container engine")

# --- who speaks in the output of a program
_CUDA = (
    r"CUDA (driver )?error: |cuda runtime error|CUDA out of memory|Unexpected error from cuda|No CUDA GPUs"
    r"|The NVIDIA driver on your system"
    r"|(cudnn|CUDNN|CUBLAS)_"
)
CUDA = Origin(
    "CUDA",
    kind=r"torch\.(cuda\.)?OutOfMemoryError|torch\.AcceleratorError",
    file=r"/torch/(backends/)?cu(da|dnn)/",
    words=_CUDA,
    line=rf"(what\(\): +|:\[E\d.{{0,300}}|terminated with exception: |Fatal Python error: .{{0,300}})({_CUDA})",
    anywhere=True,
)
NVML = Origin(
    "NVML",
    kind=r"(pynvml|py3nvml)\.\S+|NVMLError\w*",
    line=r"^(Failed to initialize NVML|Unable to determine the device handle|NVRM: Xid)",
    anywhere=True,
)
NCCL = Origin(
    "NCCL",
    kind=r"torch\.distributed\.DistBackendError",
    # the others are of nccl2, the NCCL of torch 2.15: torch/csrc/distributed/c10d/nccl2 in pytorch's source
    words=r"NCCL (error|operation|communicator|Async Error|[\w ]+ failed)|Failed to (initialize|get) NCCL "
    r"|Watchdog caught collective operation timeout",
    line=r"\bNCCL WARN |what\(\): .*NCCL|\[E.*ProcessGroupNCCL\w*\.cpp",
    anywhere=True,
)
GLOO = Origin("gloo", words=r"\[[^\]]*\bgloo/", line=r"what\(\): .*\bgloo/")
RENDEZVOUS = Origin(
    "the rendezvous of torch.distributed",
    kind=r"torch\.distributed\.(Dist(Network|Store)Error|elastic\.rendezvous\.api\.\w+)",
    file=r"/torch/distributed/((elastic/)?rendezvous\b|distributed_c10d\.py)",
)
WORKERS = Origin(
    "torch's data loader, and the shared memory that it and multiprocessing use",
    file=r"/multiprocess(ing)?/(synchronize|shared_memory)\.py",  # their semaphores are files in /dev/shm, too
    words=r"DataLoader worker \(pid|unable to (open|allocate|write|resize|mmap) [\w ]*(shared memory|file)"
    r"|Too many open files\. Communication with the workers"
    r"|received 0 items of ancdata",  # multiprocessing's: the kernel could not open the file that was passed
)
SYSTEM = Origin(
    "the operating system",
    kind=r"OSError|shutil\.Error|(safetensors_rust\.)?SafetensorError|sqlite3\.OperationalError",
    line=rf"^\S+: .*{disk.AT_THE_END}|OSError: \[Errno (28|122)\]",
)
LINKER = Origin("the dynamic linker", kind=r"ImportError|OSError", line=r": error while loading shared libraries: ")
IMPORT = Origin("Python's import", kind=r"ModuleNotFoundError", line=r"^\S*python[\d.]*: No module named ")
SHELL = Origin("what starts the program", line=r"^(\S*/)?(env|sh|bash|dash|\S+\.sh): ", code=126)
SCRIPT = Origin("what runs a shell script", line=r"^\S+: ")
PARSER = Origin(
    "argparse, jsonargparse, click or typer",
    line=r"^(\S.*: )?error: (unrecognized|the following) arguments|^(Error:|\u2502) (No such|Missing) option",
    code=2,
)
GIT = Origin(
    "git, or a library that reads its folder",
    kind=r"(subprocess\.)?CalledProcessError|FileNotFoundError|LookupError|git\.exc\.\w+|dulwich\.errors\.\w+",
    line=r"^fatal: not a git repository",
)
METADATA = Origin(
    "Python's list of installed packages",
    kind=r"importlib[._]metadata\.PackageNotFoundError|pkg_resources\.DistributionNotFound",
)
TERMINAL = Origin("what reads a terminal", kind=r"bdb\.BdbQuit|EOFError")
SIGNAL = Origin("the launcher, of how a process ended")
RUNC = Origin("what starts the container", line=r"^(standard_init_linux\.go:\d+: )?exec \S+: ")


@dataclass(frozen=True)
class Rule:
    """A row of the table. {name} in what and fix is a known value or a group of the pattern; `port` must be the run's.

    explain: makes the cause from the match, the log and the known values, in place of what and fix; None: unknown.
    """

    pattern: str
    origins: tuple[Origin, ...]
    what: str = ""
    fix: str = ""
    explain: Callable[[re.Match[str], str, Mapping[str, str]], Cause | None] | None = None

    def cause(self, said: str, log: str, known: Mapping[str, str]) -> Cause | None:
        """Return the cause if the rule applies to what one of its origins said."""
        found = re.search(self.pattern, said, re.MULTILINE)
        groups = {name: value for name, value in found.groupdict().items() if value is not None} if found else {}
        if found is None or groups.get("port", known.get("port")) != known.get("port"):
            return None
        if self.explain:
            return self.explain(found, log, known)
        return Cause(_filled(self.what, {**known, **groups}), _filled(self.fix, {**known, **groups}))


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda name: values.get(name[1], name[0]), text)


# --- causes that need more than a sentence
_USERS = "`launcher status --nodes {node}` shows who uses its GPUs; `gpus: N` takes idle ones"
_PROCESS = re.compile(r"Process (\d+) has ([\d.]+) ([KMG])iB memory in use")
_OWN = re.compile(r"([\d.]+) ([KMG])iB is (?:allocated|reserved) by PyTorch")
_KIB = {"K": 1, "M": 1 << 10, "G": 1 << 20}
_COMPILED = re.compile(r"PyTorch install supports CUDA capabilities ((?:(?:sm|compute)_\d+\w*[ ,]*)+)")
_DEVICE = re.compile(r"with CUDA capability sm_(\d+)")
_TOO_OLD_GPU = "no longer supports this GPU because it is too old"
_WITHOUT_GIT = "let the program do without it, or pass what it needs: --set env.COMMIT=$(git rev-parse HEAD)"
# Commands of git that fail without a repository, and need nothing else; as a list or a line
_READS_GIT = r"'(?:\['git', |git )[^\]]{0,300}?\b(?:rev-parse|rev-list|describe|log|show|status|diff|branch|ls-files)\b"
# Modules of Python that no package has: some builds lack them, or some versions (3.12 and 3.13 removed many)
_OF_PYTHON = re.compile(
    "_(bz2|ctypes|curses|lzma|sqlite3|ssl|tkinter)|tkinter|tomllib"
    "|asynchat|asyncore|cgi|crypt|distutils|imghdr|imp|pipes|smtpd|sndhdr|telnetlib"
)
MISSING_LIBRARY = r"(?P<library>lib[\w.+-]{1,100}): cannot open shared object file"
# Debian's and Ubuntu's packages of libraries that Python packages need and pip does not install
_DEBIAN = {
    "libGL.so": "libgl1",
    "libEGL.so": "libegl1",
    "libGLU.so": "libglu1-mesa",
    "libOpenGL.so": "libopengl0",
    "libOSMesa.so": "libosmesa6",
    "libglib-2.0.so": "libglib2.0-0",
    "libgthread-2.0.so": "libglib2.0-0",
    "libSM.so": "libsm6",
    "libICE.so": "libice6",
    "libX11.so": "libx11-6",
    "libXext.so": "libxext6",
    "libXrender.so": "libxrender1",
    "libxcb.so": "libxcb1",
    "libgomp.so": "libgomp1",
    "libsndfile.so": "libsndfile1",
    "libsox.so": "libsox3",
    "libturbojpeg.so": "libturbojpeg0",
    "libmagic.so": "libmagic1",
    "libcairo.so": "libcairo2",
    "libnuma.so": "libnuma1",
    "libibverbs.so": "libibverbs1",
    "librdmacm.so": "librdmacm1",
    "libaio.so": "libaio1",
}


def _out_of_memory(found: re.Match[str], _: str, known: Mapping[str, str]) -> Cause | None:
    if "more than 1EB" in found.string:  # torch's words for a size that is no size
        return None
    if others := _other_processes(found.string):
        what = f"out of GPU memory, and other processes use the GPU: {', '.join(others)}"
        return Cause(what, _filled(_USERS, known))
    return Cause("out of GPU memory", "use a smaller batch size, or more nodes")


def _other_processes(text: str) -> list[str]:
    """Return `process 7 has 60.00 GiB` for each other process that torch's message lists.

    In a container, torch does not know its own PID on the host: then its own process is the one with the memory usage
    closest to the size of its allocator.
    """
    last = text[text.rfind("out of memory") :]
    found = [(pid, float(size) * _KIB[unit], f"{size} {unit}iB") for pid, size, unit in _PROCESS.findall(last)]
    if found and "this process has" not in last:
        own = sum(float(size) * _KIB[unit] for size, unit in _OWN.findall(last))
        found.remove(min(found, key=lambda process: abs(process[1] - own)))
    return [f"process {pid} has {size}" for pid, _, size in found]


def _no_kernel(_: re.Match[str], text: str, __: Mapping[str, str]) -> Cause:
    """By torch's earlier warning, the image is too old or too new for the GPU."""
    what = "torch in this image has no kernels for this GPU"
    device, compiled = _DEVICE.search(text), _COMPILED.search(text)
    newer, older = "choose a newer base: launcher image list", "choose an older base: launcher image list"
    if _TOO_OLD_GPU in text:
        return Cause(f"{what}: the image is too new for it", older)
    if device is None or compiled is None:  # torch warns if its own are missing: an extension may have none, too
        return Cause(
            "torch in this image, or an extension that the program calls, has no kernels for this GPU",
            "if torch warns of the GPU at its start, choose another base: launcher image list; else build the "
            "extension for this GPU (TORCH_CUDA_ARCH_LIST)",
        )
    built = [int(number) for number in re.findall(r"_(\d+)", compiled[1])]
    what = f"{what}: it is sm_{device[1]}, torch was built for {compiled[1].strip(' ,')}"
    if int(device[1]) > max(built):
        return Cause(f"{what}; the image is too old for it", newer)
    if int(device[1]) < min(built):
        return Cause(f"{what}; the image is too new for it", older)
    return Cause(what, "choose another base: launcher image list")


def _missing_library(found: re.Match[str], _: str, known: Mapping[str, str]) -> Cause:
    library, place = found["library"], known.get("place")
    what = f"the {place or 'environment'} lacks the library {library}"
    package = _DEBIAN.get(library.partition(".so")[0] + ".so")
    if library.startswith("libcuda.so") and place == IMAGE:
        return Cause(f"{library}, the library of the NVIDIA driver, is missing: a container has it if it has a GPU")
    if package is None or place is None:
        return Cause(what)
    if place == NODE:
        return Cause(what, f"install its package on the node (Debian: sudo apt-get install {package})")
    return Cause(
        what,
        f"build an image with it and set `image` to that; its Dockerfile on Debian and Ubuntu: `FROM` the present one, "
        f"`RUN apt-get update && apt-get install -y {package}`",
    )


def _missing_module(found: re.Match[str], _: str, known: Mapping[str, str]) -> Cause:
    """Of a submodule, the package is there, in another version."""
    module, contained = found["module"], known.get("place") == IMAGE
    what = f"there is no module {module}"
    if "." in module:
        return Cause(what)
    if _OF_PYTHON.fullmatch(module):
        return Cause(f"{what}, which is a part of Python in other versions or builds of it")
    where = "to image.packages" if contained else "to the job's Python"
    return Cause(what, f"add its package {where}; if the module is your own, add it to `code`")


def _no_repository(_: re.Match[str], text: str, __: Mapping[str, str]) -> Cause | None:
    if "dubious ownership" in text:  # there is one, of another user
        return None
    return Cause("there is no git repository: .git is never sent", _WITHOUT_GIT)


def _not_installed(found: re.Match[str], _: str, known: Mapping[str, str]) -> Cause:
    where = "add it to image.packages" if known.get("place") == IMAGE else "install it in the job's Python"
    own = "if it is your own: the code is copied, not installed, so let the program do without this version"
    return Cause(f"the package {found['name']} is not installed", f"{where}; {own}")


def _not_executable(found: re.Match[str], _: str, __: Mapping[str, str]) -> Cause:
    file = found["file"]
    program = {"sh": "bash", "bash": "bash", "py": "python"}.get(file.rpartition(".")[2])
    other = f", or start it with its interpreter: command: [{program}, {file.removeprefix('./')}]" if program else ""
    return Cause(f"{file} {NOT_EXECUTABLE}", f"chmod +x {file}{other}")


def _underscores(found: re.Match[str], _: str, __: Mapping[str, str]) -> Cause:
    """The launcher writes the keys of a mapping with dashes, as most programs spell their options."""
    option = "--" + found["name"].replace("-", "_")
    return Cause(found["message"], f"if the option is {option}, write the key so, as it is: args: {{{option}: VALUE}}")


def _rdma_memory(_: re.Match[str], __: str, known: Mapping[str, str]) -> Cause:
    tcp = "or use TCP: env: {NCCL_IB_DISABLE: 1}"
    if known.get("memlock") == UNLIMITED:
        what = "the InfiniBand driver got no memory, although memlock is unlimited"
        return Cause(what, f"`sudo dmesg` on the node may have its reason, and `free -h` shows free memory; {tcp}")
    limit = "on the node: set LimitMEMLOCK=infinity for docker.service, and check it with `launcher doctor JOB`"
    return Cause("InfiniBand could not lock memory: the memlock limit is too low", f"{limit}; {tcp}")


def _unseen(found: re.Match[str], _: str, __: Mapping[str, str]) -> Cause:
    folder = found["folder"] or found["home"]
    what = f"its engine has no access to {folder}, the folder of the runs"
    why = (
        "root has none on a network file system with root_squash, a snap none to hidden folders, a virtual machine none"
    )
    return Cause(what, f"{why} to other folders than it shares: make {folder} a link to a folder of a local disk")


def _full_disk(found: re.Match[str], _: str, known: Mapping[str, str]) -> Cause:
    path, output = found["path"] or found["before"], known.get("output")
    if output and path and path.startswith(f"{output}/"):
        return disk.full(disk.OUTPUT, found.string)
    cause = disk.full(said=found.string)
    return Cause(f"{cause.what}, at {path}", cause.fix) if path else cause


# --- the rules, the most specific first
DMESG = "for the cause, run there: sudo dmesg | grep -iE 'nvrm|xid'"
RESET = "stop its processes and reset it (sudo nvidia-smi --gpu-reset -i {index}), or reboot the machine"
_SHM = "shared memory (/dev/shm) is full"
_SHM_FIX = "keep docker.ipc: host and enlarge /dev/shm on the node: mount -o remount,size=16g /dev/shm"
_TOOLKIT = "/etc/nvidia-container-runtime/config.toml"

# - the driver and the machine
OLD_DRIVER_LOADED = Rule(
    r"[Dd]river/library version mismatch|NVML/RM version mismatch",
    (SMI, ENGINE, CUDA, NVML),
    "the NVIDIA driver was updated, but the old one is still loaded",
    "reboot the node, or stop all programs that use its GPUs and reload the modules: sudo rmmod nvidia_drm "
    "nvidia_modeset nvidia_uvm nvidia && sudo modprobe nvidia",
)
DRIVER_NOT_LOADED = Rule(
    r"couldn't communicate with the NVIDIA driver|nvml error: driver not loaded|driver rpc error"
    r"|driver error: failed to process request",
    (SMI, ENGINE),
    "the NVIDIA driver is not loaded",
    f"`nvidia-smi` must work: sudo modprobe nvidia; after a kernel update, reinstall the driver and reboot; {DMESG}",
)
NO_DRIVER = Rule(
    r"couldn't find libnvidia-ml|NVML: (Shared )?Library Not Found|NVML Shared Library",
    (SMI,),
    "the NVIDIA driver's libraries are not installed",
    "install NVIDIA's driver on the node (on Ubuntu: sudo ubuntu-drivers install --gpgpu) and reboot it",
)
GPU_LOST = Rule(
    r"GPU is lost|fallen off the bus|Unable to determine the device handle",
    (SMI, CUDA, NVML),
    "a GPU has fallen off the bus",
    f"reboot the node; {DMESG}; if the error recurs, check the GPU's power, cooling and seating",
)
_LOST_DEVICES = Rule(
    r"NVML: Unknown Error",
    (SMI, NVML, CUDA),
    "a container has lost its GPUs, or the driver has failed",
    "start the container again. systemd takes the GPUs away when it reloads its units, unless the node has the NVIDIA "
    f"Container Toolkit 1.18 or newer, or uses CDI. If the driver has failed, reboot the node; {DMESG}",
)
_FABRIC = Rule(
    r"[Ee]rror \(?802\b|system not yet initialized",
    (CUDA,),
    "the NVSwitch fabric is not ready (error 802): the fabric manager is not running or its version does not match",
    "on the node: sudo systemctl enable --now nvidia-fabricmanager; its version must match the driver's",
)
_OTHER_LIBCUDA = Rule(
    r"unsupported display driver / cuda driver combination",
    (CUDA,),
    "the libcuda that the program loads does not fit the NVIDIA driver (error 803)",
    "if `nvidia-smi` on the node reports a version mismatch, the driver was updated: reboot the node; else another "
    "libcuda comes first: look for one in LD_LIBRARY_PATH and in the image's /usr/local/cuda/compat",
)
DRIVER_TOO_OLD = Rule(
    r"unsatisfied condition|driver version is insufficient|driver on your system is too old|driver version is too old"
    r"|forward compatibility was attempted|compiled with an unsupported toolchain",
    (ENGINE, CUDA),
    "the NVIDIA driver is too old for the image",
    "update the driver, or choose an older base: launcher image list",
)
_OF_MACHINE = (
    OLD_DRIVER_LOADED,
    DRIVER_NOT_LOADED,
    NO_DRIVER,
    GPU_LOST,
    _LOST_DEVICES,
    _FABRIC,
    _OTHER_LIBCUDA,
    DRIVER_TOO_OLD,
    Rule(
        r"requires? reset",
        (SMI,),
        "a GPU needs a reset",
        RESET.replace("{index}", "INDEX"),
    ),
    Rule(r"No devices were found", (SMI,), "the driver could not initialize any GPU", f"reboot the node; {DMESG}"),
    Rule(
        r"Insufficient Permissions|Permission denied",
        (SMI,),
        "the user has no permission for the GPUs' device files",
        "add the user to the group of the device files: ls -l /dev/nvidia*",
    ),
    Rule(
        r"uncorrectable (NVLink|ECC) error",
        (CUDA,),
        "the GPU's hardware reported an uncorrectable error",
        "on the node: `nvidia-smi -q -d ECC` shows which GPU; reset it (nvidia-smi --gpu-reset) or reboot; if it "
        "happens again, exclude that GPU with `gpus` and have it replaced",
    ),
)
# - access to the folders of the ssh user
_OF_ENGINE = (
    Rule(
        r"bind source path does not exist: (?P<folder>/\S*/\.launcher)(?=/|$)"
        r"|(invalid mount config|creating mount source path|error mounting|getting sysroot)\b.*?"
        r"(?P<home>/[^\s\"':]*/\.launcher)(?=/).*permission denied",
        (ENGINE,),
        explain=_unseen,
    ),
    Rule(
        r"\blchown \S+: invalid argument|insufficient UIDs or GIDs",
        (ENGINE,),
        "its engine has too few user IDs for the files of the image",
        "give its user more in /etc/subuid and /etc/subgid (65536 or more), and restart the engine",
    ),
)
# - NVIDIA's Container Toolkit
_OF_TOOLKIT = (
    Rule(
        r"could not select device driver|nvidia-container-runtime\"?: (no such file|executable file not found)",
        (ENGINE,),
        "its engine cannot give GPUs to containers",
        "install the NVIDIA Container Toolkit, then: sudo nvidia-ctk runtime configure --runtime=docker && "
        "sudo systemctl restart docker",
    ),
    Rule(
        r"load library failed: libnvidia-ml",  # nvidia-smi was asked on the node before, and has the driver
        (ENGINE,),
        "its engine finds no NVIDIA driver",
        "Docker Desktop and Docker of a snap have no access to it: use Docker Engine (docker context use default); "
        "else install NVIDIA's driver where the engine runs",
    ),
    Rule(
        r"ldcache error",
        (ENGINE,),
        "its NVIDIA Container Toolkit cannot run ldconfig",
        f"set `ldconfig` in {_TOOLKIT}: @/sbin/ldconfig.real on Ubuntu, else @/sbin/ldconfig",
    ),
    Rule(
        r"unknown device",
        (ENGINE,),
        "its NVIDIA Container Toolkit does not find the GPU",
        "`nvidia-smi -L` lists its GPUs; launcher doctor checks whether one has fallen off the bus",
    ),
    Rule(
        r"cgroup subsystem devices not found|failed to add device rules|bpf_prog_query"
        r"|devices\.allow: operation not permitted",
        (ENGINE,),
        "its NVIDIA Container Toolkit cannot open the GPU's device files for the container (cgroup)",
        f"install version 1.18 or newer; for a rootless engine, set no-cgroups = true in {_TOOLKIT}",
    ),
    Rule(
        r"unresolvable CDI devices runtime\.nvidia\.com",  # since 1.18 it generates these itself at each start
        (ENGINE,),
        "its NVIDIA Container Toolkit does not find the GPU or its driver",
        "`nvidia-smi` must list the GPU; sudo nvidia-ctk cdi generate >/dev/null shows missing files",
    ),
    Rule(
        r"unresolvable CDI devices|CDI device injection failed",
        (ENGINE,),
        "its CDI specification lacks the GPU",
        "generate it again: sudo nvidia-ctk cdi generate --device-name-strategy=uuid --output=/etc/cdi/nvidia.yaml",
    ),
    Rule(
        r"nvidia-container-cli|nvidia-container-runtime",
        (ENGINE,),
        "its NVIDIA Container Toolkit failed",
        "for details: sudo nvidia-container-cli -k -d /dev/tty info",
    ),
)
# - CUDA and NCCL
_OF_GPUS = (
    Rule(r"no kernel image is available for execution on the device", (CUDA,), explain=_no_kernel),
    Rule(r"CUDA out of memory|OutOfMemoryError", (CUDA,), explain=_out_of_memory),
    Rule(
        r"CUDA error: out of memory",
        (CUDA,),
        "the GPU has no memory left",
        _USERS,
    ),
    Rule(
        r"CUDA-capable device(\(s\) is/are|s are) busy or unavailable",
        (CUDA,),
        "the GPU is busy or unavailable, as in exclusive compute mode while another process uses it",
        "`launcher status --nodes {node}` shows who uses its GPUs; on the node: `nvidia-smi -q -d COMPUTE` shows the "
        "mode, sudo nvidia-smi -c DEFAULT allows several processes",
    ),
    Rule(
        r"no CUDA-capable device is detected|No CUDA GPUs are available",
        (CUDA,),
        "the program found no GPU",
        "check the node: launcher doctor JOB; check whether the program sets CUDA_VISIBLE_DEVICES",
    ),
    Rule(
        r"illegal memory access|unspecified launch failure",
        (CUDA,),
        "a GPU kernel accessed invalid memory, or the GPU is faulty",
        "find the call with `env: {CUDA_LAUNCH_BLOCKING: 1}`; `dmesg | grep -i xid` on the node shows GPU faults",
    ),
    Rule(
        r"Error while creating shared memory segment|failed to extend /dev/shm|posix_fallocate failed",
        (NCCL,),
        _SHM,
        _SHM_FIX,
    ),
    Rule(
        r"Call to ibv_\w+ failed.*Cannot allocate memory",
        (NCCL,),
        explain=_rdma_memory,
    ),
    Rule(
        r"Call to ibv_\w+ failed",
        (NCCL,),
        "NCCL could not use InfiniBand",
        "`launcher doctor JOB` checks its ports and the memlock limit; or use TCP: env: {NCCL_IB_DISABLE: 1}",
    ),
    Rule(
        r"Mismatched NCCL version",
        (NCCL,),
        "the ranks have different versions of NCCL",
        "use the same image and packages on all nodes; check `code`, `mounts` and LD_LIBRARY_PATH for another torch or "
        "NCCL",
    ),
    Rule(
        r"Duplicate GPU detected",
        (NCCL,),
        "two ranks use the same GPU, which NCCL does not support",
        "set `processes` to the number of GPUs; the program must call torch.cuda.set_device(LOCAL_RANK)",
    ),
    Rule(
        r"socket(Start|Poll)Connect: [Cc]onnect to (?!.*refused)(?=.*(timed out|No route|unreachable))",
        (NCCL,),
        "a node does not reach another one at the address that NCCL uses",
        "all TCP ports must be open between the nodes: `launcher doctor JOB` tests it; if the address is of another "
        "network, set the node's in the job file: nodes: [{host: ..., address: ...}]",
    ),
    Rule(
        r"socketStartConnect: Connect to (?!.*refused)|no socket interface|Bootstrap : no socket"
        r"|[Uu]nable to find (address|interface) for",
        (NCCL, GLOO),
        "the chosen network interface is not usable",
        "set the node's address in the job file: nodes: [{host: ..., address: ...}]",
    ),
)
# - everything else that ends programs
_OF_PROGRAMS = (
    Rule(r"No space left on device", (WORKERS,), _SHM, _SHM_FIX),
    Rule(
        r"DataLoader worker .*Bus error",
        (WORKERS,),
        "a worker of its data loader got a bus error: shared memory (/dev/shm) is full, or a file that is mapped into "
        "memory is cut off",
        f"`df -h /dev/shm` on the node, while it runs, shows which; if it fills up, {_SHM_FIX}",
    ),
    Rule(
        r"DataLoader worker .*is killed by signal: Killed\b",
        (WORKERS,),
        "a worker of its data loader was killed, as the kernel does when memory runs out",
        "use fewer loader workers, or raise resources.memory; `sudo dmesg | grep -i oom` on the node names the process",
    ),
    Rule(
        r"\[Errno 24\]|Too many open files(?! in system)|received 0 items of ancdata",
        (WORKERS, SYSTEM),
        "too many open files",
        "torch.multiprocessing.set_sharing_strategy('file_system') in the program needs fewer; so do fewer loader "
        "workers; the node's limit: ulimit -Hn",
    ),
    Rule(r"No space left on device: '/dev/shm/", (SYSTEM,), _SHM, _SHM_FIX),
    Rule(
        rf"(?:(?:\s(?P<before>/[^:\n]*?)(?: could not be written)?)?{disk.AT_THE_END}"
        rf"|(?:{disk.NUMBER})(?! inotify )|database or disk is full)(?:[^'\n]*: '(?P<path>/[^'\n]*)')?",
        (SYSTEM,),
        explain=_full_disk,
    ),
    Rule(
        r"(?:port: |:)(?P<port>\d+)\b.*[Aa]ddress already in use",
        (RENDEZVOUS,),
        "the rendezvous port {port} is in use on the first node",
        "`launcher runs` lists your other runs; or choose another port: --set port=29501",
    ),
    Rule(
        r"waiting for clients|RendezvousTimeoutError|client socket has .*\(\S+, (?P<port>\d+)\)",
        (RENDEZVOUS,),
        "not all nodes met at the rendezvous in time",
        "a rank may have ended or be late before that (`launcher logs RUN --all`), or the port be closed: "
        "`launcher doctor JOB` tests it between the nodes",
    ),
    Rule(
        r"Timed out waiting \d+ms for (recv|send)|[Cc]ollective operation timeout",
        (GLOO, NCCL),
        "communication with its peers timed out",
        "a rank may be late (init_process_group(timeout=...) allows more), hang (hang_timeout shows where), or be cut "
        "off: `launcher doctor JOB` tests the network",
    ),
    Rule(MISSING_LIBRARY, (LINKER,), explain=_missing_library),
    Rule(
        r"(?P<library>/?[\w./+-]+\.so[\w.]*): failed to map segment from shared object(?!: Cannot allocate)",
        (LINKER,),
        "{library} cannot be executed: its disk is mounted noexec",
        "put it on another disk: TMPDIR or TORCH_EXTENSIONS_DIR in `env`, or ~/.launcher as a link to a folder there",
    ),
    Rule(r"No module named '?(?P<module>[\w.]+)'?$", (IMPORT,), explain=_missing_module),
    Rule(r"['\u2018 ](?P<file>[^\s'\u2018\u2019:]+)['\u2019]?: Permission denied$", (SHELL,), explain=_not_executable),
    Rule(r'exec: "(?P<file>[^"]+)": permission denied', (ENGINE,), explain=_not_executable),
    Rule(
        r"error: unrecognized arguments: (.*\s)?--(?P<name>local[_-]rank)\b",
        (PARSER,),
        "the program does not know --{name}, which torch.distributed.launch passes to it",
        "start it with torchrun, or let the launcher start it: run: {script: ...}; each rank has LOCAL_RANK in its "
        "environment",
    ),
    Rule(
        r"error: (?P<message>unrecognized arguments: (.*\s)?--(?P<name>\w+-[\w-]+).*)",
        (PARSER,),
        explain=_underscores,
    ),
    Rule(
        r"error: (?P<message>the following arguments are required: (.*\s)?--(?P<name>\w+_\w+).*)",
        (PARSER,),
        explain=_underscores,
    ),
    Rule(
        r"(?P<message>No such option:? '?--(?P<name>\w+-[\w-]+).*?)[ \u2502]*$",
        (PARSER,),
        explain=_underscores,
    ),
    Rule(r"(?P<message>Missing option '--(?P<name>\w+_\w+).*?)[ \u2502]*$", (PARSER,), explain=_underscores),
    Rule(
        r"^fatal: not a git repository|\b(InvalidGitRepositoryError|NotGitRepository)\b|unable to detect version for "
        rf"|CalledProcessError: Command {_READS_GIT}.* exit status 128\.",
        (GIT,),
        explain=_no_repository,
    ),
    Rule(
        r"FileNotFoundError: .*: 'git'$",
        (GIT,),
        "there is no program git, and no git repository either: .git is never sent",
        _WITHOUT_GIT,
    ),
    Rule(
        r"(?:PackageNotFoundError: (?:No package metadata was found for )?|DistributionNotFound: The ')"
        r"(?P<name>[\w.-]+)",
        (METADATA,),
        explain=_not_installed,
    ),
    Rule(
        r"\bbdb\.BdbQuit$",
        (TERMINAL,),
        "it reached a breakpoint of pdb, which has no terminal to read from",
        "call breakpoint() instead of pdb.set_trace(): it waits for `launcher debug`",
    ),
    Rule(
        r"EOFError: EOF when reading a line$",
        (TERMINAL,),
        "it asks for input, and there is no terminal",
        "pass the answer as an argument, or as a variable in `env`",
    ),
    Rule(
        r"\$'\\r': command not found|\\r['\u2019]?: No such file or directory|\^M: bad interpreter",
        (SCRIPT,),
        "a script has Windows line endings (CRLF)",
        "convert it here: sed -i 's/\\r$//' FILE",
    ),
    Rule(
        r"was killed by SIGILL\b",
        (SIGNAL,),
        "the processor lacks an instruction that the program or one of its libraries was built for, such as AVX2",
        "use a build for this processor: `lscpu` on the nodes shows their instructions",
    ),
    Rule(
        r"exec (?P<file>\S+\.(?:sh|bash|py)): exec format error\b",
        (RUNC, ENGINE),
        "{file} has no line `#!` at its start, or the image is for another CPU architecture",
        "look into the file: `#!/bin/sh` must be its first line; else pull or build the image for the node's",
    ),
    Rule(
        r"exec format error\b",
        (RUNC, ENGINE),
        "the image is for another CPU architecture",
        "pull or build it for the node's: `docker build --platform linux/amd64`, or linux/arm64",
    ),
)
RULES = (*_OF_MACHINE, *_OF_ENGINE, *_OF_TOOLKIT, *_OF_GPUS, *_OF_PROGRAMS)
# NCCL often gives a reason elsewhere in the log, and this in the exception
LAST_RESORT = Rule(
    r"unhandled system error|ncclSystemError",
    (NCCL,),
    "a system call in NCCL failed",
    "`env: {NCCL_DEBUG: INFO}` shows which; `launcher doctor JOB` tests shared memory and the network",
)
