"""jobs/gallery/: frameworks train one model on two nodes, as their pages say; skipped without the framework."""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
from pathlib import Path

import pytest
import yaml

from tests.bed.bed import Bed
from tests.e2e.cli import ROOT, Cli, bed_job
from tests.e2e.test_examples import args, curve, epochs, last_loss
from tests.ports import free_port

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
HERE = "jobs/gallery"
OWN = r"^rank (?P<rank>\d+) of (?P<ranks>\d+): loss (?P<loss>\S+), weights (?P<weights>\w+)$"  # report.py
WAIT = "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT"
FACTORY = r"Process rank: (?P<rank>\d+), world size: (?P<ranks>\d+)"


@pytest.fixture
def gallery(home_cli: Cli) -> Cli:
    """A project that contains only the gallery."""
    shutil.copytree(ROOT / HERE, home_cli.cwd / HERE, ignore=shutil.ignore_patterns("__pycache__"))
    return home_cli


def needs(job: str, *packages: str) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed: see the head of {HERE}/{job}.yaml")


def up(cli: Cli, job: str, *options: str) -> Path:
    """Run the job to its end; return the folder of the run."""
    cli("up", f"{HERE}/{job}.yaml", "--set", f"port={free_port()}", *options, timeout=800)
    return cli.runs()[-1]


def said(run: Path, pattern: str, node: int) -> re.Match[str]:
    """Return what the only rank of a node printed."""
    log = (run / "logs" / f"rank-{node}.log").read_text()
    found = re.search(pattern, log, re.MULTILINE)
    assert found, f"{pattern} is not in the output of rank {node}:\n{log[-3000:]}"
    assert (int(found["rank"]), int(found["ranks"])) == (node, 2), "a model of its own on each node"
    return found


@pytest.mark.parametrize(
    ("job", "packages"),
    [
        ("trl", ["trl"]),
        ("transformers", ["transformers", "accelerate", "datasets"]),
        ("accelerate", ["accelerate", "transformers"]),
        ("lightning", ["pytorch_lightning"]),
        ("deepspeed", ["deepspeed", "transformers"]),
    ],
)
def test_both_nodes_train_one_model(gallery: Cli, job: str, packages: list[str]) -> None:
    needs(job, *packages)
    run = up(gallery, job)
    ranks = [said(run, OWN, node) for node in range(2)]
    assert all(math.isfinite(float(rank["loss"])) for rank in ranks)
    assert ranks[0]["weights"] == ranks[1]["weights"]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["loss"] < steps[0]["loss"] / 1.3


def test_llama_factory(gallery: Cli) -> None:
    """It prints no weights; each rank says of how many it is one, and rank 0 the loss."""
    needs("llamafactory", "llamafactory")
    run = up(gallery, "llamafactory")
    for node in range(2):
        said(run, FACTORY, node)
    losses = re.findall(r"'loss': '?([\d.]+)", (run / "logs" / "rank-0.log").read_text())
    assert float(losses[-1]) < float(losses[0]) / 1.3


def learns_and_resumes(cli: Cli, job: str, few: int, more: int) -> None:
    """Run unchanged, then resume from the checkpoint; check the output of the commands."""
    port = ("--set", f"port={free_port()}")
    first = cli("up", f"{HERE}/{job}.yaml", *port, *args(epochs=few), timeout=300)
    assert epochs(first) == list(range(1, few + 1)), first.stdout
    assert re.search(r"^2 processes", first.stdout, re.MULTILINE), "each rank trains a model of its own"
    progress = json.loads(cli("status", "--json").stdout)["progress"]
    assert (progress["epoch"], progress["epochs"]) == (few, few)
    assert 0 < progress["step"] <= progress["steps"]
    before = cli.runs()[-1]
    again = cli("up", f"{HERE}/{job}.yaml", *port, *args(epochs=more), "--resume", before.name, timeout=300)
    assert epochs(again) == list(range(few + 1, more + 1)), again.stdout
    after = cli.runs()[-1]
    assert min(curve(after / "tensorboard")) > max(curve(before / "tensorboard"))
    lines = [json.loads(line) for run in (before, after) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"] / 1.3
    cli("fetch", after.name, "--checkpoints")
    assert any(path.is_file() for path in (after / "checkpoints").rglob("*"))


@pytest.mark.parametrize(
    ("job", "package", "few", "more"), [("lightning", "pytorch_lightning", 3, 6), ("accelerate", "accelerate", 1, 3)]
)
def test_a_program_resumes(gallery: Cli, job: str, package: str, few: int, more: int) -> None:
    needs(job, package)
    learns_and_resumes(gallery, job, few, more)


def test_another_language_model_and_other_texts(gallery: Cli) -> None:
    needs("accelerate", "accelerate", "transformers")
    shutil.copytree(ROOT / "docs", gallery.cwd / "docs")
    options = ("--set", f"port={free_port()}", *args(data="docs", model="qwen2", epochs=1))
    done = gallery("up", f"{HERE}/accelerate.yaml", *options, timeout=400)
    assert last_loss(done) < 3.5, done.stdout  # 5.5 is the loss of a random guess


def on_machines(cli: Cli, job: str, **env: object) -> list[str]:
    """Return options with which the job runs in the bed's containers, on two separate machines."""
    shutil.copytree(ROOT / HERE, cli.cwd / HERE, ignore=shutil.ignore_patterns("__pycache__"))
    keys = bed_job()
    own = yaml.safe_load((ROOT / HERE / f"{job}.yaml").read_text())["env"]
    changed = {"env": {**own, **keys["env"], **env}, "image": keys["image"], "mounts": keys["mounts"]}
    sets = [word for key, value in changed.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    return ["--set", "runtime=docker", "--set", "gpus=none", "--nodes", ",".join(keys["nodes"]), *sets]


@pytest.mark.bed
def test_trl_in_containers(bed_cli: Cli, bed: Bed) -> None:
    needs("trl", "trl")
    run = up(bed_cli, "trl", *on_machines(bed_cli, "trl"))
    ranks = [said(run, OWN, node) for node in range(2)]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    bed_cli("down")


@pytest.mark.bed
def test_ray(bed_cli: Cli, bed: Bed) -> None:
    """The bed's image has no `ray` in its path, only the package."""
    needs("ray", "ray")
    options = on_machines(bed_cli, "ray", PATH="/workspace/code/bin:/usr/bin:/bin", **{WAIT: 60})
    command = bed_cli.cwd / "bin" / "ray"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\nexec python3 -m ray.scripts.scripts "$@"\n')
    command.chmod(0o755)
    cli = Cli(bed_cli.cwd, {**bed_cli.env, "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    done = cli("up", f"{HERE}/ray.yaml", *options, timeout=600)
    ranks = re.findall(r"^rank (\d) of 2 on (\S+): loss (\S+), weights (\w+)$", done.stdout, re.MULTILINE)
    assert [rank for rank, *_ in ranks] == ["0", "1"], done.stdout
    (first, loss, weights), (second, _, others) = ((node, *more) for _, node, *more in ranks)
    assert first != second
    assert float(loss) < 0.1
    assert weights == others
    cli("down")
