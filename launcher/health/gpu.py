"""The state of NVIDIA GPUs by `nvidia-smi -q -x`, and what it says is wrong with them. Pure.

The elements changed their names over the years; the ones read here are those of drivers 418 to 590.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launcher.health.trouble import Trouble, number, plain

# docs.nvidia.com/deploy/nvml-api, NvmlClocksEventReasons; the fix is for a person beside the machine
_REASONS = {
    "hw_thermal_slowdown": ("hardware thermal slowdown", "check its cooling"),
    "hw_power_brake_slowdown": (
        "hardware power brake",
        "check the machine's power supplies, their cables and the power settings of its management (BMC)",
    ),
    "hw_slowdown": ("hardware slowdown", "check its cooling and the machine's power supplies"),
    "sw_thermal_slowdown": ("software thermal slowdown", "check its cooling"),
    "sync_boost": (
        "sync boost: it waits for another GPU of its group",
        "inspect the others: nvidia-smi -q -d PERFORMANCE",
    ),
}
_CLOCKS = {"applications_clocks_setting", "user_defined_clocks"}
_RESET = "stop what uses it and reset it (sudo nvidia-smi --gpu-reset -i {index}), or reboot the machine"
_REPLACE = "leave it out (gpus: in the job) and have it replaced"
# docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt: rows are remapped at the next reset; a failure means another card
_SAID = {
    "remapped_rows/remapped_row_failure": ("a row of its memory could not be remapped", _REPLACE),
    "ecc_errors/unrepairable_memory": ("a part of its memory cannot be repaired", _REPLACE),
    "ecc_errors/aggregate/sram_threshold_exceeded": ("its SRAM has had too many uncorrectable errors", _REPLACE),
    "remapped_rows/remapped_row_pending": ("rows of its memory wait to be remapped", _RESET),
    "retired_pages/pending_retirement": ("pages of its memory wait to be retired", _RESET),
    "retired_pages/pending_blacklist": ("pages of its memory wait to be retired", _RESET),
    "ecc_errors/channel_repair_pending": ("a channel of its memory waits to be repaired", _RESET),
    "ecc_errors/tpc_repair_pending": ("a part of its processor waits to be repaired", _RESET),
    "gpu_reset_status/reset_required": ("its driver requires a reset", _RESET),
    "gpu_reset_status/drain_and_reset_recommended": ("its driver recommends a reset", _RESET),
}
_UNLOCK = "sudo nvidia-smi -i {index} -rac; sudo nvidia-smi -i {index} -rgc"
_LINK = (
    "seat it again, or try another slot, riser or cable; BIOS: the slot's lanes and generation; sudo lspci -vv -s {bus}"
)
_COMPUTES = 50  # percent; matmul without a pause shows 90 and more
# One element a line, so no XML parser is needed, which would refuse an answer that was cut off
_DEPTH = 12  # twice what there is
_TOKEN = re.compile(r"<(/?)([A-Za-z_][\w.-]{0,60})[^<>]{0,200}>([^<]*)", re.ASCII)


@dataclass(frozen=True)
class Pcie:
    """Lanes and generations; 0 where they are not known. The maxima are those of card and slot together."""

    generation: int = 0
    generation_max: int = 0
    width: int = 0
    width_max: int = 0


@dataclass(frozen=True)
class Power:
    """Watts, 0 where they are not known. The limit in force may be below the one that was asked for."""

    draw: int = 0
    limit: int = 0
    requested: int = 0
    default: int = 0


@dataclass(frozen=True)
class Process:
    pid: int
    name: str
    memory_mib: int


@dataclass(frozen=True)
class GpuState:
    """clock: MHz of the SMs; application_clock: what they are set to; 0 where they are not known."""

    index: int
    uuid: str = ""
    bus: str = ""  # as nvidia-smi writes it: 00000000:61:00.0
    name: str = ""
    load: int | None = None  # percent of the last second or less; None for a divided GPU
    clock: int = 0
    clock_max: int = 0
    application_clock: int = 0
    application_clock_default: int = 0
    throttled: tuple[str, ...] = ()  # active reasons, without their prefix: "sw_thermal_slowdown", "gpu_idle"
    uncorrected: int = 0  # memory errors since the driver was loaded
    remapped_rows: int = 0
    said: tuple[str, ...] = ()  # those of _SAID that are set
    recovery: str = ""  # what nvidia-smi asks for: "Reset", "Drain and Reset", "Reboot"
    pcie: Pcie = Pcie()
    power: Power = Power()
    processes: tuple[Process, ...] = ()  # that compute


def parse(answer: str) -> tuple[GpuState, ...]:
    """The GPUs of an answer of `nvidia-smi -q -x` in its order, which is that of their indices.

    The answer has no index: a device file's number (minor_number) is another one.
    """
    found: list[tuple[dict[str, str], list[Process]]] = []
    path: list[str] = []
    process: dict[str, str] = {}
    for closing, name, text in _TOKEN.findall(answer):
        if not closing:
            path = [*path[:_DEPTH], name]
            if path[-2:] == ["nvidia_smi_log", "gpu"]:
                path = path[-2:]
                found.append(({}, []))
            elif name == "process_info":
                process = {}
            elif found and "gpu" in path:
                where = "/".join(path[path.index("gpu") + 1 :])
                found[-1][0].setdefault(where, text.strip())
                process[name] = text.strip()
        elif name in path:
            del path[len(path) - 1 - path[::-1].index(name) :]
            if name == "process_info" and found and "C" in process.get("type", ""):
                title = plain(process.get("process_name", "").rpartition("/")[2])
                pid, mib = number(process.get("pid", "")), number(process.get("used_memory", ""))
                found[-1][1].append(Process(pid, title, mib))
    return tuple(_gpu(index, values, processes) for index, (values, processes) in enumerate(found))


def _gpu(index: int, values: Mapping[str, str], processes: list[Process]) -> GpuState:
    def value(*paths: str) -> int:
        return next((number(values[path]) for path in paths if number(values.get(path, ""))), 0)

    def word(path: str, pattern: str) -> str:
        return values.get(path, "") if re.fullmatch(pattern, values.get(path, ""), re.ASCII) else ""

    reasons = [re.fullmatch(r"clocks_\w+_reasons/clocks_\w+_reason_(\w{1,40})", path, re.ASCII) for path in values]
    link, old, new = "pci/pci_gpu_link_info", "power_readings", "gpu_power_readings"
    uncorrected = (
        number(text)
        for path, text in values.items()
        if re.fullmatch(r"ecc_errors/volatile/(\w+_uncorrectable\w*|double_bit/total)", path, re.ASCII)
    )
    load = values.get("utilization/gpu_util", "")
    recovery = values.get("gpu_recovery_action", "")
    return GpuState(
        index=index,
        uuid=word("uuid", r"GPU-[0-9A-Fa-f-]{1,60}"),
        bus=word("pci/pci_bus_id", r"[0-9A-Fa-f:.]{7,20}"),
        name=plain(values.get("product_name", ""), 60),
        load=number(load) if re.match(r"\d", load, re.ASCII) else None,
        clock=value("clocks/sm_clock"),
        clock_max=value("max_clocks/sm_clock"),
        application_clock=value("applications_clocks/graphics_clock"),
        application_clock_default=value("default_applications_clocks/graphics_clock"),
        throttled=tuple(reason[1] for reason in reasons if reason and values[reason[0]] == "Active"),
        uncorrected=sum(uncorrected),
        remapped_rows=value("remapped_rows/remapped_row_corr") + value("remapped_rows/remapped_row_unc"),
        said=tuple(path for path in _SAID if values.get(path) == "Yes"),
        recovery="" if recovery in ("", "None", "N/A") else plain(recovery),
        pcie=Pcie(
            value(f"{link}/pcie_gen/current_link_gen"),
            value(f"{link}/pcie_gen/max_link_gen"),
            value(f"{link}/link_widths/current_link_width"),
            value(f"{link}/link_widths/max_link_width"),
        ),
        power=Power(
            value(f"{new}/power_draw", f"{new}/instant_power_draw", f"{old}/power_draw"),
            value(f"{new}/current_power_limit", f"{old}/enforced_power_limit", f"{old}/power_limit"),
            value(f"{new}/requested_power_limit", f"{old}/power_limit"),
            value(f"{new}/default_power_limit", f"{old}/default_power_limit"),
        ),
        processes=tuple(processes),
    )


def troubles(node: str, gpu: GpuState, *, busy: bool) -> Iterator[Trouble]:
    """busy: it was read while the benchmark computed on it."""
    for what, fix in (*_memory(gpu), *_power(gpu), *(_loaded(gpu) if busy else _others(gpu))):
        yield Trouble(node, f"GPU {gpu.index}", what, fix.format(index=gpu.index, bus=gpu.bus))


def _memory(gpu: GpuState) -> Iterator[tuple[str, str]]:
    """Rows that were remapped earlier are no fault: the GPU has spare ones, and works as before."""
    found = [_SAID[path] for path in gpu.said]
    if gpu.uncorrected:
        since = "since its driver was loaded"
        found.insert(0, (f"{gpu.uncorrected} uncorrectable memory errors (ECC) {since}", _RESET))
    if gpu.recovery:
        found.append((f"nvidia-smi asks for: {gpu.recovery}", _RESET))
    if found:
        fixes = {fix for _, fix in found}
        yield "; ".join(dict.fromkeys(what for what, _ in found)), _REPLACE if _REPLACE in fixes else _RESET


def _power(gpu: GpuState) -> Iterator[tuple[str, str]]:
    """Only a limit that was set by hand: the machine may enforce a lower one by design, as on GH200 (700 of 900 W)."""
    power = gpu.power
    if power.requested < power.default and power.requested:
        what = f"its power limit is set to {power.requested} W, the default is {power.default} W"
        yield what, f"sudo nvidia-smi -i {{index}} -pl {power.default}"


def _others(gpu: GpuState) -> Iterator[tuple[str, str]]:
    """Under load the benchmark's own processes are among them, under pids of the machine that it does not know."""
    if gpu.processes:
        listed = ", ".join(f"{each.name} (pid {each.pid}, {each.memory_mib} MiB)" for each in gpu.processes[:3])
        more = f" and {len(gpu.processes) - 3} more" if len(gpu.processes) > 3 else ""
        yield f"in use by {listed}{more}", "ask their owner to end them, or take other GPUs"


def _loaded(gpu: GpuState) -> Iterator[tuple[str, str]]:
    """An idle GPU lowers its clocks and its PCIe link, and reports gpu_idle, which is normal.

    So a GPU that had little to do when it was read, such as one that the job does not use, is not judged. Copies over
    PCIe do not count as load: read it while it multiplies matrices.
    """
    if "gpu_idle" in gpu.throttled or (gpu.load is not None and gpu.load < _COMPUTES):
        return
    at = f", at {gpu.clock} of {gpu.clock_max} MHz" if gpu.clock and gpu.clock_max else ""
    slow = gpu.clock < gpu.clock_max / 2 or not at
    reasons = [reason for reason in _REASONS if reason in gpu.throttled]
    if len({"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"} & set(reasons)) > 1 or not slow:
        # It accompanies the other two. Alone it means half the clock or less; at higher clocks it is a moment's change.
        reasons = [reason for reason in reasons if reason != "hw_slowdown"]
    for reason in reasons:
        what, fix = _REASONS[reason]
        yield f"throttled: {what}{at}", fix
    if _CLOCKS & set(gpu.throttled) and not 0 < gpu.application_clock_default <= gpu.application_clock:
        limit = f" to {gpu.application_clock} MHz" if gpu.application_clock else ""
        yield f"throttled: its clocks are limited{limit} by a setting{at}", _UNLOCK
    power = gpu.power
    if "sw_power_cap" in gpu.throttled and 0 < power.draw < 0.7 * power.limit:
        # Every GPU under full load reports this at its power limit. Far below the limit, there is another cause.
        what = f"throttled: software power cap at {power.draw} W, though its limit is {power.limit} W{at}"
        yield what, "check its power cables and the power settings of the machine's management (BMC); then its cooling"
    if slow and at and not {*_REASONS, *_CLOCKS, "sw_power_cap"} & set(gpu.throttled):
        named = ", ".join(gpu.throttled) or "no reason"
        yield f"slow{at}; nvidia-smi names {named}", f"{_UNLOCK}; if it stays slow, {_RESET}"
    pcie = gpu.pcie
    if 0 < pcie.generation < pcie.generation_max or 0 < pcie.width < pcie.width_max:
        what = f"its PCIe link has generation {pcie.generation} x{pcie.width}, "
        yield f"{what}possible are {pcie.generation_max} x{pcie.width_max}", _LINK
