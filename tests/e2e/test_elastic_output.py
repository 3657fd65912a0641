"""Output when the node with rank 0 is lost: one stream, one curve, and the output of each command."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.bed import faults
from tests.e2e.cli import ROOT, bed_job
from tests.e2e.drill import Drill, output_folder
from tests.e2e.scene import Scene

pytestmark = [pytest.mark.bed, pytest.mark.timeout(600)]

EPOCHS = 4
SIZES = {"image_size": 8, "val_resize": 8, "batch_size": 16, "workers": 1}
TRAIN = {"data": "digits.tar", "arch": "smallcnn", "epochs": EPOCHS, "log_every": 1, "checkpoint_every": 20, **SIZES}
TRAINER = "^[^ ]*python3 -m train "
MOVED = r"rank 0 is now on node2, world 2 of 3: node1 lost at \d\d:\d\d UTC"


@pytest.mark.parametrize("scene", [3], indirect=True)
def test_rank_0_moves_and_its_output_with_it(scene: Scene) -> None:
    """The container and the curves of the first node were removed, and the node is unreachable."""
    cli, bed, lost = scene.cli, scene.bed, scene.nodes[0]
    shutil.copy(ROOT / "jobs/data/digits.tar", cli.cwd)
    shutil.copytree(ROOT / "train", cli.cwd / "train", ignore=shutil.ignore_patterns("__pycache__"))
    keys = {"nodes": [node.alias for node in scene.nodes], "min_nodes": 2, "lost_after": "10s"}
    up = Drill.follow(cli, "up", cli.job("curves", **bed_job(run={"module": "train", "args": TRAIN}, **keys)))
    up.sees(r"^Epoch: \[2\]\[5/")
    bed.sh(lost, f"docker kill $(docker ps -q) && rm -r {output_folder(cli)}/generations")
    with faults.without_sshd(bed, lost):
        up.sees(MOVED)
        up.sees(r"^train: resumed ")
        bed.sh(scene.nodes[1], f"pkill -STOP -f '{TRAINER}'")  # it does not end while the commands look at it
        seen = json.loads(cli("status", "--json", code=3).stdout)
        assert seen["state"] == "running"
        assert seen["world"]["members"] == ["node2", "node3"]
        rows = {node["node"]: node for node in seen["nodes"]}
        assert [rows[f"node{n}"]["state"] for n in (1, 2, 3)] == ["unreachable", "running", "running"]
        assert (rows["node2"]["ranks"], rows["node3"]["ranks"]) == ([0, 0], [1, 1])
        assert re.search(MOVED, cli("status", code=3).stdout)
        bed.sh(scene.nodes[1], f"pkill -CONT -f '{TRAINER}'")
        up.end(0)
        assert sum("node1: no connection since" in line for _, line in up.messages) <= 1, str(up)
        assert any("done" in line and "without node1" in line for _, line in up.messages), str(up)
        shown = [line for _, line in up.lines]
        assert sum(re.search(MOVED, line) is not None for line in shown) == 1
        assert cli("logs", "--no-follow").stdout.splitlines() == shown
        assert "node1" in cli("down", code=6).stderr
    listed = {row["node"]: row["containers"] for row in json.loads(cli("clean", "--json").stdout)}
    assert any(cli.runs()[-1].name in name for name in listed["node1"]), listed
    cli("down")
    assert scene.clean() == 0
    is_one_curve(scene)


def is_one_curve(scene: Scene) -> None:
    """Every step and every epoch occurs once in metrics.jsonl and in TensorBoard."""
    run = scene.cli.runs()[-1]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert [line["world"] for line in lines if line["kind"] == "start"] == [3, 2]
    assert steps == list(range(1, lines[-1]["steps"] + 1))
    assert [line["epoch"] for line in lines if line["kind"] == "epoch"] == list(range(1, EPOCHS + 1))
    board = EventAccumulator(str(run / "tensorboard"), {"scalars": 0}).Reload()
    assert [point.step for point in board.Scalars("Loss/train")] == steps
    assert len({point.step for point in board.Scalars("Loss/val")}) == len(board.Scalars("Loss/val")) == EPOCHS
    assert run.name in scene.cli("compare", run.name, "--json").stdout
