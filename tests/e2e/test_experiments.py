"""The experiments' bed jobs through the CLI, as a user runs them: tables, plots, pages; and a lost worker."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from tests.bed.bed import Bed
from tests.e2e.cli import ROOT, Cli, bed_job
from tests.e2e.drill import Drill

pytestmark = [pytest.mark.bed, pytest.mark.timeout(1200)]

# job, tested part of its sweep (None: no sweep), and the method and devices expected in the table
EXPERIMENTS: dict[str, tuple[list[int] | None, list[tuple[str, int]]]] = {
    "e0_dp_bed": ([0, 1], [("single", 1), ("dp", 2)]),
    "e0_ddp_bed": ([1], [("ddp", 2)]),
    "bed_2node": (None, [("ddp", 2)]),
    "e2_dual_batch_bed": ([2], [("dual_batch", 3)]),
    "e3_syncbn_bed": ([1], [("ddp", 2)]),
    "e4_model_bed": ([0, 1], [("model", 4), ("pipeline", 4)]),
    "e4_nobn_bed": ([0], [("ddp", 2)]),
}


@pytest.fixture
def project(bed_cli: Cli) -> Cli:
    """A copy of the code that the jobs use."""
    for name in ("train", "jobs", "bench"):
        shutil.copytree(ROOT / name, bed_cli.cwd / name, ignore=shutil.ignore_patterns("__pycache__"))
    return bed_cli


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_takes_one_command_and_yields_a_table(project: Cli, name: str) -> None:
    variants, expected = EXPERIMENTS[name]
    job = Path("jobs") / f"{name}.yaml"
    written = yaml.safe_load((project.cwd / job).read_text())
    sets = ["--set", "run.args.epochs=1"]
    if variants is not None:
        sets += ["--set", "sweep=" + json.dumps([written["sweep"][variant] for variant in variants])]
    project("up", job, *sets, timeout=1000)
    table = project("compare", written["name"], "--plot", "plot.png", "--html", "page.html", "--json")
    rows: list[dict[str, Any]] = json.loads(table.stdout)
    assert [(row["method"], row["devices"]) for row in rows] == expected
    assert all(row["accuracy"] is not None and row["images_per_s"] > 0 for row in rows)
    assert Image.open(io.BytesIO((project.cwd / "plot.png").read_bytes())).width >= 1600
    assert written["name"] in (project.cwd / "page.html").read_text()


@pytest.mark.slow
def test_the_table_of_channels_and_batches(project: Cli) -> None:
    done = project("up", "jobs/e3_grid_bed.yaml", "--set", "run.args={channels: [128, 256], batches: [32], repeats: 3}")
    rows = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit() and "processes" not in line]
    assert [row[:2] for row in rows] == [["128", "32"], ["256", "32"]]
    assert all(float(cell) > 0 for row in rows for cell in row[2:5])


def test_a_dual_batch_worker_killed_on_its_node_is_reported_and_the_run_succeeds(project: Cli, bed: Bed) -> None:
    """A server and a worker on node1, two workers on node2: rank 2 is killed, rank 3 on the same node continues."""
    args = {"data": "jobs/data/digits.tar", "arch": "smallcnn", "image_size": 16, "val_resize": 16, "augment": "none"}
    args |= {"flip": 0, "epochs": 8, "batch_size": 64, "lr": 0.1, "lr_scaling": "none", "schedule": "multistep"}
    args |= {"warmup": 0, "parallel": "dual_batch"}
    job = project.job("lose", **bed_job(processes=2, run={"module": "train", "args": args}))
    drill = Drill.follow(project, "up", job)
    drill.sees(r"Epoch: \[")
    found = bed.sh(
        bed.nodes[1],
        "for p in /proc/[0-9]*; do tr '\\0' '\\n' < $p/environ 2>/dev/null | "
        "grep -c -e '^RANK=2$' -e '^TRAIN_GUARDED_BY=' | grep -qx 2 && echo ${p#/proc/}; done; true",
    )
    pids = found.split()
    assert len(pids) == 1, found
    bed.sh(bed.nodes[1], f"kill -KILL {pids[0]}")
    drill.sees(r"rank 2 is lost \(killed by SIGKILL on")
    drill.end(0)
    assert project.result()["state"] == "done"
    lines = [json.loads(line) for line in (project.runs()[-1] / "metrics.jsonl").read_text().splitlines()]
    end = next(line for line in lines if line["kind"] == "end")
    assert (end["granted"], end["finished"]) == (24, 24)
    assert [lost["rank"] for lost in end["lost"]] == [2]
