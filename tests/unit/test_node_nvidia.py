"""Facts about NVIDIA GPUs: the script with a stand-in nvidia-smi and PCI tree, and the parser of its output."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest

from launcher.model.facts import Gpu, GpuProcess, MigInstance, PciGpu
from launcher.node.facts import parse, script
from launcher.node.nvidia import address
from launcher.planning.gpu_faults import fault
from tests import nvidia
from tests.nvidia import Card, Machine, Process, cards

TRAINING = Card(
    "0f:00.0", used=61004, running=[Process(4242, 61000), Process(99, 4, kind="G", name="/usr/lib/xorg/Xorg")]
)


def parsed(machine: Machine) -> tuple[tuple[Gpu, ...], object]:
    node = parse(machine.output().encode()).node
    return node.gpus, node.nvidia


def run(folder: Path, machine: Machine, within: str = "20") -> tuple[str, list[str]]:
    """The script's output on a machine, and the calls of nvidia-smi. within: their limit instead of 20 s."""
    text = script().replace("/sys/bus/pci/devices", str(machine.tree(folder)))
    text = text.replace("-s KILL 20", f"-s KILL {within}").replace("timeout 22", f"timeout {within}")
    if machine.smi:
        machine.install(folder)
    calls = folder / "calls"
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SMI_CALLS": str(calls)}
    done = subprocess.run(["sh", "-c", text], capture_output=True, check=True, env=env, timeout=60)
    return done.stdout.decode(), calls.read_text().splitlines() if calls.exists() else []


def test_gpus_with_their_processes() -> None:
    gpus, seen = parsed(Machine([Card("07:00.0"), TRAINING]))
    assert [gpu.bus for gpu in gpus] == ["0000:07:00.0", "0000:0f:00.0"]
    assert gpus[1] == Gpu(
        index=1,
        uuid="GPU-00000001-0000-0000-0000-000000000001",
        name="NVIDIA A100-SXM4-80GB",
        memory_mib=81920,
        driver="550.54.14",
        used_mib=61004,
        bus="0000:0f:00.0",
        compute_mode="Default",
        persistence=True,
        processes=(GpuProcess(4242, "erin", 61000, "python3", 10800.0),),  # not the X server
        capability="8.0",
    )
    assert (seen.driver, seen.cuda, seen.smi, seen.smi_exit, seen.smi_error) == ("550.54.14", "12.4", True, 0, "")
    assert seen.pci == (PciGpu("0000:07:00.0", "nvidia"), PciGpu("0000:0f:00.0", "nvidia"))


def test_a_machine_without_gpus() -> None:
    node = parse(b"@@pci\n\n@@end\n").node
    assert (node.gpus, node.nvidia) == ((), type(node.nvidia)())


def test_toolkit_module_device_files_and_switches() -> None:
    more = f"""
@@nvidia_module
{nvidia.OPEN_MODULE}Model: \t\t NVIDIA H100 80GB HBM3
GPU UUID: \t GPU-00000000-0000-0000-0000-000000000000
Bus Location: \t 0000:07:00.0
Device Minor: \t 3

@@nvidia_capabilities
/proc/driver/nvidia/capabilities/gpu2/mig/gi1/access:DeviceFileMinor: 9
/proc/driver/nvidia/capabilities/gpu3/mig/gi1/access:DeviceFileMinor: 12
/proc/driver/nvidia/capabilities/gpu3/mig/gi1/ci0/access:DeviceFileMinor: 13

@@nvidia_toolkit
NVIDIA Container Toolkit CLI version 1.17.8
commit: f202b80a9b9d0db00d9b1d73c0128c8962c55f4d
mode = "auto"

@@nvidia_cdi
/etc/cdi/nvidia.yaml

@@nvidia_fabric
inactive
"""
    gpus, seen = parsed(Machine(cards(1), more=more, switches=["85:00.0", "86:00.0"]))
    assert (gpus[0].minor, gpus[0].instance_files) == (
        3,
        ("/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13"),
    )
    assert (seen.module, seen.toolkit, seen.toolkit_mode) == ("580.95.05", "1.17.8", "auto")
    assert (seen.cdi_specs, seen.fabric_manager, seen.switches) == (("/etc/cdi/nvidia.yaml",), "inactive", 2)
    assert seen.device_files == ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")


def test_instances_of_divided_gpus() -> None:
    machine = Machine(
        [Card(f"0{bus}:00.0", uuid, mig="Enabled") for bus, uuid in zip("78", nvidia.MIG_UUIDS, strict=True)]
    )
    gpus, _ = parsed(machine)
    assert [gpu.mig for gpu in gpus] == [True, True]
    assert gpus[1].instances == (
        MigInstance("MIG-d5a46a2e-1d77-575d-99e3-1f96c8555a2e", "1g.10gb"),
        MigInstance("MIG-b8479d6e-d08f-5a92-9a24-0946db72b2a0", "1g.10gb"),
    )


@pytest.mark.parametrize("failure", [nvidia.MISMATCH, nvidia.NO_DRIVER, nvidia.LOST, nvidia.NO_DEVICES])
def test_message_and_exit_code_of_a_failure(failure: tuple[str, int]) -> None:
    gpus, seen = parsed(Machine(cards(2), failure=failure))
    assert gpus == ()
    assert (seen.smi_exit, len(seen.pci)) == (failure[1], 2)
    assert seen.smi_error == " ".join(failure[0].split("\n")).strip()


def test_a_gpu_that_needs_a_reset_and_one_without_a_thermometer() -> None:
    values = (nvidia.RESET, "[N/A]", "[Unknown Error]")
    gpus, _ = parsed(Machine([*cards(1), *(Card("0f:00.0", temperature=value) for value in values)]))
    assert [gpu.fault for gpu in gpus] == ["", "GPU requires reset", "", "Unknown Error"]


def test_a_driver_that_lists_five_fields_only() -> None:
    node = parse(b"@@gpus\n0, GPU-8f3a, Tesla K80, 11441, 418.87\n\n@exit 0\n@@end\n").node
    assert node.gpus == (Gpu(0, "GPU-8f3a", "Tesla K80", 11441, "418.87"),)


def test_jetsons_have_other_uuids_and_share_the_machines_memory() -> None:
    """Orin with JetPack 6; https://github.com/anduril/jetpack-nixos/pull/371 has its tables."""
    row = b"0, 54d0709b-1feb-5b3c-b9dd-21b7ab8b0a1a, Orin (nvgpu), [N/A], 540.4.0, [N/A], [N/A], [N/A], [N/A], [N/A]"
    node = parse(b"@@memory\nMemTotal: 64000000 kB\n@@gpus\n" + row + b"\n\n@exit 0\n@@end\n").node
    [gpu] = node.gpus
    assert (gpu.uuid[:8], gpu.name, gpu.driver, gpu.shared, gpu.fault) == (
        "54d0709b",
        "Orin (nvgpu)",
        "540.4.0",
        True,
        "",
    )
    assert node.nvidia.smi_error == ""
    assert fault(node) is None


def test_addresses_are_written_as_by_the_kernel() -> None:
    assert address("GPU 00000000:3B:00.0") == address("GPU0000:3B:00.0: Unknown Error") == "0000:3b:00.0"
    assert address("GPU1: Unknown Error") == ""


def test_any_part_of_the_output_is_handled() -> None:
    machine = Machine([TRAINING, Card("07:00.0", nvidia.MIG_UUIDS[0], mig="Enabled")], complaint=nvidia.HANDLE_OF_ONE)
    text = machine.output()
    lines = text.splitlines()
    for cut in range(0, len(text), 41):
        parse(text[:cut].encode())
    for line in range(len(lines)):
        parse("\n".join(lines[:line] + lines[line + 1 :]).encode())
        parse("\n".join([*lines[:line], lines[line].replace(":", ","), *lines[line + 1 :]]).encode())


def test_the_script_makes_two_calls_for_eight_gpus(tmp_path: Path) -> None:
    text, calls = run(tmp_path, Machine(cards(8, running=[Process(os.getpid(), 61000)])))
    assert len(calls) == 2
    node = parse(text.encode()).node
    assert [gpu.index for gpu in node.gpus] == list(range(8))
    own = node.gpus[7].processes[0]
    assert (own.pid, own.memory_mib) == (os.getpid(), 61000)
    assert own.user == subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    assert 0 < own.age < 1e6
    assert len(node.nvidia.pci) == 8


def test_the_two_calls_and_the_rest_of_the_script_run_in_parallel(tmp_path: Path) -> None:
    machine, met = Machine(cards(8)), tmp_path / "met"
    met.mkdir()
    waits = f'#!/bin/sh\ntouch {met}/$$\nuntil [ "$(ls {met} | wc -l)" = 3 ]; do sleep 0.05; done\n'
    for name, program in (("nvidia-smi", machine.script()), ("nproc", "#!/bin/sh\necho 64\n")):
        (tmp_path / name).write_text(waits + program.partition("\n")[2])
        (tmp_path / name).chmod(0o755)
    text, _ = run(tmp_path, dataclasses.replace(machine, smi=False))
    node = parse(text.encode()).node
    assert (len(node.gpus), node.nvidia.smi_exit, node.cpus) == (8, 0, 64)  # each has waited for the two others


def test_a_driver_before_450_reports_all_but_the_mig_mode(tmp_path: Path) -> None:
    """Driver 418 is what CUDA 10.1 needs; its GPUs have users, too, and may fall off the bus."""
    machine = Machine([Card("07:00.0", used=60000, running=[Process(os.getpid(), 59000)])], cuda="10.1")
    refuses = 'case "$*" in *mig*) echo \'Field "mig.mode.current" is not a valid field to query.\'; exit 2 ;; esac'
    cut = 'cut -d, -f "1-$(($(printf %s "$1" | tr -cd , | wc -c) + 1))"'  # the requested fields
    (tmp_path / "new").mkdir()
    machine.install(tmp_path / "new")
    (tmp_path / "nvidia-smi").write_text(f'#!/bin/sh\n{refuses}\n{tmp_path}/new/nvidia-smi "$@" | {cut}\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    text, _ = run(tmp_path, dataclasses.replace(machine, smi=False))
    [gpu] = parse(text.encode()).node.gpus
    assert (gpu.used_mib, gpu.bus, gpu.compute_mode, gpu.mig) == (60000, "0000:07:00.0", "Default", False)
    assert [process.pid for process in gpu.processes] == [os.getpid()]


def test_the_script_lists_instances_only_in_mig_mode(tmp_path: Path) -> None:
    text, calls = run(tmp_path, Machine([Card("07:00.0", nvidia.MIG_UUIDS[0], mig="Enabled")]))
    assert len(calls) == 3
    assert "-L" in calls
    assert len(parse(text.encode()).node.gpus[0].instances) == 2


def test_the_script_aborts_a_hanging_call(tmp_path: Path) -> None:
    text, _ = run(tmp_path, Machine(cards(2), hangs=True), within="1")  # a call would take 1000 s
    node = parse(text.encode()).node
    assert "@@end" in text
    assert (node.gpus, node.nvidia.smi, node.nvidia.smi_exit, len(node.nvidia.pci)) == ((), True, None, 2)


def test_the_script_on_a_machine_without_any(tmp_path: Path) -> None:
    text, _ = run(tmp_path, Machine(smi=False))
    assert parse(text.encode()).node.nvidia.pci == ()
    assert "@@gpus" not in text


def test_a_gpu_without_memory_of_its_own_uses_the_machines(tmp_path: Path) -> None:
    spark = dataclasses.replace(nvidia.SPARK, running=[Process(4242, 67012)])
    text = f"@@memory\n{nvidia.SPARK_MEMORY}{Machine([spark], cuda='13.0').output()}"
    node = parse(text.encode()).node
    [gpu] = node.gpus
    assert (gpu.shared, gpu.memory_mib, gpu.used_mib, gpu.fault) == (True, 127600748 // 1024, 8822, "")
    assert (gpu.bus, gpu.capability, gpu.mig) == ("000f:01:00.0", "12.1", False)
    assert [process.memory_mib for process in gpu.processes] == [67012]
    assert node.memory == 127600748 * 1024


def test_a_gpu_whose_memory_is_unknown_because_of_a_fault_does_not_share_the_machines() -> None:
    [gpu], _ = parsed(Machine([dataclasses.replace(nvidia.SPARK, mib="[Unknown Error]")]))
    assert (gpu.shared, gpu.fault) == (False, "Unknown Error")


@pytest.mark.parametrize("refused", ["compute_cap", "compute_cap mig"])
def test_an_older_driver_is_asked_again_without_the_field_that_it_lacks(refused: str, tmp_path: Path) -> None:
    """github.com/huggingface/candle issue 733: driver 470 has no compute_cap."""
    machine = Machine(cards(1))
    patterns = "|".join(f"*{field}*" for field in refused.split())
    cut = 'cut -d, -f "1-$(($(printf %s "$1" | tr -cd , | wc -c) + 1))"'  # the requested fields
    (tmp_path / "new").mkdir()
    machine.install(tmp_path / "new")
    (tmp_path / "nvidia-smi").write_text(
        f"#!/bin/sh\ncase $1 in {patterns}) echo 'Field \"x\" is not a valid field to query.'; exit 2 ;; esac\n"
        f'{tmp_path}/new/nvidia-smi "$@" | {cut}\n'
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    text, _ = run(tmp_path, dataclasses.replace(machine, smi=False))
    [gpu] = parse(text.encode()).node.gpus
    assert (gpu.name, gpu.capability, gpu.memory_mib) == ("NVIDIA A100-SXM4-80GB", "", 81920)
