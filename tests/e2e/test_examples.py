"""jobs/examples/: programs run unchanged and resume from checkpoints; status and TensorBoard show progress."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.bed.bed import Bed
from tests.e2e.cli import ROOT, Cli, bed_job
from tests.e2e.drill import Drill
from tests.e2e.test_elastic import kill_node
from tests.ports import free_port

pytestmark = pytest.mark.timeout(600)
HERE = "jobs/examples"
LOCAL = ("--set", "runtime=process", "--nodes", "local,local", "--set", "env={OMP_NUM_THREADS: 1}")


@pytest.fixture
def project(home_cli: Cli) -> Cli:
    """A project that contains only the examples."""
    shutil.copytree(ROOT / HERE, home_cli.cwd / HERE, ignore=shutil.ignore_patterns("__pycache__"))
    return home_cli


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Images of handwritten digits, in one folder per class."""
    with tarfile.open(ROOT / "jobs/data/digits.tar") as archive:
        archive.extractall(tmp_path / "digits", filter="data")
    return tmp_path / "digits" / "train"


def local() -> list[str]:
    """Options with which an example runs on this machine."""
    return [*LOCAL, "--set", f"port={free_port()}"]


def args(**values: object) -> list[str]:
    """Return arguments that override those of the job file."""
    return [word for name, value in values.items() for word in ("--set", f"run.args.{name}={value}")]


def epochs(done: subprocess.CompletedProcess[str]) -> list[int]:
    """Return the epochs that the program reports."""
    return [int(number) for number in re.findall(r"^epoch (\d+)/", done.stdout, re.MULTILINE)]


def last_loss(done: subprocess.CompletedProcess[str]) -> float:
    return float(re.findall(r"^epoch .* loss ([\d.]+)", done.stdout, re.MULTILINE)[-1])


def curve(folder: Path, tag: str = "loss") -> list[int]:
    """Return the steps of a curve in a run's TensorBoard files."""
    files = {path.parent for path in folder.rglob("*.tfevents.*")}
    boards = [EventAccumulator(str(each), {"scalars": 0}).Reload() for each in files]
    return sorted(point.step for board in boards if tag in board.Tags()["scalars"] for point in board.Scalars(tag))


@pytest.mark.ci
def test_a_torchrun_script_runs_unchanged_and_resumes(project: Cli, tmp_path: Path) -> None:
    out = tmp_path / "stripes"
    first = project("up", f"{HERE}/torchrun.yaml", *local(), "--nodes", "local", *args(dir=out, epochs=1))
    assert epochs(first) == [1]
    again = project("up", f"{HERE}/torchrun.yaml", *local(), *args(dir=out, epochs=2))
    assert epochs(again) == [2]
    assert last_loss(again) < last_loss(first)
    assert curve(out) == [1, 2]
    assert project.result()["state"] == "done"


def survives(cli: Cli, options: list[str], world: int, lost: str = "local-1") -> None:
    """The min_nodes example finishes without the lost node and has one curve."""
    sets = ["--set", "lost_after=5s", "--set", f"port={free_port()}", *args(steps=120, pause=0.1), *options]
    up = Drill.follow(cli, "up", f"{HERE}/min_nodes.yaml", *sets)
    up.sees("^step 20: ")
    kill_node(cli, lost)
    up.sees(f"^generation 2 begins after step [1-9]0 with {world} ranks")
    seen = json.loads(cli("status", "--json").stdout)
    assert lost not in seen["world"]["members"]
    assert seen["progress"]["steps"] == 120
    up.end(0)
    assert any(f"without {lost}" in line for _, line in up.messages), str(up)
    steps = [int(line.split()[1][:-1]) for _, line in up.lines if line.startswith("step ")]
    assert steps[-1] == 120
    run = cli.runs()[-1]
    wanted = list(range(10, 121, 10))
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == wanted
    assert curve(run / "tensorboard") == wanted
    cli("down", code=None)


@pytest.mark.ci
def test_a_spare_replaces_a_lost_node(project: Cli) -> None:
    survives(project, ["--set", "nodes=[local, local]", "--set", "spares=[local]"], world=2)


@pytest.mark.slow
def test_two_of_three_nodes_continue(project: Cli) -> None:
    survives(project, [], world=2)


@pytest.mark.slow
def test_the_global_batch_size_is_kept_when_a_rank_is_lost(tmp_path: Path) -> None:
    """Generation 1 with two ranks and generation 2 with one give the same weights as one rank alone."""

    def train(folder: Path, generation: int, ranks: int, steps: int) -> dict[str, Any]:
        import torch

        own = folder / f"generations/{generation}"
        own.mkdir(parents=True)
        variables = {"RUN": "run", "NODE": "gpu-a", "GENERATION": str(generation), "GENERATION_OUTPUT": str(own)}
        env = {f"LAUNCHER_{name}": value for name, value in variables.items()} | {"LAUNCHER_OUTPUT": str(folder)}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        program = [str(ROOT / HERE / "elastic.py"), "--steps", str(steps)]
        subprocess.run([*torchrun, *program], env={**os.environ, **env, "OMP_NUM_THREADS": "1"}, check=True)
        found: dict[str, Any] = torch.load(folder / "checkpoints/gpu-a.pt")
        return found

    train(tmp_path / "lost", 1, ranks=2, steps=50)
    lost = train(tmp_path / "lost", 2, ranks=1, steps=100)
    whole = train(tmp_path / "whole", 1, ranks=1, steps=100)
    assert (lost["step"], lost["generation"]) == (100, 2)
    for name, weights in whole["model"].items():
        assert (lost["model"][name] - weights).abs().max() < 1e-4, name


@pytest.mark.slow
def test_another_model_and_other_images(project: Cli, tmp_path: Path, digits: Path) -> None:
    changed = args(dir=tmp_path / "out", data=digits, model="resnet18", epochs=2)
    done = project("up", f"{HERE}/torchrun.yaml", *local(), *changed, timeout=400)
    assert epochs(done) == [1, 2]
    accuracy = float(re.findall(r"accuracy ([\d.]+)%", done.stdout)[-1])
    assert accuracy > 80, done.stdout


@pytest.mark.slow
@pytest.mark.bed
def test_a_torchrun_script_resumes_in_containers(bed_cli: Cli, bed: Bed) -> None:
    """On two separate machines, of which only the first has the checkpoint."""
    shutil.copytree(ROOT / HERE, bed_cli.cwd / HERE, ignore=shutil.ignore_patterns("__pycache__"))
    keys = bed_job()
    sets = ["--nodes", ",".join(keys.pop("nodes")), "--set", "gpus=none"]
    sets += [word for key, value in keys.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    job = f"{HERE}/torchrun.yaml"
    assert epochs(bed_cli("up", job, *sets, *args(epochs=1), timeout=300)) == [1]
    first = bed_cli.runs()[-1]
    assert curve(first / "tensorboard") == [1]
    bed_cli("down")
    again = bed_cli("up", job, *sets, *args(epochs=3), "--resume", first.name, timeout=300)
    assert epochs(again) == [2, 3]
    assert curve(bed_cli.runs()[-1] / "tensorboard") == [2, 3]
    bed_cli("down")


def mpirun(tmp_path: Path, program: str) -> list[subprocess.CompletedProcess[str]]:
    """Run jobs/examples/mpirun.py as both nodes of a job; `program` is the mpirun in PATH of the first."""
    tool = tmp_path / "mpirun"
    tool.write_text(f"#!/bin/sh\n{program}\n")
    tool.chmod(0o755)
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    argv = [sys.executable, str(ROOT / HERE / "mpirun.py"), "all_reduce_perf", "-b", "8"]
    nodes = [
        subprocess.Popen(
            argv, env=env | {"RANK": str(rank)}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
        )
        for rank in range(2)
    ]
    return [
        subprocess.CompletedProcess(argv, node.returncode, *ended)
        for node, ended in [(node, node.communicate(timeout=120)) for node in nodes]
    ]


@pytest.mark.ci
def test_mpiruns_daemon_runs_on_the_other_node(tmp_path: Path) -> None:
    """The stand-in starts a daemon as Open MPI does: its agent, the host, the command in several words."""
    agent = "$OMPI_MCA_plm_rsh_agent 127.0.0.1 exec sh -c \"'echo daemon \\$RANK; exit 3'\""
    first, second = mpirun(tmp_path, f'echo "$@"\n{agent}\nexit $?')
    assert "-np 2 --host 127.0.0.1:1,127.0.0.1:1 all_reduce_perf -b 8\n" in first.stdout, first.stderr
    assert second.stdout == "daemon 1\n"
    assert (first.returncode, second.returncode) == (3, 3)


@pytest.mark.ci
def test_without_a_daemon_all_nodes_end_as_mpirun_does(tmp_path: Path) -> None:
    first, second = mpirun(tmp_path, "exit 5")
    assert (first.returncode, second.returncode) == (5, 5), first.stderr + second.stderr
