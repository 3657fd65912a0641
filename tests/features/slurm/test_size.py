"""A job of many nodes through the CLI, on a cluster with stand-ins for Slurm's programs."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path

import pytest

from tests.e2e.cli import Cli
from tests.features.slurm.test_engine import program

MOST = 5  # seconds of a command's processor time


@pytest.fixture
def cluster(tmp_path: Path) -> Cli:
    """Its queue has one job, which runs until it is cancelled. Every query adds a line to `asked`."""
    here, programs = tmp_path, tmp_path / "bin"
    program(programs, "sinfo", "echo slurm 22.05.8")
    comment = 'for a; do case $a in --comment=*) echo "${a#--comment=}" >%s/comment;; esac; done'
    submit = f'echo "$*" >{here}/submitted; echo RUNNING >{here}/state; echo 12'
    program(programs, "sbatch", f"{comment % here}; {submit}")
    job = f'[ ! -e {here}/state ] || echo "12|$(cat {here}/state)|None|(null)|$(cat {here}/comment)"'
    steps = "case $* in *--steps*) echo 12.0; exit;; *root) exit;; esac"
    program(programs, "squeue", f"{steps}; echo . >>{here}/asked; {job}")
    program(programs, "scancel", f'echo "$*" >>{here}/cancelled; echo CANCELLED >{here}/state')
    program(programs, "scontrol", "echo 'KillWait = 30 sec'")
    program(programs, "sacct", "exit 1")
    settings = here / "config" / "launcher" / "settings.yaml"
    settings.parent.mkdir(parents=True)
    hpc = {"kind": "slurm", "login": "local", "workdir": str(here / "shared"), "gpus": 0, "at_once": 2}
    settings.write_text(json.dumps({"clusters": {"hpc": hpc}}))
    settings.chmod(0o600)
    (here / "shared").mkdir()
    (here / "project").mkdir()
    env = {"XDG_CONFIG_HOME": str(here / "config"), "XDG_CACHE_HOME": str(here / "cache"), "COLUMNS": "200"}
    return Cli(here / "project", {**env, "PATH": f"{programs}:{os.environ['PATH']}"})


def used() -> float:
    """Return the processor time of all commands so far, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("nodes", [40, pytest.param(10_000, marks=pytest.mark.slow)])
def test_the_number_of_queries_does_not_depend_on_the_number_of_nodes(nodes: int, cluster: Cli, tmp_path: Path) -> None:
    """Also, no memory and no GPUs are shown, as those of the login machine do not matter."""

    def run(most: int, *args: object) -> str:
        """most: queries of the queue."""
        (tmp_path / "asked").write_text("")
        before = used()
        said = cluster(*args).stdout
        assert (tmp_path / "asked").read_text().count(".") <= most, args
        assert used() - before < MOST, args
        return said

    file = cluster.job(runtime="process", nodes=nodes, gpus="none", run={"command": ["true"]})
    assert f"--nodes={nodes}" in run(0, "export", file, "--to", "slurm", "--on", "hpc")
    assert run(0, "plan", file, "--on", "hpc") == run(0, "export", file, "--to", "slurm", "--on", "hpc")
    run(4, "up", file, "-d", "--on", "hpc")
    output = next((tmp_path / "shared" / ".launcher").iterdir())
    (output / "state" / "node-1.attempts").write_text("start 1700000000\n")
    (output / "logs" / "node-1.log").write_text("first\n==> not a head <==\nlast of node-1\n")
    (output / "metrics.jsonl").write_text('{"kind": "step", "epoch": 1, "step": 3, "time": 1}\n')
    found = json.loads(run(2, "status", "--json"))
    assert len(found["nodes"]) == nodes
    assert {node["use"] for node in found["nodes"]} == {None}
    assert found["nodes"][1]["last"] == "last of node-1"
    assert found["nodes"][0]["waits"] == "job 12: RUNNING"
    assert found["progress"]["step"] == 3
    shown = run(2, "status").splitlines()
    assert len(shown) < 250
    assert "last of node-1" in "".join(shown[:10])
    assert nodes < 250 or "9800 running; to show all: launcher status --json" in shown[-1]
    logs = {f"node-{rank}.log": f"hello of {rank} without an end".encode() for rank in range(nodes)}
    for name, text in logs.items():
        (output / "logs" / name).write_bytes(text)
    run(8, "down")
    here = cluster.runs()[-1] / "logs"
    assert {name: (here / name).read_bytes() for name in logs} == logs
    assert "--batch --signal=TERM 12" in (tmp_path / "cancelled").read_text()


def test_a_run_that_left_no_record_of_its_end_is_neither_done_nor_failed(cluster: Cli, tmp_path: Path) -> None:
    """Slurm has forgotten its job."""
    cluster("up", cluster.job(runtime="process", nodes=2, gpus="none", run={"command": ["true"]}), "-d", "--on", "hpc")
    output = next((tmp_path / "shared" / ".launcher").iterdir())
    (output / "state" / "node-0.attempts").write_text("start 1700000000\nexit 0 1700000009\n")
    (tmp_path / "state").unlink()
    found = json.loads(cluster("status", "--json").stdout)
    assert found["state"] == "lost"
    assert [node["exit_code"] for node in found["nodes"]] == [0, None]


def test_down_does_not_confirm_a_run_whose_folder_was_removed_while_its_job_runs(cluster: Cli, tmp_path: Path) -> None:
    cluster("up", cluster.job(runtime="process", nodes=1, gpus="none", run={"command": ["true"]}), "-d", "--on", "hpc")
    shutil.rmtree(next((tmp_path / "shared" / ".launcher").iterdir()))
    done = cluster("down", code=None)
    assert done.returncode
    assert "end it: scancel 12" in done.stderr


def test_a_job_whose_id_cannot_be_stored_is_cancelled(cluster: Cli, tmp_path: Path) -> None:
    """The folder is on a full disk, which a folder in place of the file stands for."""
    submit = (tmp_path / "bin" / "sbatch").read_text()
    taken = f"for own in {tmp_path}/shared/.launcher/*/.node; do mkdir $own/submitted.part; done"
    (tmp_path / "bin" / "sbatch").write_text(f"{submit}{taken}\n")
    file = cluster.job(runtime="process", nodes=1, gpus="none", run={"command": ["true"]})
    assert "could not store the job's ID, and cancelled the job" in cluster("up", file, "--on", "hpc", code=3).stderr
    assert (tmp_path / "cancelled").read_text() == "12\n"


def test_a_sweep_runs_no_more_variants_concurrently_than_the_settings_allow(cluster: Cli, tmp_path: Path) -> None:
    run = {"command": ["echo"]}
    file = cluster.job(runtime="process", nodes=1, gpus="none", run=run, sweep=[["1"], ["2"], ["3"]])
    cluster("up", file, "-d", "--on", "hpc")
    assert "--array=0-2%2 " in (tmp_path / "submitted").read_text()


def test_an_export_for_no_cluster_says_so_and_names_those_of_the_settings(cluster: Cli) -> None:
    file = cluster.job(runtime="process", nodes=2, gpus="none", run={"command": ["true"]})
    done = cluster("export", file, "--to", "slurm")
    assert "the script is for no particular cluster" in done.stderr
    assert "--on hpc" in done.stderr
    assert "cluster" not in cluster("export", file, "--to", "slurm", "--on", "hpc").stderr
    without = Cli(cluster.cwd, {**cluster.env, "XDG_CONFIG_HOME": str(cluster.cwd)})
    assert "docs/slurm.md" in without("export", file, "--to", "slurm").stderr


def test_the_list_of_runs_in_a_pipe_has_whole_ids(cluster: Cli) -> None:
    """Each on one line, with all its nodes."""
    name = "a-name-of-a-job-that-is-as-long-as-a-name-may-be-0123456789"
    file = cluster.job(name, runtime="process", nodes=9, gpus="none", run={"command": ["true"]})
    cluster("up", file, "-d", "--on", "hpc")
    narrow = Cli(cluster.cwd, {**cluster.env, "COLUMNS": "80"})
    (run,) = cluster.runs()
    for arguments in ((), ("--on", "hpc")):
        _, row = narrow("runs", *arguments).stdout.splitlines()
        assert row.split()[0] == run.name
        assert ", ".join(f"node-{rank}" for rank in range(9)) in row
    cluster("down")
