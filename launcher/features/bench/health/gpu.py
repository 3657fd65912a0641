"""State of NVIDIA GPUs as reported by `nvidia-smi -q -x`, and their problems. Pure.

Element names changed between driver versions; this module supports drivers 418 to 590.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launcher.faults.table import RESET
from launcher.features.bench.health.problem import HealthProblem, number, plain
from launcher.naming import first_of

# docs.nvidia.com/deploy/nvml-api, NvmlClocksEventReasons; the fixes require physical access to the machine
_REASONS = {
    "hw_thermal_slowdown": ("hardware thermal slowdown", "check its cooling"),
    "hw_power_brake_slowdown": (
        "hardware power brake",
        "check the machine's power supplies, their cables and the power settings of its management (BMC)",
    ),
    "hw_slowdown": ("hardware slowdown", "check its cooling and the machine's power supplies"),
    "sw_thermal_slowdown": ("software thermal slowdown", "check its cooling"),
    "sync_boost": (
        "sync boost: its clocks follow a slower GPU of its group",
        "check the other GPUs: nvidia-smi -q -d PERFORMANCE",
    ),
}
_CLOCKS = {"applications_clocks_setting", "user_defined_clocks"}
_REPLACE = "exclude it (gpus: in the job file) and replace it"
# docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt: rows are remapped at the next reset; a failure requires a new card
_FLAGS = {
    "remapped_rows/remapped_row_failure": ("a memory row could not be remapped", _REPLACE),
    "ecc_errors/unrepairable_memory": ("its memory has an unrepairable error", _REPLACE),
    "ecc_errors/aggregate/sram_threshold_exceeded": ("its SRAM has too many uncorrectable errors", _REPLACE),
    "remapped_rows/remapped_row_pending": ("memory row remapping is pending", RESET),
    "retired_pages/pending_retirement": ("memory page retirement is pending", RESET),
    "retired_pages/pending_blacklist": ("memory page retirement is pending", RESET),
    "ecc_errors/channel_repair_pending": ("memory channel repair is pending", RESET),
    "ecc_errors/tpc_repair_pending": ("TPC repair is pending", RESET),
    "gpu_reset_status/reset_required": ("its driver requires a reset", RESET),
    "gpu_reset_status/drain_and_reset_recommended": ("its driver recommends a reset", RESET),
}
_UNLOCK = "sudo nvidia-smi -i {index} -rac; sudo nvidia-smi -i {index} -rgc"
_LINK = (
    "reseat it, or try another slot, riser or cable; check the slot's lanes and generation in the BIOS; "
    "sudo lspci -vv -s {bus}"
)
_COMPUTES = 50  # percent; uninterrupted matmul shows 90 or more
# Elements are matched one by one: an XML parser would reject truncated output
_DEPTH = 12  # twice the actual depth
_TOKEN = re.compile(r"<(/?)([A-Za-z_][\w.-]{0,60})[^<>]{0,200}>([^<]*)", re.ASCII)


@dataclass(frozen=True)
class Pcie:
    """Lanes and generations; 0 if unknown. The maxima are those that both card and slot support."""

    generation: int = 0
    generation_max: int = 0
    width: int = 0
    width_max: int = 0


@dataclass(frozen=True)
class Power:
    """Power in watts; 0 if unknown. The enforced limit may be lower than the requested one."""

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
    """clock: SM clock in MHz; application_clock: its configured value; 0 if unknown."""

    index: int
    uuid: str = ""
    bus: str = ""  # in nvidia-smi's format: 00000000:61:00.0
    name: str = ""
    load: int | None = None  # percent during the last second or less; None for a GPU in MIG mode
    clock: int = 0
    clock_max: int = 0
    application_clock: int = 0
    application_clock_default: int = 0
    throttled: tuple[str, ...] = ()  # active reasons without their prefix: "sw_thermal_slowdown", "gpu_idle"
    uncorrected: int = 0  # memory errors since the driver was loaded
    remapped_rows: int = 0
    flags: tuple[str, ...] = ()  # those of _FLAGS that are set
    recovery: str = ""  # recovery action recommended by nvidia-smi: "Reset", "Drain and Reset", "Reboot"
    pcie: Pcie = Pcie()
    power: Power = Power()
    processes: tuple[Process, ...] = ()  # compute processes only


def parse(answer: str) -> tuple[GpuState, ...]:
    """Parse the output of `nvidia-smi -q -x`. It lists the GPUs in the order of their indices.

    The output contains no index: the number of the device file (minor_number) may differ from it.
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
                element = "/".join(path[path.index("gpu") + 1 :])
                found[-1][0].setdefault(element, text.strip())
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
        flags=tuple(path for path in _FLAGS if values.get(path) == "Yes"),
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


def problems(node: str, gpu: GpuState, *, busy: bool) -> Iterator[HealthProblem]:
    """Yield the problems of a GPU. busy: the state was read while the benchmark ran on it."""
    for what, fix in (*_memory(gpu), *_power(gpu), *(_loaded(gpu) if busy else _others(gpu))):
        yield HealthProblem(node, f"GPU {gpu.index}", what, fix.format(index=gpu.index, bus=gpu.bus))


def _memory(gpu: GpuState) -> Iterator[tuple[str, str]]:
    """Rows that were already remapped are not a problem: the GPU has spare rows for this."""
    found = [_FLAGS[path] for path in gpu.flags]
    if gpu.uncorrected:
        since = "since its driver was loaded"
        found.insert(0, (f"{gpu.uncorrected} uncorrectable memory errors (ECC) {since}", RESET))
    if gpu.recovery:
        found.append((f"nvidia-smi recommends: {gpu.recovery}", RESET))
    if found:
        fixes = {fix for _, fix in found}
        yield "; ".join(dict.fromkeys(what for what, _ in found)), _REPLACE if _REPLACE in fixes else RESET


def _power(gpu: GpuState) -> Iterator[tuple[str, str]]:
    """Report only limits set by a user: the machine may enforce a lower one by design, as on GH200 (700 of 900 W)."""
    power = gpu.power
    if power.requested < power.default and power.requested:
        what = f"its power limit is set to {power.requested} W, the default is {power.default} W"
        yield what, f"sudo nvidia-smi -i {{index}} -pl {power.default}"


def _others(gpu: GpuState) -> Iterator[tuple[str, str]]:
    """Other processes on the GPU; not checked under load, when the benchmark's own pids on the machine are unknown."""
    if gpu.processes:
        named = [f"{each.name} (pid {each.pid}, {each.memory_mib} MiB)" for each in gpu.processes]
        yield f"in use by {first_of(named, 3)}", "ask their owner to stop them, or use other GPUs"


def _loaded(gpu: GpuState) -> Iterator[tuple[str, str]]:
    """Problems under load. An idle GPU lowers its clocks and its PCIe link and reports gpu_idle, which is normal.

    Therefore a GPU that was nearly idle when it was read, such as one that the job does not use, is skipped. Copies
    over PCIe do not count as load: the state must be read during matrix products.
    """
    if "gpu_idle" in gpu.throttled or (gpu.load is not None and gpu.load < _COMPUTES):
        return
    at = f", at {gpu.clock} of {gpu.clock_max} MHz" if gpu.clock and gpu.clock_max else ""
    slow = gpu.clock < gpu.clock_max / 2 or not at
    reasons = [reason for reason in _REASONS if reason in gpu.throttled]
    if len({"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"} & set(reasons)) > 1 or not slow:
        # It accompanies the other two. Alone it reduces the clock to half or less; at higher clocks it is transient.
        reasons = [reason for reason in reasons if reason != "hw_slowdown"]
    for reason in reasons:
        what, fix = _REASONS[reason]
        yield f"throttled: {what}{at}", fix
    if _CLOCKS & set(gpu.throttled) and not 0 < gpu.application_clock_default <= gpu.application_clock:
        limit = f" to {gpu.application_clock} MHz" if gpu.application_clock else ""
        yield f"throttled: its clocks are limited{limit} by configuration{at}", _UNLOCK
    power = gpu.power
    if "sw_power_cap" in gpu.throttled and 0 < power.draw < 0.7 * power.limit:
        # Every GPU under full load reports this at its power limit. Far below the limit, the cause is different.
        what = f"throttled: software power cap at {power.draw} W, below its limit of {power.limit} W{at}"
        yield what, "check its power cables and the power settings of the machine's management (BMC), then its cooling"
    if slow and at and not {*_REASONS, *_CLOCKS, "sw_power_cap"} & set(gpu.throttled):
        named = ", ".join(gpu.throttled) or "no reason"
        yield f"slow{at}; nvidia-smi reports {named}", f"{_UNLOCK}; if it stays slow, {RESET}"
    pcie = gpu.pcie
    if 0 < pcie.generation < pcie.generation_max or 0 < pcie.width < pcie.width_max:
        what = f"its PCIe link runs at generation {pcie.generation} x{pcie.width}, "
        yield f"{what}it supports {pcie.generation_max} x{pcie.width_max}", _LINK
