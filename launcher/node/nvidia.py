"""Parser of the facts script's output about NVIDIA GPUs. It accepts any output of any version of nvidia-smi."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from launcher.model.facts import Gpu, GpuProcess, MigInstance, NvidiaFacts, PciGpu

_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.ASCII | re.IGNORECASE)
_EXIT = re.compile(r"^@exit ([0-9]{1,3})$", re.ASCII | re.MULTILINE)
_TIMED_OUT = (124, 137)  # exit codes of timeout(1)
_NO_FAULT = ("[n/a]", "[not supported]", "[insufficient permissions]")  # other values in [] are faults
_NO_MEMORY = ("[n/a]", "[not supported]")  # of its own: other values in [] are faults
_UUID = re.compile(r"GPU-\S+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)  # without GPU-: Jetson Orin
_VERSION = r"([0-9]{1,5}(?:\.[0-9]{1,5}){1,3})"
_PCI = re.compile(r"^(\S+) (0x[0-9a-f]{6}) ?(\S*)$", re.ASCII | re.MULTILINE)
_DISPLAY, _SWITCH = ("0x0300", "0x0302"), "0x0680"  # VGA and 3D controllers; NVSwitches are bridges of kind "other"
_OWNER = re.compile(r"^/proc/(\d{1,9}) (\S{1,64})$", re.ASCII | re.MULTILINE)
_STARTED = re.compile(r"^(\d{1,9}) \(.*\) [A-Za-z] (?:-?\d+ ){18}(\d{1,18}) ", re.ASCII | re.MULTILINE)

Sections = Mapping[str, str]


def gpus(sections: Sections, machine_memory: int, available: int) -> tuple[Gpu, ...]:
    """Return the GPUs that nvidia-smi lists, with their processes and MIG instances.

    machine_memory: in bytes, and what of it is available, -1 if unknown: a GPU without memory of its own (GB10 of
    DGX Spark, Jetson), for which nvidia-smi reports [N/A], uses the machine's.
    """
    minors, running, divided = _minors(sections), _processes(sections), _instances(sections)
    found = []
    for cells in _rows(sections.get("gpus", "")):
        index, bus = int(cells[0]), address(_cell(cells, 6))
        memory, used = cells[3], _cell(cells, 5)
        shared = memory.lower() in _NO_MEMORY
        values = (memory, used, _cell(cells, 9))
        faults = [cell.strip("[]") for cell in values if cell.startswith("[") and cell.lower() not in _NO_FAULT]
        found.append(
            Gpu(
                index=index,
                uuid=cells[1],
                name=cells[2],
                memory_mib=machine_memory >> 20 if shared else _integer(memory),
                driver=cells[4],
                used_mib=max(0, machine_memory - available) >> 20 if shared and available >= 0 else _integer(used),
                bus=bus,
                compute_mode=_cell(cells, 7),
                persistence={"Enabled": True, "Disabled": False}.get(_cell(cells, 8)),
                mig=_cell(cells, 10) == "Enabled",
                shared=shared,
                capability=_first(r"^(\d{1,2}\.\d)$", _cell(cells, 11)),
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
    exits = _EXIT.findall(answer)
    code = int(exits[-1]) if exits else None
    on_bus = [(bus, kind, driver) for bus, kind, driver in _PCI.findall(sections.get("pci", "")) if address(bus)]
    module = _first(rf"NVRM version:.*?\s{_VERSION}\s", sections.get("nvidia_module", ""))
    rows = list(_rows(answer))
    return NvidiaFacts(
        pci=tuple(PciGpu(address(bus), driver) for bus, kind, driver in on_bus if kind.startswith(_DISPLAY)),
        switches=sum(kind.startswith(_SWITCH) for _, kind, _ in on_bus),
        device_files=tuple(re.findall(r"^/dev/nvidia[a-z0-9/-]*$", sections.get("nvidia_files", ""), re.MULTILINE)),
        smi="gpus" in sections,
        smi_exit=None if code in _TIMED_OUT else code,
        smi_error=_error_text(answer),
        driver=rows[0][4] if rows else module,
        module=module,
        cuda=_first(r"^CUDA (?:UMD )?Version\s*: ([0-9]{1,3}\.[0-9]{1,3})", sections.get("processes", "")),
        toolkit=_first(rf"version {_VERSION}", sections.get("nvidia_toolkit", "")),
        toolkit_mode=_first(r'^ *mode *= *"([a-z-]{1,20})"', sections.get("nvidia_toolkit", "")),
        cdi_specs=tuple(line for line in sections.get("nvidia_cdi", "").splitlines() if line.startswith("/")),
        fabric_manager=_first(r"^([a-z]{2,20})$", sections.get("nvidia_fabric", "")),
    )


def address(text: str) -> str:
    """Return a PCI address as the kernel writes it; nvidia-smi writes an eight-digit domain. "" for other text."""
    if (match := _ADDRESS.search(text)) is None:
        return ""
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4]}".lower()


def _rows(answer: str) -> Iterator[list[str]]:
    """Yield the GPU lines of nvidia-smi's CSV; drivers before 450 omit the MIG mode, replacements of it more fields."""
    for line in answer.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) >= 5 and re.fullmatch("[0-9]{1,5}", cells[0], re.ASCII) and _UUID.fullmatch(cells[1]):
            yield cells


def _error_text(answer: str) -> str:
    rows = {",".join(row) for row in _rows(answer)}
    other = [line.strip() for line in answer.splitlines() if ",".join(map(str.strip, line.split(","))) not in rows]
    return " ".join(line for line in other if line and not line.startswith("@exit"))[:500]


def _instances(sections: Sections) -> dict[int, list[MigInstance]]:
    """Parse `nvidia-smi -L`: a line for each GPU, followed by a line for each of its MIG instances."""
    found: dict[int, list[MigInstance]] = {}
    index = -1
    for line in sections.get("mig", "").splitlines():
        if gpu := re.match(r"GPU (\d{1,5}): ", line, re.ASCII):
            index = int(gpu[1])
        elif part := re.match(r"\s*MIG (\S+) +Device +\d+: \(UUID: (MIG-[0-9A-Za-z/-]{1,80})\)", line, re.ASCII):
            found.setdefault(index, []).append(MigInstance(part[2], part[1]))
    return found


def _processes(sections: Sections) -> dict[str, list[GpuProcess]]:
    """Return the compute processes (type C, C+G, M+C) in `nvidia-smi -q -d PIDS`, by the GPU's PCI address."""
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
    """Return the minor number of each GPU by its PCI address, from /proc/driver/nvidia/gpus/*/information."""
    found = re.findall(
        r"^Bus Location:\s*(\S+)$[^:]*^Device Minor:\s*(\d{1,4})$", sections.get("nvidia_module", ""), re.MULTILINE
    )
    return {address(bus): int(minor) for bus, minor in found}


def _instance_files(sections: Sections, minor: int) -> tuple[str, ...]:
    """Return the MIG device files of this GPU: docs.nvidia.com/datacenter/tesla/mig-user-guide, device nodes."""
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
