"""GPUs that cannot be used, and GPUs that others use, through the CLI: plain processes, and machines of the bed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests import nvidia
from tests.bed import faults
from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job
from tests.nvidia import Card, Machine, Process, cards

pytestmark = pytest.mark.timeout(200)

FALLEN = Machine([*cards(7), Card("3f:00.0", listed=False)])
ROWS = {
    "mismatch": (Machine(cards(2), nvidia.MISMATCH), "Driver/library version mismatch", "reload the modules"),
    "lost": (Machine(cards(2), nvidia.LOST), "GPU is lost", "dmesg"),
    "fallen off the bus": (FALLEN, "lists 7 of 8 GPUs: the GPU at 0000:3f:00.0", "reboot"),
    "needs a reset": (Machine([Card("07:00.0", temperature=nvidia.RESET)]), "GPU requires reset", "--gpu-reset -i 0"),
    "no driver": (
        Machine(cards(1, kernel="nouveau"), smi=False),
        "has no NVIDIA driver, but nouveau",
        "install NVIDIA's",
    ),
}


@pytest.fixture
def machine_cli(home_cli: Cli, tmp_path: Path) -> Cli:
    """A machine whose nvidia-smi is the stand-in that tmp_path/bin has."""
    (tmp_path / "bin").mkdir()
    return Cli(home_cli.cwd, {**home_cli.env, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})


def process_job(cli: Cli, **keys: object) -> Path:
    command = ["sh", "-c", "echo GPUs: $CUDA_VISIBLE_DEVICES."]
    return cli.job(**{"runtime": "process", "nodes": ["local"], "run": {"command": command}, **keys})


def test_a_driver_that_does_not_answer_is_no_machine_without_gpus(machine_cli: Cli, tmp_path: Path) -> None:
    Machine(cards(2), nvidia.MISMATCH).install(tmp_path / "bin")
    file = process_job(machine_cli)
    refused = machine_cli("up", file, code=3).stderr
    assert "node local: its GPUs cannot be used" in refused
    assert "Driver/library version mismatch NVML library version: 535.161" in refused
    assert "gpus: none" in refused
    report = json.loads(machine_cli("doctor", file, "--json", code=3).stdout)
    assert [check["name"] for check in report["checks"] if check["level"] == "fail"] == ["gpus"]
    assert "GPUs: ." in machine_cli("up", file, "--set", "gpus=none").stdout


def test_a_number_takes_idle_gpus_and_waits_for_them(machine_cli: Cli, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "300"]) as notebook:
        busy = Card("07:00.0", "GPU-a", used=61440, running=[Process(notebook.pid, 61440, "")])
        Machine([busy, Card("0f:00.0", "GPU-b")]).install(tmp_path / "bin")
        file = process_job(machine_cli)
        assert "GPUs: GPU-b." in machine_cli("up", file, "--set", "gpus=1").stdout
        taken = machine_cli("up", file)
        assert "GPUs: GPU-a,GPU-b." in taken.stdout
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        who = f"GPU 0: 60.0 GiB by {user}, python3 (pid {notebook.pid})"
        assert f"warning: local: {who}" in taken.stderr
        refused = machine_cli("up", file, "--set", "gpus=2", code=3).stderr
        assert f"2 GPUs are asked for, 1 of 2 are idle: {who}" in refused
        table = machine_cli("status", "--nodes", "local").stdout
        assert "60.0/80 GiB" in table
        assert f"pid {notebook.pid}" in table
        waits = machine_cli.start("up", file, "--set", "gpus=2", "--wait")
        assert waits.stderr is not None
        while "waiting: node local: 2 GPUs" not in (line := waits.stderr.readline()):
            assert line, "it did not wait"
        notebook.send_signal(signal.SIGTERM)
    Machine([Card("07:00.0", "GPU-a"), Card("0f:00.0", "GPU-b")]).install(tmp_path / "bin")
    assert "GPUs: GPU-a,GPU-b." in waits.communicate(timeout=120)[0]
    assert waits.returncode == 0


def refused(cli: Cli, bed: Bed, file: Path, machine: Machine) -> str:
    """What `up` says where the second of its nodes is this machine."""
    with faults.nvidia(bed, bed.nodes[1], machine):
        return cli("up", file, code=3).stderr


@pytest.mark.bed
def test_a_fault_is_refused_on_its_node_and_no_gpu_is_said(bed_cli: Cli, bed: Bed) -> None:
    one, two = bed.nodes[:2]
    file = bed_cli.job(**bed_job(run={"command": ["true"]}))
    said = refused(bed_cli, bed, file, ROWS["no driver"][0])
    assert f"node {two.alias}: its GPUs cannot be used: the GPU at 0000:07:00.0 has no NVIDIA driver" in said
    with faults.nvidia(bed, two, Machine(cards(2))):
        said = bed_cli("up", file, code=3).stderr
        assert f"node {one.alias}: it has no GPU, and other nodes of the job have" in said
        report = json.loads(bed_cli("doctor", two.alias, "--json", code=3).stdout)
    assert [gpu["bus"] for gpu in report["gpus"]] == ["0000:07:00.0", "0000:0f:00.0"]
    assert [check["name"] for check in report["checks"] if check["level"] == "fail"] == ["container toolkit"]
    assert "NO GPU: no node has one" in bed_cli("up", file).stderr
    bed_cli("down", "--all")
    assert bed.wait_clean() == []


@pytest.mark.bed
@pytest.mark.slow
@pytest.mark.parametrize("row", [*ROWS, "hangs"])
def test_each_fault_is_refused_with_its_words_and_the_fix(bed_cli: Cli, bed: Bed, row: str) -> None:
    hanging = (Machine(cards(2), hangs=True), "nvidia-smi did not answer within 20 s", "reboot it")
    machine, words, cure = ROWS.get(row, hanging)
    said = refused(bed_cli, bed, bed_cli.job(**bed_job(run={"command": ["true"]})), machine)
    assert f"node {bed.nodes[1].alias}: its GPUs cannot be used: " in said
    assert words in said
    assert cure in said
    assert bed.nodes[0].alias not in said
