"""Machines with NVIDIA GPUs as text: contents of nvidia-smi, /sys/bus/pci and /proc, each from a public source.

No such machine was available. `Machine.install` creates a stand-in nvidia-smi; `Machine.output` is the output of the
facts script on the machine.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# github.com/anderskm/gputil/issues/55, exit code 18
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.161\n", 18
# github.com/GoogleCloudPlatform/compute-gpu-installation/pull/18; exit code 9: manual page of nvidia-smi, RETURN VALUE
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n\n",
    9,
)
# github.com/JosephKJ/OWOD/issues/81; exit code 15: manual page of nvidia-smi, RETURN VALUE
LOST = (
    "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.  Reboot the system to recover this GPU\n",
    15,
)
# github.com/NVIDIA/open-gpu-kernel-modules/issues/387; exit code 255: github.com/NVIDIA/nvidia-docker/issues/1553
HANDLE = "Unable to determine the device handle for GPU 0000:0B:00.0: Unknown Error\n", 255
# driver 610.57.04, which then lists the other GPUs: from a log in a public repository
HANDLE_OF_ONE = "Unable to determine the device handle for GPU1: 0000:34:00.0: Unknown Error\n"
# github.com/NVIDIA/nvidia-container-toolkit/issues/48: in a container that has lost its devices
UNKNOWN = "Failed to initialize NVML: Unknown Error\n", 255
# github.com/NVIDIA/open-gpu-kernel-modules/issues/789 and 862; exit code 6: manual page, RETURN VALUE
NO_DEVICES = "No devices were found\n", 6
# manual page of nvidia-smi, RETURN VALUE 12
NO_LIBRARY = (
    "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. "
    "Please make sure that the NVIDIA Display Driver is properly installed and present in your system.\n"
    "Please also try adding directory that contains libnvidia-ml.so to your system PATH.\n",
    12,
)
# Of temperature and utilization; name, UUID and memory are as usual: github.com/utkuozdemir/nvidia_gpu_exporter
# issue 393, and notes of several users in public repositories
RESET = "[GPU requires reset]"

# `nvidia-smi -L` of yandex.cloud's page "Using GPU partitioning" (two A100 80GB, 1g.10gb)
MIG_LIST = """GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-9c73eb7b-8d6d-6c0e-dc13-97873e2ede40)
  MIG 1g.10gb     Device  0: (UUID: MIG-a686709d-6dc2-542a-8851-0d2508448c10)
  MIG 1g.10gb     Device  1: (UUID: MIG-53864714-0a66-5df2-9007-9268e30d9a72)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-c92e2d5d-4a69-f1cd-4df0-305f8606705a)
  MIG 1g.10gb     Device  0: (UUID: MIG-d5a46a2e-1d77-575d-99e3-1f96c8555a2e)
  MIG 1g.10gb     Device  1: (UUID: MIG-b8479d6e-d08f-5a92-9a24-0946db72b2a0)
"""
MIG_UUIDS = ["GPU-9c73eb7b-8d6d-6c0e-dc13-97873e2ede40", "GPU-c92e2d5d-4a69-f1cd-4df0-305f8606705a"]

OPEN_MODULE = (  # /proc/driver/nvidia/version of the open kernel module
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)  Tue Sep 23\n"
    "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04.2) \n"
)


@dataclass
class Process:
    """A process as listed by `nvidia-smi -q -d PIDS`; owner and age, in seconds, as in /proc."""

    pid: int
    mib: int
    user: str = "erin"
    kind: str = "C"
    name: str = "/usr/bin/python3"
    age: int = 3 * 3600


@dataclass
class Card:
    """A GPU. temperature: in degrees, or an error. listed: False if nvidia-smi does not list it."""

    bus: str  # 07:00.0
    uuid: str = ""
    name: str = "NVIDIA A100-SXM4-80GB"
    mib: int | str = 81920
    used: int | str = 4
    driver: str = "550.54.14"
    mode: str = "Default"
    mig: str = "Disabled"
    temperature: str = "31"
    listed: bool = True
    kernel: str = "nvidia"
    running: Sequence[Process] = ()
    capability: str = "8.0"
    domain: str = "0000"


@dataclass
class Machine:
    """failure: output and exit code of nvidia-smi, instead of its normal output; complaint: printed before that."""

    cards: Sequence[Card] = ()
    failure: tuple[str, int] | None = None
    complaint: str = ""
    hangs: bool = False
    smi: bool = True
    files: Sequence[str] = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")
    mig_list: str = MIG_LIST
    cuda: str = "12.4"
    more: str = ""  # further sections
    switches: Sequence[str] = field(default_factory=tuple)

    def query(self) -> str:
        lines = []
        for index, card in enumerate(each for each in self.cards if each.listed):
            uuid = card.uuid or f"GPU-{index:08x}-0000-0000-0000-00000000000{index}"
            cells = (
                index,
                uuid,
                card.name,
                card.mib,
                card.driver,
                card.used,
                f"0000{card.domain}:{card.bus}".upper(),
                card.mode,
            )
            lines.append(", ".join(map(str, (*cells, "Enabled", card.temperature, card.mig, card.capability))))
        return self.complaint + "".join(f"{line}\n" for line in lines)

    def pids(self) -> str:
        listed = [card for card in self.cards if card.listed]
        # github.com/facebookresearch issue texts and `nvidia-smi -q -d PIDS` of driver 570.86.15
        text = f"""
==============NVSMI LOG==============

Timestamp                                 : Thu Oct  2 10:00:00 2026
Driver Version                            : {listed[0].driver if listed else ""}
CUDA Version                              : {self.cuda}

Attached GPUs                             : {len(listed)}
"""
        for card in listed:
            text += f"GPU {f'0000{card.domain}:{card.bus}'.upper()}\n"
            if not card.running:
                text += "    Processes                             : None\n\n"
                continue
            text += "    Processes\n"
            for process in card.running:
                text += f"""        GPU instance ID                   : N/A
        Compute instance ID               : N/A
        Process ID                        : {process.pid}
            Type                          : {process.kind}
            Name                          : {process.name}
            Used GPU Memory               : {process.mib} MiB
"""
            text += "\n"
        return text

    def output(self) -> str:
        """Return the sections of the facts script's output about NVIDIA."""
        pci = "".join(f"{card.domain}:{card.bus} 0x030200 {card.kernel}\n" for card in self.cards)
        pci += "".join(f"0000:{bus} 0x068000 nvidia-nvswitch\n" for bus in self.switches)
        text = f"@@pci\n{pci}"
        if self.smi or self.files:
            text += "\n@@nvidia_files\n" + "".join(f"{name}\n" for name in self.files)
        if self.smi:
            text += "\n@@gpus\n" + self._answer(self.query())
            if any(card.mig == "Enabled" for card in self.cards):
                text += "\n@@mig\n" + self._answer(self.mig_list)
            text += "\n@@processes\n" + self._answer(self.pids()) + "\n@@owners\n100\n1000000.5 900.1\n"
            for card in self.cards:
                for process in card.running:
                    begun = (1000000 - process.age) * 100
                    text += f"/proc/{process.pid} {process.user}\n"
                    text += f"{process.pid} (py (x) y) S 1 {'0 ' * 17}{begun} 0 0\n"
        return text + self.more + "\n@@end\n"

    def _answer(self, text: str) -> str:
        if self.hangs:
            return ""
        if self.failure:
            return f"{self.failure[0]}\n@exit {self.failure[1]}\n"
        return f"{text}\n@exit 0\n"

    def script(self) -> str:
        """Return the script of a stand-in nvidia-smi."""
        if self.hangs:
            return "#!/bin/sh\nexec sleep 1000\n"
        if self.failure:
            return f"#!/bin/sh\ncat <<'EOF'\n{self.failure[0]}EOF\nexit {self.failure[1]}\n"
        cases = {"*--query-gpu=index*": self.query(), "'-q -d PIDS'": self.pids(), "-L": self.mig_list}
        text = "".join(f"{pattern}) cat <<'EOF'\n{answer}EOF\n;;\n" for pattern, answer in cases.items())
        return f'#!/bin/sh\n[ -z "$SMI_CALLS" ] || echo "$*" >>"$SMI_CALLS"\ncase "$*" in\n{text}esac\n'

    def install(self, folder: Path) -> None:
        """Write a stand-in nvidia-smi into this folder, which must be first in PATH."""
        file = folder / "nvidia-smi"
        file.write_text(self.script())
        file.chmod(file.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)

    def tree(self, folder: Path) -> Path:
        """Create a copy of /sys/bus/pci/devices with these cards, a network card and the sound function of a card."""
        others = [("00:1f.6", "0x8086", "0x020000", "e1000e"), ("07:00.1", "0x10de", "0x040300", "snd_hda_intel")]
        cards = [(card.bus, "0x10de", "0x030200", card.kernel) for card in self.cards]
        switches = [(bus, "0x10de", "0x068000", "nvidia-nvswitch") for bus in self.switches]
        for bus, vendor, kind, driver in (*others, *cards, *switches):
            device = folder / "devices" / f"0000:{bus}"
            device.mkdir(parents=True)
            (device / "vendor").write_text(f"{vendor}\n")
            (device / "class").write_text(f"{kind}\n")
            if driver:
                (device / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
        return folder / "devices"


def cards(count: int, **changes: object) -> list[Card]:
    """Return `count` identical cards, on the buses 07, 0f, 17, ..."""
    return [Card(f"{7 + 8 * index:02x}:00.0", **changes) for index in range(count)]  # type: ignore[arg-type]


# DGX Spark: github.com/XuehaiPan/nvitop/pull/208 (memory of the GPU and of the machine, driver 580.173.02),
# github.com/leptonai/gpud/pull/1170 (UUID), github.com/snowflakedb/ArcticTraining/pull/345 (address, MIG mode), and
# "NVIDIA GB10, 12.1" of `nvidia-smi --query-gpu=name,compute_cap` in a public repository
SPARK = Card(
    "01:00.0",
    "GPU-2dee1e25-b3b5-007e-2b55-79f2d0f2ebe5",
    "NVIDIA GB10",
    "[N/A]",
    "[N/A]",
    "580.173.02",
    mig="[N/A]",
    temperature="35",
    capability="12.1",
    domain="000f",
)
SPARK_MEMORY = "MemTotal:       127600748 kB\nMemAvailable:   118566368 kB\n"
