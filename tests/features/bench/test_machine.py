"""Hardware state of machines: recorded output of nvidia-smi and sysfs, read by the script, and the problems found.

Each file in health/ names its source. Recorded sysfs files are placed in a folder that replaces /sys.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.features.bench.health import machine
from launcher.features.bench.health.machine import LinkState, MachineState, between, parse, problems

RECORDED = Path(__file__).parent / "health"
GPUS = sorted(path.stem for path in RECORDED.glob("gpu_*.xml"))
TREES = sorted(path.stem for path in RECORDED.glob("*.txt") if path.stem != "net_eth0")


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.xml").read_text()


def gpus(text: str) -> MachineState:
    return parse(f"@@nvidia_smi\n{text}\n@exit 0\n\n@@end\n")


def described(state: MachineState, *, busy: bool) -> list[str]:
    return [f"{each.part}: {each.what}; {each.fix}" for each in problems("gpu-c", state, busy=busy)]


def put(root: Path, folder: str, name: str, more: str = "") -> None:
    """Write the recorded sysfs files below this folder; an empty value stands for an unreadable file."""
    for line in f"{(RECORDED / f'{name}.txt').read_text()}{more}".splitlines():
        path, _, value = line.partition(" ")
        if not line.startswith("#"):
            file = root / "sys/class" / folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n" if value else "")


def run(root: Path, interface: str = "", smi: str | None = None, *, more: str = "") -> MachineState:
    """Run the script with a fake nvidia-smi that prints this output."""
    tools = root / "tools"
    tools.mkdir(exist_ok=True)
    if smi is not None:
        (tools / "answer").write_text(smi)
        (tools / "nvidia-smi").write_text(f'#!/bin/sh\n{more}\n[ "$*" = "-q -x" ] && cat {tools}/answer\n')
        (tools / "nvidia-smi").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    argv = ["sh", "-c", machine.script(), "sh", interface, str(root)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60, env={"PATH": path})
    assert done.stderr == ""
    state = parse(done.stdout)
    assert state.complete
    return state


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "gpu_v100_power_brake",
            "GPU 0: throttled: hardware power brake, at 382 of 1530 MHz; check the machine's power",
        ),
        ("gpu_thermal_535", "GPU 0: throttled: software thermal slowdown; check its cooling"),
    ],
)
def test_a_throttled_gpu_is_reported_with_the_reason(name: str, expected: str) -> None:
    (line,) = described(gpus(recorded(name)), busy=True)
    assert line.startswith(expected)
    assert not described(gpus(recorded(name)), busy=False)  # idle GPUs lower their clocks for many reasons


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("hw_thermal_slowdown", "throttled: hardware thermal slowdown, at 1410 of 1597 MHz; check its cooling"),
        ("sw_thermal_slowdown", "throttled: software thermal slowdown, at 1410 of 1597 MHz; check its cooling"),
        ("sync_boost", "throttled: sync boost"),
        ("hw_power_brake_slowdown", "throttled: hardware power brake"),
    ],
)
@pytest.mark.parametrize("prefix", ["throttle", "event"])
def test_every_reason_by_its_name_before_and_since_driver_535(prefix: str, reason: str, expected: str) -> None:
    text = recorded("gpu_v100s_busy_460").replace("clocks_throttle_reason", f"clocks_{prefix}_reason")
    text = text.replace(f"{reason}>Not Active", f"{reason}>Active").replace(
        "hw_slowdown>Not Active", "hw_slowdown>Active"
    )
    (line,) = described(gpus(text), busy=True)
    assert line.startswith(f"GPU 0: {expected}")


def test_healthy_gpus_are_not_reported() -> None:
    """Idle, busy, at the power limit, in MIG mode, with a row remapped earlier; both as idle and as under load."""
    for name in ("a100_mig_535", "v100s_busy_460", "rtxpro6000_590", "gtx1660ti_418", "gh200_remapped_550"):
        state = gpus(recorded(f"gpu_{name}"))
        assert [len(state.gpus), described(state, busy=True), described(state, busy=False)] == [1, [], []], name
    assert described(gpus(recorded("gpu_rtx4090_535")), busy=True) == []
    between_steps = recorded("gpu_v100s_busy_460").replace("97 %", "4 %").replace("<sm_clock>1410", "<sm_clock>135")
    assert described(gpus(between_steps), busy=True) == []


def test_parsed_values_of_a_gpu() -> None:
    (card,) = gpus(recorded("gpu_v100s_busy_460")).gpus
    assert (card.index, card.bus, card.load, card.clock, card.clock_max) == (0, "00000000:00:0D.0", 97, 1410, 1597)
    assert card.uuid == "GPU-76098dc1-d3bc-9a1b-7ea6-f7b48837829e"
    assert (card.pcie.generation, card.pcie.width_max, card.power.draw, card.power.limit) == (3, 16, 232, 250)
    idle, busy, _ = gpus(recorded("gpu_rtx4090_535")).gpus
    assert (idle.index, busy.index, idle.throttled, busy.throttled) == (0, 1, ("gpu_idle",), ("sw_power_cap",))
    (newest,) = gpus(recorded("gpu_rtxpro6000_590")).gpus
    assert (newest.power.draw, newest.application_clock, newest.uncorrected) == (3, 0, 0)
    assert gpus(recorded("gpu_gh200_remapped_550")).gpus[0].remapped_rows == 1


@pytest.mark.parametrize("busy", [True, False])
def test_faulty_memory(busy: bool) -> None:
    for name in ("gpu_remap_pending_550", "gpu_a100_remap_pending_510"):
        (pending,) = described(gpus(recorded(name)), busy=busy)
        assert pending.startswith("GPU 0: memory row remapping is pending; stop its processes and reset it (sudo")
    (errors,) = described(gpus(recorded("gpu_a800_ecc")), busy=busy)
    assert "32 uncorrectable memory errors (ECC)" in errors
    assert "nvidia-smi recommends: Drain and Reset; stop" in errors
    failed = recorded("gpu_a800_ecc").replace("failure>No", "failure>Yes")
    assert described(gpus(failed), busy=busy)[0].endswith("exclude it (gpus: in the job file) and replace it")
    volta = recorded("gpu_v100s_busy_460").replace("pending_retirement>No", "pending_retirement>Yes")
    assert "memory page retirement is pending" in described(gpus(volta), busy=busy)[0]
    double = recorded("gpu_v100s_busy_460").replace("<double_bit>", "<double_bit><total>3</total>", 1)
    assert "3 uncorrectable memory errors" in described(gpus(double), busy=busy)[0]


def test_a_narrow_pcie_link_is_reported_under_load() -> None:
    """The output was recorded on idle cards; under load these two fields differ."""
    idle = recorded("gpu_l4_narrow_555")
    assert described(gpus(idle), busy=True) == []
    loaded = idle.replace("gpu_idle>Active", "gpu_idle>Not Active").replace("<gpu_util>3 %", "<gpu_util>98 %")
    (line,) = described(gpus(loaded), busy=True)
    assert line.startswith("GPU 1: its PCIe link runs at generation 4 x1, it supports 4 x16; reseat it")
    assert line.endswith("sudo lspci -vv -s 00000000:C1:00.0")
    slow = recorded("gpu_v100s_busy_460").replace("<current_link_gen>3", "<current_link_gen>1")
    assert "generation 1 x16, it supports 3 x16" in described(gpus(slow), busy=True)[0]


def test_power_limits_and_caps() -> None:
    lowered = recorded("gpu_v100s_busy_460").replace("<power_limit>250", "<power_limit>150")
    lowered = lowered.replace("<enforced_power_limit>250", "<enforced_power_limit>150")
    assert described(gpus(lowered), busy=False) == [
        "GPU 0: its power limit is set to 150 W, the default is 250 W; sudo nvidia-smi -i 0 -pl 250"
    ]
    # issue 3 of l4rz/reverse-engineering-dell-idrac-to-get-rid-of-gpu-throttling: capped at 240 of 400 W
    capped = recorded("gpu_rtx4090_535").replace("445.38 W", "240.00 W")
    (line,) = described(gpus(capped), busy=True)
    assert line.startswith("GPU 1: throttled: software power cap at 240 W, below its limit of 450 W")


def test_clocks_that_are_low_or_locked() -> None:
    busy = recorded("gpu_v100s_busy_460")
    stuck = busy.replace("<sm_clock>1410 MHz", "<sm_clock>135 MHz")
    (line,) = described(gpus(stuck), busy=True)
    assert line.startswith("GPU 0: slow, at 135 of 1597 MHz; nvidia-smi reports no reason; sudo nvidia-smi -i 0 -rac")
    limited = busy.replace("clocks_setting>Not Active", "clocks_setting>Active", 1)
    assert described(gpus(limited), busy=True) == []  # at their default
    limited = limited.replace("<graphics_clock>1245", "<graphics_clock>900", 1)
    assert "throttled: its clocks are limited to 900 MHz by configuration" in described(gpus(limited), busy=True)[0]


def test_other_processes_on_a_gpu_are_checked_before_the_load() -> None:
    assert described(gpus(recorded("gpu_rtx4090_535")), busy=False) == [
        "GPU 2: in use by python (pid 2180559, 22072 MiB); ask their owner to stop them, or use other GPUs"
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ib_edr_two_cards", []),
        ("ib_h100_unused_ports", []),
        ("ib_qdr_mlx4", []),
        ("roce_v1_and_v2", []),
        ("ib_polling_rccl", ["InfiniBand mlx5_7/1: down (Polling); check its cable and the port at the other end"]),
        ("roce_h100_polling", ["InfiniBand mlx5_11/1: down (Polling); check its cable"]),
        ("ib_virtual_function_down", ["InfiniBand mlx5_7/1: its link is up but its state is DOWN: no subnet manager"]),
        ("roce_v1_only", ["InfiniBand mlx5_0/1: no RoCE v2 GID: it has only v1"]),
        ("roce_no_gid", ["InfiniBand mlx5_0/1: no RoCE GID: its interface has no address; assign"]),
    ],
)
def test_recorded_ports(tmp_path: Path, name: str, expected: list[str]) -> None:
    put(tmp_path, "infiniband", name)
    found = described(run(tmp_path), busy=True)
    assert len(found) == len(expected), found
    for line, begin in zip(found, expected, strict=True):
        assert line.startswith(begin)


def test_all_recorded_files_are_used() -> None:
    assert len(GPUS) == 12
    assert len(TREES) == 9


def test_ports_that_are_off_initializing_or_trained_badly(tmp_path: Path) -> None:
    off = "mlx5_0/ports/1/state 1: DOWN\nmlx5_0/ports/1/phys_state 3: Disabled\n"
    put(tmp_path, "infiniband", "ib_edr_two_cards", off)
    assert described(run(tmp_path), busy=True) == []  # by a user, and the other port works
    put(tmp_path, "infiniband", "ib_edr_two_cards", off + off.replace("mlx5_0", "mlx5_1"))
    assert [line[:41] for line in described(run(tmp_path), busy=True)] == [
        f"InfiniBand mlx5_{n}/1: down (Disabled); ena" for n in (0, 1)
    ]
    put(tmp_path, "infiniband", "ib_edr_two_cards", "mlx5_1/ports/1/state 2: INIT\n")
    assert "InfiniBand mlx5_1/1: its link is up but its state is INIT" in described(run(tmp_path), busy=True)[0]
    put(tmp_path, "infiniband", "ib_edr_two_cards", "mlx5_1/ports/1/rate 25 Gb/sec (1X EDR)\n")
    assert "25 Gb/s, 1 lane of EDR: link training failed" in described(run(tmp_path), busy=True)[0]


def test_ports_and_entries_that_are_not_used(tmp_path: Path) -> None:
    """The second port of a card without a cable; the type of an entry that is zero."""
    polling = "mlx5_2/ports/1/phys_state 2: Polling\n"
    put(tmp_path / "a", "infiniband", "ib_h100_unused_ports", polling)
    assert described(run(tmp_path / "a"), busy=True) == []
    put(tmp_path / "b", "infiniband", "roce_no_gid", "mlx5_0/ports/1/gid_attrs/types/1 RoCE v2\n")
    assert "no RoCE GID" in described(run(tmp_path / "b"), busy=True)[0]


def state_of(root: Path, name: str, more: str = "", **link: object) -> MachineState:
    put(root, "infiniband", name, more)
    state = run(root)
    return replace(state, link=LinkState("eth0", **link)) if link else state  # type: ignore[arg-type]


def test_differences_between_the_nodes(tmp_path: Path) -> None:
    for node in "abcd":
        (tmp_path / node).mkdir()
    down = "mlx5_9/ports/1/state 1: DOWN\nmlx5_9/ports/1/phys_state 3: Disabled\n"
    slow = "mlx5_9/ports/1/rate 200 Gb/sec (2X NDR)\n"
    name = "ib_h100_unused_ports"
    states = {
        "gpu-a": state_of(tmp_path / "a", name, speed=10000, mtu=9000),
        "gpu-b": state_of(tmp_path / "b", name, down, speed=1000, mtu=9000),
        "gpu-c": state_of(tmp_path / "c", name, slow, speed=10000, mtu=1500),
    }
    found = [f"{each.node} {each.part}: {each.what}" for each in between(states)]
    assert found == [
        "gpu-b link eth0: it negotiated 1000 Mb/s, the other nodes 10000",
        "gpu-c link eth0: its MTU is 1500, that of the other nodes 9000",
        "gpu-b InfiniBand mlx5_9/1: down (Disabled), but active on gpu-a, gpu-c",
        "gpu-c InfiniBand mlx5_9/1: 200 Gb/s, but 400 on gpu-a",
    ]
    assert all(each.fix for each in between(states))
    assert between(dict.fromkeys("abcdefgh", states["gpu-a"])) == []
    none = {**dict.fromkeys("ab", states["gpu-a"]), "c": run(tmp_path / "d")}
    assert [f"{each.node} {each.part}: {each.what}" for each in between(none)] == [
        "c InfiniBand: 0 active ports, but 9 on a, b"
    ]
    polling = {"a": parse(""), "b": parse("")}
    assert between(polling) == []


def test_of_two_nodes_the_lesser_is_reported() -> None:
    pair = {
        "a": MachineState(link=LinkState("eth0", 1000, 1500)),
        "b": MachineState(link=LinkState("eth0", 1000, 9000)),
    }
    (only,) = between(pair)
    assert (only.node, only.what) == ("a", "its MTU is 1500, that of the other nodes 9000")
    assert only.fix.startswith("sudo ip link set dev eth0 mtu 9000")


def test_a_lower_power_limit_enforced_on_one_of_several_machines() -> None:
    whole = recorded("gpu_gh200_remapped_550")
    fine = gpus(whole.replace(">700.00 W", ">900.00 W"))
    assert between({"a": gpus(whole), "b": gpus(whole)}) == []
    (only,) = between({"a": fine, "b": gpus(whole), "c": fine})
    assert (only.node, only.part) == ("b", "GPU 0")
    assert only.what == "its power limit is 700 W, that of the other NVIDIA GH200 480GB 900 W"


def test_the_link_and_the_retransmissions(tmp_path: Path) -> None:
    put(tmp_path, "net/eth0", "net_eth0")
    before = run(tmp_path, "eth0")
    assert before.link == LinkState("eth0", 1000, 1500, "full")
    assert described(before, busy=True) == []
    half = replace(before, link=LinkState("eth0", 1000, 1500, "half"))
    assert described(half, busy=True)[0].startswith("link eth0: half duplex")
    hundred = replace(before, link=LinkState("eth0", 100, 1500, "full"))
    assert described(hundred, busy=False)[0].startswith("link eth0: it negotiated 100 Mb/s; check its cable")


def test_a_machine_without_gpus_and_ports(tmp_path: Path) -> None:
    assert run(tmp_path, "eth9") == MachineState(link=LinkState("eth9"), complete=True)


def test_the_script_reads_the_gpus_without_their_lists_of_clocks(tmp_path: Path) -> None:
    for name in ("gpu_rtxpro6000_590", "gpu_gtx1660ti_418"):  # the list, and N/A in its place
        state = run(tmp_path, smi=recorded(name))
        assert (state.gpus, state.nvidia_smi) == (gpus(recorded(name)).gpus, 0)


def test_truncated_output_is_parsed() -> None:
    text = recorded("gpu_rtx4090_535")
    state = parse(f"@@nvidia_smi\n{text[: text.index('</gpu>', text.index('</gpu>') + 6)]}")
    assert [card.load for card in state.gpus] == [0, 97]
    assert (state.nvidia_smi, state.complete) == (None, False)


@pytest.mark.slow
def test_a_hanging_nvidia_smi_does_not_affect_other_sections(tmp_path: Path) -> None:
    put(tmp_path, "infiniband", "ib_edr_two_cards")
    state = run(tmp_path, smi="", more="trap '' TERM; sleep 40")
    assert (len(state.ports), state.gpus, state.nvidia_smi) == (2, (), None)


PIECES = st.sampled_from(
    ["@@nvidia_smi\n", "@@infiniband\n", "@@link\n", "@@tcp\nTcp: OutSegs\nTcp: 9", "<", ">", "</gpu>"]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(PIECES, st.text(max_size=40)), max_size=12))
def test_any_output_is_accepted(pieces: list[str]) -> None:
    check(parse("".join(pieces)))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_modified_output_is_accepted(data: st.DataObject) -> None:
    """Recorded output with pieces removed, duplicated and replaced."""
    text = recorded(data.draw(st.sampled_from(GPUS)))
    tree = (RECORDED / f"{data.draw(st.sampled_from(TREES))}.txt").read_text()
    lines = "".join(f"./{line.replace(' ', ':', 1)}\n" for line in tree.splitlines())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.text(max_size=8)) + text[data.draw(st.integers(at, min(len(text), at + 300))) :]
        there = data.draw(st.integers(0, len(lines)))
        lines = lines[:there] + data.draw(st.text(max_size=8)) + lines[there:]
    check(parse(f"@@link\nname:eth0\nspeed:{lines[:9]}\n@@infiniband\n{lines}\n@@nvidia_smi\n{text}\n@@end\n"))


def test_deeply_nested_and_long_output_is_parsed_quickly() -> None:
    check(gpus("<nvidia_smi_log><gpu>" + "<a>" * 50_000))
    check(gpus("<nvidia_smi_log><gpu>" + "<process_info><type>C" * 5_000))


def check(state: MachineState) -> None:
    """For any state, problems are printable and have a fix."""
    found = problems("a", state, busy=True) + problems("a", state, busy=False)
    found += between({"a": state, "b": parse("@@link\nname:eth0\nspeed:1000\nmtu:1500\n"), "c": state})
    for each in found:
        assert f"{each.part}{each.what}{each.fix}".isprintable()
        assert each.what
        assert each.fix
