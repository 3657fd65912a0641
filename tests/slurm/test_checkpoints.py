"""A checkpoint is saved after `down`, after a second Ctrl-C and before Slurm's time limit, ten times out of ten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.cli import Cli
from tests.slurm.bed import SlurmBed
from tests.slurm.conftest import user
from tests.slurm.test_on_slurm import (
    SAVES,
    folder,
    job,
    saved,
    stop_by_two_ctrl_c,
    text_of,
    until,
    until_both_are_ready,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
TIMES = 10
BOTH = ["saved-0", "saved-1"]


def test_down(slurm: SlurmBed, cli: Cli) -> None:
    found = []
    for _ in range(TIMES):
        cli("up", job(cli, SAVES), "--on", "hpc", "-d")
        until_both_are_ready(slurm, cli)
        cli("down")
        found.append(saved(slurm, cli))
    assert found == [BOTH] * TIMES


def test_a_second_ctrl_c(slurm: SlurmBed, tmp_path: Path) -> None:
    found = []
    for number in range(TIMES):
        cli = user(slurm, tmp_path / str(number))  # so that its latest run is this one
        stop_by_two_ctrl_c(slurm, cli)
        found.append(saved(slurm, cli))
    assert found == [BOTH] * TIMES


@pytest.mark.parametrize(("limit", "least"), [("1m", 10), ("2m", 30)])
def test_the_time_limit(limit: str, least: int, slurm: SlurmBed, cli: Cli) -> None:
    """Also checks that a job can use part of its time first. least: seconds."""
    script = f"date +%s >$LAUNCHER_OUTPUT/began-$RANK\n{SAVES}".replace("echo saved", "date +%s")
    keys = {"run": {"command": ["sh", "-c", script]}, "cluster": {"time": limit}, "sweep": [[n] for n in "abcdefghij"]}
    part = {"cpus": 1, "memory": "500m"}  # of a node, so that four of them run at the same time
    file = cli.job(runtime="process", nodes=2, gpus="none", resources=part, **keys)
    cli("up", file, "--on", "hpc", "-d")
    outputs = [folder(slurm, cli).with_name(run.name) for run in cli.runs()]
    assert len(outputs) == TIMES
    until(lambda: all((output / "state" / "slurm.end").exists() for output in outputs), "they do not finish", 1200)
    until(lambda: not slurm.jobs(), "they stay in the queue")
    assert [sorted(file.name for file in output.glob("saved-*")) for output in outputs] == [BOTH] * TIMES
    assert min(int(text_of(output / "saved-1")) - int(text_of(output / "began-1")) for output in outputs) >= least
    states = [json.loads(cli("status", run.name, "--json").stdout)["state"] for run in cli.runs()]
    assert states == ["failed"] * TIMES
    assert "TIMEOUT" in text_of(Path(outputs[0], "state", "slurm.end"))
    cli("down", "--all")
