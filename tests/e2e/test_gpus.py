"""Unusable GPUs, GPUs in use by others and errors of CUDA and NCCL, through the CLI: with plain processes, and each row
of tests/gpu_rows.py on the bed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import nvidia
from tests.bed import faults
from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job
from tests.gpu_rows import FAULTS, RECORDED, output
from tests.nvidia import Card, Machine, Process, cards

pytestmark = pytest.mark.timeout(300)

SLOW = pytest.mark.slow


@pytest.fixture
def machine_cli(home_cli: Cli, tmp_path: Path) -> Cli:
    """Return the launcher on a machine with the stand-in nvidia-smi of tmp_path/bin."""
    (tmp_path / "bin").mkdir()
    found_first = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SMI_CALLS": str(tmp_path / "calls")}
    return Cli(home_cli.cwd, {**home_cli.env, **found_first})


def process_job(cli: Cli, **keys: object) -> Path:
    command = ["sh", "-c", "echo GPUs: $CUDA_VISIBLE_DEVICES."]
    return cli.job(**{"runtime": "process", "nodes": ["local"], "run": {"command": command}, **keys})


def test_a_hanging_driver_is_not_reported_as_no_gpus(machine_cli: Cli, tmp_path: Path) -> None:
    Machine(cards(2), nvidia.MISMATCH).install(tmp_path / "bin")
    file = process_job(machine_cli)
    refused = machine_cli("up", file, code=3).stderr
    assert "node local: its GPUs cannot be used" in refused
    assert "Driver/library version mismatch NVML library version: 535.161" in refused
    assert "gpus: none" in refused
    report = json.loads(machine_cli("doctor", file, "--json", code=3).stdout)
    assert [check["name"] for check in report["checks"] if check["level"] == "fail"] == ["gpus"]
    assert "GPUs: ." in machine_cli("up", file, "--set", "gpus=none").stdout
    shown = machine_cli("status", "--nodes", "local", code=None).stderr
    assert 'warning: local: nvidia-smi reports "Failed to initialize NVML: Driver/library version mismatch' in shown


@pytest.mark.ci
def test_a_number_takes_idle_gpus_and_waits_for_them(machine_cli: Cli, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "300"]) as notebook:
        busy = Card("07:00.0", "GPU-a", used=61440, running=[Process(notebook.pid, 61440, "")])
        Machine([busy, Card("0f:00.0", "GPU-b")]).install(tmp_path / "bin")
        file = process_job(machine_cli)
        assert "GPUs: GPU-b." in machine_cli("up", file, "--set", "gpus=1").stdout
        assert len((tmp_path / "calls").read_text().splitlines()) == 2  # total calls of nvidia-smi
        taken = machine_cli("up", file)
        assert "GPUs: GPU-a,GPU-b." in taken.stdout
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        who = f"GPU 0: 60.0 GiB by {user}, python3 (pid {notebook.pid})"
        assert f"warning: local: {who}" in taken.stderr
        refused = machine_cli("up", file, "--set", "gpus=2", code=3).stderr
        assert f"2 GPUs requested, 1 of 2 are idle: {who}" in refused
        shown = machine_cli("plan", file, "--set", "gpus=2", "--json").stdout
        plan = json.loads(shown)
        assert plan["nodes"][0]["container"]["gpus"] == ["GPU-a", "GPU-b"]
        assert f"1 of 2 are idle: {who}" in plan["warnings"][0]
        assert "`up` fails now, `up --wait` waits" in plan["warnings"][0]
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


def test_a_run_on_another_node_of_this_machine_keeps_its_gpu(machine_cli: Cli, tmp_path: Path) -> None:
    Machine([Card("07:00.0", "GPU-a"), Card("0f:00.0", "GPU-b")]).install(tmp_path / "bin")
    sleeps = process_job(machine_cli, name="sleeps", gpus=1, run={"command": ["sleep", "300"]})
    machine_cli("up", "-d", sleeps)
    file = process_job(machine_cli, nodes=["local", "local"], gpus=1)
    assert "GPUs: GPU-b." in machine_cli("up", file).stdout


def test_plain_processes_compare_torchs_cuda_with_the_driver(machine_cli: Cli, tmp_path: Path) -> None:
    machine_cli.program("plain.py")
    file = process_job(machine_cli, run={"script": "plain.py"})
    Machine(cards(1), cuda="12.4").install(tmp_path / "bin")  # driver 550, and torch is for CUDA 13
    message = f"NVIDIA driver 550.54.14 (CUDA 12.4) is too old for the torch of {sys.executable} with CUDA 13."
    refused = machine_cli("up", file, code=3).stderr
    assert f"node local: {message}" in refused
    assert "needs 580.65.06 or newer" in refused
    assert "install a torch for an older CUDA" in refused
    report = json.loads(machine_cli("doctor", file, "--json", code=3).stdout)
    [image] = [check for check in report["checks"] if check["level"] == "fail"]
    assert message in image["what"]
    machine_cli("plan", process_job(machine_cli))  # its own program may not use torch


def test_a_gpu_for_which_torch_has_no_code_is_refused_if_the_job_uses_it(machine_cli: Cli, tmp_path: Path) -> None:
    machine_cli.program("plain.py")
    file = process_job(machine_cli, run={"script": "plain.py"})
    new = {"driver": "580.65.06"}
    old = Card("0f:00.0", "GPU-b", "Tesla V100-SXM2-32GB", capability="7.0", **new)
    Machine([Card("07:00.0", "GPU-a", "Tesla T4", capability="7.5", **new), old], cuda="13.4").install(tmp_path / "bin")
    refused, failed = on_both(machine_cli, file)
    message = "GPU 1, Tesla V100-SXM2-32GB (compute capability 7.0), is none of those for which the torch of"
    assert message in refused
    assert "has code: 7.5 and newer" in refused
    assert [message in check["what"] for check in failed] == [True]
    machine_cli("plan", process_job(machine_cli, gpus=[0], run={"script": "plain.py"}))


def on_both(cli: Cli, file: Path) -> tuple[str, list[dict[str, str]]]:
    """Return the message of `up` and the failed checks of doctor, if both refuse."""
    with ThreadPoolExecutor() as pool:
        refusal = pool.submit(cli, "up", file, code=3)
        report = pool.submit(cli, "doctor", file, "--json", code=3)
    checks = json.loads(report.result().stdout)["checks"]
    return refusal.result().stderr, [check for check in checks if check["level"] == "fail"]


@pytest.mark.bed
@pytest.mark.parametrize("row", [pytest.param(row, marks=[] if row == "nouveau alone" else SLOW) for row in FAULTS])
def test_a_fault_is_reported_for_its_node_with_the_error_and_the_fix(row: str, bed_cli: Cli, bed: Bed) -> None:
    (machine, message, expected), node = FAULTS[row], bed.nodes[1]
    file = bed_cli.job(**bed_job(run={"command": ["true"]}))
    with faults.nvidia(bed, node, machine):
        said, failed = on_both(bed_cli, file)
        bed_cli("plan", file, "--set", "gpus=none")
    what, fix = said.split("\n  -> ")
    assert f"node {node.alias}: " in what
    assert f"node {bed.nodes[0].alias}: " not in what
    assert message in what
    assert expected in fix
    [check] = [check for check in failed if check["node"] != "all"]  # "gpus differ": the other node has no GPU
    assert (check["node"], check["name"]) == (node.alias, "gpus")
    assert check["what"] in what


@pytest.mark.bed
def test_all_with_gpus_on_one_node_or_none(bed_cli: Cli, bed: Bed) -> None:
    one, two = bed.nodes[:2]
    file = bed_cli.job(**bed_job(run={"command": ["true"]}))
    with faults.nvidia(bed, two, Machine(cards(2))):
        said = bed_cli("up", file, code=3).stderr
        assert f"node {one.alias}: it has no GPU, but other nodes of the job do" in said
        report = json.loads(bed_cli("doctor", file, "--json", code=3).stdout)
        failed = [check for check in report["checks"] if check["level"] == "fail"]
        assert ("gpus differ", f"no GPU: {one.alias}") in [(check["name"], check["what"]) for check in failed]
        report = json.loads(bed_cli("doctor", two.alias, "--json", code=3).stdout)
    assert [gpu["bus"] for gpu in report["gpus"]] == ["0000:07:00.0", "0000:0f:00.0"]
    assert [check["name"] for check in report["checks"] if check["level"] == "fail"] == ["container toolkit"]
    assert "NO GPU: no node has a GPU" in bed_cli("up", file).stderr
    bed_cli("down", "--all")
    assert bed.wait_clean() == []


@pytest.mark.bed
@pytest.mark.parametrize(
    ("source", "message", "log", "cause", "fix"),
    [pytest.param(*row, id=row[0], marks=[] if "uncorrectable ECC" in row[1] else SLOW) for row in RECORDED],
)
def test_errors_of_cuda_and_nccl_are_explained(
    source: str, message: str, log: str, cause: str, fix: str, bed_cli: Cli, clean_bed: Bed
) -> None:
    (bed_cli.cwd / "said").write_text(output(message, log))
    command = '[ "$RANK" = 0 ] && exec sleep 60; cat said; exit 1'
    failed = bed_cli("up", bed_cli.job("says", **bed_job(run={"command": ["sh", "-c", command]}, gpus="none")), code=1)
    explained = failed.stderr[failed.stderr.index("node2 exited with code 1: ") :]
    assert cause in explained
    assert fix.replace("n0", "node2") in explained
