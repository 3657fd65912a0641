"""Parser of what the facts script prints about NVIDIA GPUs. No output of nvidia-smi, of any version, breaks it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from launcher.model.facts import Gpu, GpuProcess, MigInstance, NvidiaFacts, PciGpu

_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.ASCII | re.IGNORECASE)
_EXIT = re.compile(r"^@exit ([0-9]{1,3})$", re.ASCII | re.MULTILINE)
_CUT_OFF = (124, 137)  # by timeout(1)
_NO_FAULT = ("[n/a]", "[not supported]", "[insufficient permissions]")  # of a field; others: "[GPU requires reset]"
_VERSION = r"([0-9]{1,5}(?:\.[0-9]{1,5}){1,3})"
_PCI = re.compile(r"^(\S+) (0x[0-9a-f]{6}) ?(\S*)$", re.ASCII | re.MULTILINE)
_DISPLAY, _SWITCH = ("0x0300", "0x0302"), "0x0680"  # VGA and 3D controllers; NVSwitches are bridges of kind "other"
_OWNER = re.compile(r"^/proc/(\d{1,9}) (\S{1,64})$", re.ASCII | re.MULTILINE)
_STARTED = re.compile(r"^(\d{1,9}) \(.*\) [A-Za-z] (?:-?\d+ ){18}(\d{1,18}) ", re.ASCII | re.MULTILINE)

Sections = Mapping[str, str]


def gpus(sections: Sections) -> tuple[Gpu, ...]:
    """Those that nvidia-smi lists, with their processes and instances."""
    minors, running, divided = _minors(sections), _processes(sections), _instances(sections)
    found = []
    for cells in _rows(sections.get("gpus", "")):
        index, bus = int(cells[0]), address(_cell(cells, 6))
        memory, used = cells[3], _cell(cells, 5)
        values = (memory, used, _cell(cells, 9))
        faults = [cell.strip("[]") for cell in values if cell.startswith("[") and cell.lower() not in _NO_FAULT]
        found.append(
            Gpu(
                index=index,
                uuid=cells[1],
                name=cells[2],
                memory_mib=_integer(memory),
                driver=cells[4],
                used_mib=_integer(used),
                bus=bus,
                compute_mode=_cell(cells, 7),
                persistence={"Enabled": True, "Disabled": False}.get(_cell(cells, 8)),
                mig=_cell(cells, 10) == "Enabled",
                instances=tuple(divided.get(index, ())),
                processes=tuple(running.get(bus, ())) if bus else (),
                minor=minors.get(bus, -1),
                instance_files=_instance_files(sections, minors.get(bus, -1)),
                fault=faults[0] if faults else "",
            )
        )
    return tuple(found)


def facts(sections: Sections) -> NvidiaFacts:
    answer = sections.get("gpus", "")
    ends = _EXIT.findall(answer)
    code = int(ends[-1]) if ends else None
    on_bus = [(where, kind, driver) for where, kind, driver in _PCI.findall(sections.get("pci", "")) if address(where)]
    module = _first(rf"NVRM version:.*?\s{_VERSION}\s", sections.get("nvidia_module", ""))
    rows = list(_rows(answer))
    return NvidiaFacts(
        pci=tuple(PciGpu(address(where), driver) for where, kind, driver in on_bus if kind.startswith(_DISPLAY)),
        switches=sum(kind.startswith(_SWITCH) for _, kind, _ in on_bus),
        device_files=tuple(re.findall(r"^/dev/nvidia[a-z0-9/-]*$", sections.get("nvidia_files", ""), re.MULTILINE)),
        smi="gpus" in sections,
        smi_exit=None if code in _CUT_OFF else code,
        smi_error=_complaint(answer),
        driver=rows[0][4] if rows else module,
        module=module,
        cuda=_first(r"^CUDA (?:UMD )?Version\s*: ([0-9]{1,3}\.[0-9]{1,3})", sections.get("processes", "")),
        toolkit=_first(rf"version {_VERSION}", sections.get("nvidia_toolkit", "")),
        toolkit_mode=_first(r'^ *mode *= *"([a-z-]{1,20})"', sections.get("nvidia_toolkit", "")),
        cdi_specs=tuple(line for line in sections.get("nvidia_cdi", "").splitlines() if line.startswith("/")),
        fabric_manager=_first(r"^([a-z]{2,20})$", sections.get("nvidia_fabric", "")),
    )


def address(text: str) -> str:
    """A PCI address as the kernel writes it; nvidia-smi writes the domain with eight digits. "" for other text."""
    if (match := _ADDRESS.search(text)) is None:
        return ""
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4]}".lower()


def _rows(answer: str) -> Iterator[list[str]]:
    """The lines of nvidia-smi's csv that are about a GPU; a driver before 450 omits the MIG mode, a stand-in more."""
    for line in answer.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) >= 5 and re.fullmatch("[0-9]{1,5}", cells[0], re.ASCII) and cells[1].startswith("GPU-"):
            yield cells


def _complaint(answer: str) -> str:
    rows = {",".join(row) for row in _rows(answer)}
    other = [line.strip() for line in answer.splitlines() if ",".join(map(str.strip, line.split(","))) not in rows]
    return " ".join(line for line in other if line and not line.startswith("@exit"))[:500]


def _instances(sections: Sections) -> dict[int, list[MigInstance]]:
    """From `nvidia-smi -L`: a line for each GPU, then one for each of its instances."""
    found: dict[int, list[MigInstance]] = {}
    index = -1
    for line in sections.get("mig", "").splitlines():
        if gpu := re.match(r"GPU (\d{1,5}): ", line, re.ASCII):
            index = int(gpu[1])
        elif part := re.match(r"\s*MIG (\S+) +Device +\d+: \(UUID: (MIG-[0-9A-Za-z/-]{1,80})\)", line, re.ASCII):
            found.setdefault(index, []).append(MigInstance(part[2], part[1]))
    return found


def _processes(sections: Sections) -> dict[str, list[GpuProcess]]:
    """Those that compute (type C, C+G, M+C), by the GPU's PCI address: from `nvidia-smi -q -d PIDS`."""
    text = sections.get("owners", "")
    users = {int(pid): user for pid, user in _OWNER.findall(text)}
    clock = re.match(r"\s*(\d{1,6})\n(\d{1,12})\.\d+ ", text, re.ASCII)
    ticks, uptime = (int(clock[1]) or 1, int(clock[2])) if clock else (0, 0)
    ages = {int(pid): max(0.0, uptime - int(start) / ticks) for pid, start in _STARTED.findall(text) if ticks}
    found: dict[str, list[GpuProcess]] = {}
    bus = ""
    values: dict[str, str] = {}
    for line in sections.get("processes", "").splitlines():
        if line.startswith("GPU "):
            bus = address(line)
        key, _, value = (part.strip() for part in line.partition(" : "))
        values = {} if key == "Process ID" else values
        values[key] = value
        if (
            key == "Used GPU Memory"
            and "C" in values.get("Type", "")
            and (pid := _integer(values.get("Process ID", "")))
        ):
            memory = _integer(value.removesuffix(" MiB"))
            name = values.get("Name", "").rpartition("/")[2]
            found.setdefault(bus, []).append(GpuProcess(pid, users.get(pid, ""), memory, name, ages.get(pid, 0.0)))
    return found


def _minors(sections: Sections) -> dict[str, int]:
    """From /proc/driver/nvidia/gpus/*/information: the number of each GPU's device file by its PCI address."""
    found = re.findall(
        r"^Bus Location:\s*(\S+)$[^:]*^Device Minor:\s*(\d{1,4})$", sections.get("nvidia_module", ""), re.MULTILINE
    )
    return {address(bus): int(minor) for bus, minor in found}


def _instance_files(sections: Sections, minor: int) -> tuple[str, ...]:
    """Of the GPU with this minor number: docs.nvidia.com/datacenter/tesla/mig-user-guide, device nodes."""
    pattern = rf"^/proc/driver/nvidia/capabilities/gpu{minor}/mig/\S+:DeviceFileMinor: (\d{{1,5}})$"
    numbers = re.findall(pattern, sections.get("nvidia_capabilities", ""), re.ASCII | re.MULTILINE)
    return tuple(f"/dev/nvidia-caps/nvidia-cap{number}" for number in numbers)


def _cell(cells: Sequence[str], index: int) -> str:
    return cells[index] if len(cells) > index else ""


def _integer(text: str) -> int:
    return int(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else 0


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.ASCII | re.MULTILINE)
    return match[1] if match else ""
