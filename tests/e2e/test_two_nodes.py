"""The main job through the CLI on the bed: real ssh, real containers, real torch, two machines."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import ROOT, Cli, bed_job

pytestmark = [pytest.mark.bed, pytest.mark.timeout(600)]


def digits(project: Path, train: int, val: int) -> None:
    """A small data set as a folder of JPEGs in the project, and the trainer's code next to it."""
    shutil.copytree(ROOT / "train", project / "train", ignore=shutil.ignore_patterns("__pycache__"))
    counts = {"train": train, "val": val}
    with tarfile.open(ROOT / "jobs/data/digits.tar") as tar:
        by_part: dict[str, list[tarfile.TarInfo]] = {"train": [], "val": []}
        for member in sorted(tar, key=lambda m: (Path(m.name).name, m.name)):
            part = next((p for p in by_part if f"{p}/" in member.name), None)
            if member.isreg() and part:
                by_part[part].append(member)
        with tarfile.open(project / "small.tar", "w") as small:
            for part, members in by_part.items():
                assert len(members) >= counts[part]
                for member in members[: counts[part]]:
                    content = tar.extractfile(member)
                    assert content is not None
                    small.addfile(member, io.BytesIO(content.read()))


def train_job(**args: Any) -> dict[str, Any]:
    base = {
        "data": "small.tar",
        "arch": "smallcnn",
        "epochs": 2,
        "image_size": 32,
        "augment": "none",
        "flip": 0,
        "dtype": "float64",
        "lr_scaling": "none",
        "lr": 0.05,
        "log_every": 1,
        "print_digest": True,
        "threads": 1,
    }
    return bed_job(run={"module": "train", "args": {**base, **args}})


def checkpoint(run: Path) -> dict[str, Any]:
    """Return the parameters of the run's last checkpoint."""
    import torch  # takes seconds, and only this test needs it

    files = sorted((run / "checkpoints").rglob("*.pt"))
    last = next((f for f in files if "last" in f.name), files[-1])
    state = torch.load(last, map_location="cpu", weights_only=True)
    model: dict[str, Any] = state["model"]
    return model


def test_two_ranks_are_bitwise_equal_and_all_that_they_write_is_collected(bed_cli: Cli, bed: Bed) -> None:
    digits(bed_cli.cwd, train=90, val=101)
    two = bed_cli("up", bed_cli.job("two", **train_job(batch_size=8)))
    run_two = bed_cli.runs()[-1]
    digests = set()
    for rank in (0, 1):
        text = (run_two / "logs" / f"rank-{rank}.log").read_text()
        found = re.findall(r"\b[0-9a-f]{64}\b", text)
        assert found, f"rank {rank} printed no digest:\n{text}"
        digests.add(found[-1])
    assert len(digests) == 1, "the two ranks have different weights"
    assert "Epoch: [2]" in two.stdout

    epochs = [json.loads(line) for line in (run_two / "metrics.jsonl").read_text().splitlines()]
    assert [line["val"]["images"] for line in epochs if line["kind"] == "epoch"] == [101, 101]  # every image once

    files = {path.name for path in run_two.iterdir()}
    assert {"job.yaml", "plan.json", "code.tar.gz", "events.jsonl", "metrics.jsonl", "result.json"} <= files
    assert list((run_two / "tensorboard").rglob("*.tfevents.*"))
    assert (run_two / "logs" / "node1.log").stat().st_size > 0
    assert (run_two / "logs" / "node2.log").exists()
    assert bed_cli.result()["state"] == "done"
    assert bed_cli.result()["last"]["val"]["images"] == 101
    # files on the nodes belong to the ssh user, not to root
    owners = bed.sh(bed.nodes[0], "find /home/trainer/.launcher -printf '%u\\n' | sort -u").split()
    assert owners == ["trainer"]

    bed_cli("fetch", "two", "--checkpoints")
    assert any("last" in file.name for file in (run_two / "checkpoints").rglob("*.pt"))


@pytest.mark.slow  # train/test_ddp.py has it on one machine
def test_two_ranks_equal_one_rank(bed_cli: Cli) -> None:
    digits(bed_cli.cwd, train=90, val=101)
    bed_cli("up", bed_cli.job("two", **train_job(batch_size=8)))
    bed_cli("fetch", "two", "--checkpoints")
    bed_cli("up", bed_cli.job("one", **train_job(batch_size=16)), "--nodes", "node1")
    bed_cli("fetch", "one", "--checkpoints")
    both, one = (checkpoint(run) for run in bed_cli.runs())
    assert one.keys() == both.keys()
    for name, value in one.items():
        assert (value - both[name]).abs().max() <= 1e-10, f"{name} differs by {(value - both[name]).abs().max()}"


def test_a_script_unaware_of_the_launcher_runs_unchanged(bed_cli: Cli) -> None:
    script = bed_cli.program("plain.py")
    done = bed_cli("up", bed_cli.job("plain", **bed_job(run={"script": script})))
    assert "rank 0 of 2: sum 3, cwd /workspace/code, uid 1001" in done.stdout
    logs = bed_cli("logs", "plain", "--rank", "1", "--no-follow").stdout
    assert "rank 1 of 2: sum 3" in logs
    everyone = bed_cli("logs", "--all", "--no-follow").stdout
    assert "node1 | rank 0 of 2" in everyone
    assert "node2 | rank 1 of 2" in everyone


def test_any_command_runs_once_per_node_with_the_rendezvous_in_its_environment(bed_cli: Cli) -> None:
    bed_cli.program("adds.py")
    script = "echo rank $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT in $PWD; exec python3 adds.py"
    done = bed_cli("up", bed_cli.job("command", **bed_job(run={"command": ["sh", "-c", script]})))
    assert re.search(r"rank 0 of 2 at 198\.1[89]\.\d+\.\d+:29500 in /workspace/code", done.stdout)
    assert "rank 0 of 2: sum 3" in done.stdout


def test_the_rank_that_raised_is_shown_first_and_the_other_is_not_blamed(bed_cli: Cli, bed: Bed) -> None:
    script = bed_cli.program("raises.py")
    failed = bed_cli("up", bed_cli.job("raises", **bed_job(run={"script": script})), code=1)
    message = failed.stderr[failed.stderr.index("Traceback") :]
    assert message.index("KeyError: 'dog'") < message.index("failed")
    assert "rank 1 on node2" in message
    assert "Connection" not in message.split("failed")[0]
    result = bed_cli.result()
    assert (result["state"], result["exit_code"]) == ("failed", 1)
    assert (result["failure"]["node"], result["failure"]["rank"]) == ("node2", 1)
    assert [node["victim"] for node in result["nodes"]] == [True, False]
    assert bed.wait_clean() == []


def test_nothing_is_left_after_down(bed_cli: Cli, bed: Bed) -> None:
    bed_cli.program("ticks.py")
    bed_cli("up", "-d", bed_cli.job("ticks", **bed_job(run={"command": ["python3", "ticks.py", "600"]})))
    running = json.loads(bed_cli("status", "--json").stdout)
    assert (running["state"], [node["state"] for node in running["nodes"]]) == ("running", ["running", "running"])
    bed_cli.until_logged("tick 3")
    down = bed_cli("down")
    assert "down" in down.stderr
    assert bed.wait_clean() == []
    again = bed_cli("down")
    assert "nothing to remove" in again.stderr
    # All output was collected before the containers were removed.
    assert "got SIGTERM, saving" in (bed_cli.runs()[-1] / "logs" / "node1.log").read_text()
    assert json.loads(bed_cli("runs", "--json").stdout)[0]["state"] == "stopped"


def test_a_start_that_fails_on_one_node_is_rolled_back_on_both(bed_cli: Cli, bed: Bed) -> None:
    bed.sh(bed.nodes[0], "mkdir -p /srv/only-here")
    bed_cli.program("plain.py")
    keys = bed_job(run={"script": "plain.py"})
    keys["mounts"] = {**keys["mounts"], "/srv/only-here": "/data:ro"}
    failed = bed_cli("up", bed_cli.job("half", **keys), code=3)
    assert "node2" in failed.stderr
    assert "/srv/only-here" in failed.stderr
    assert bed.wait_clean(home=True) == []


def test_without_the_record_the_nodes_labels_are_enough(bed_cli: Cli, bed: Bed) -> None:
    bed_cli.program("ticks.py")
    bed_cli("up", "-d", bed_cli.job("lost", **bed_job(run={"command": ["python3", "ticks.py", "20"]})))
    shutil.rmtree(bed_cli.cwd / "runs")
    assert bed_cli("status", code=2).stderr
    seen = json.loads(bed_cli("status", "--nodes", "node1,node2", "--json").stdout)
    assert seen["run"].startswith("lost-")
    followed = bed_cli("logs", "--nodes", "node1,node2")
    assert [line for line in followed.stdout.splitlines() if line.startswith("tick")] == [
        f"tick {i}" for i in range(20)
    ]
    assert json.loads(bed_cli("runs", "--nodes", "node1,node2", "--json").stdout)[0]["state"] == "done"
    bed_cli("fetch", "--nodes", "node1,node2")
    assert "tick 19" in (bed_cli.runs()[-1] / "logs" / "node1.log").read_text()
    bed_cli("down", "--nodes", "node1,node2")
    assert bed.wait_clean() == []


def test_only_the_killed_jobs_shared_memory_is_removed(bed_cli: Cli, bed: Bed) -> None:
    bed.sh(
        bed.nodes[0],
        "echo data > /dev/shm/my_dataset; echo old > /dev/shm/torch_1_old_0; touch -d yesterday /dev/shm/torch_1_old_0",
    )
    bed.sh(bed.nodes[0], "chown trainer /dev/shm/my_dataset /dev/shm/torch_1_old_0")
    command = ["sh", "-c", "echo x > /dev/shm/torch_7_new_0; echo x > /dev/shm/sem.mp-abc; echo ready; sleep 600"]
    bed_cli("up", "-d", bed_cli.job("shm", **bed_job(run={"command": command})))
    bed_cli.until_logged("ready")
    bed_cli("down")
    assert bed.sh(bed.nodes[0], "ls /dev/shm").split() == ["my_dataset", "torch_1_old_0"]
    assert bed.sh(bed.nodes[1], "ls /dev/shm").split() == []


def test_changing_the_code_sends_nothing_of_the_image(bed_cli: Cli, bed: Bed) -> None:
    program = bed_cli.cwd / "says.sh"
    program.write_text("echo one\n")
    file = bed_cli.job("says", **bed_job(run={"command": ["sh", "says.sh"]}))
    assert bed_cli("up", file).stdout == "one\n"
    program.write_text("echo two\n")
    count = "cat /sys/class/net/eth0/statistics/rx_bytes"
    before = [int(bed.sh(node, count)) for node in bed.nodes]
    again = bed_cli("up", file)
    received = [int(bed.sh(node, count)) - then for node, then in zip(bed.nodes, before, strict=True)]
    print(f"bytes that reached the nodes: {received}")
    assert again.stdout == "two\n"
    assert "image" not in again.stderr
    assert max(received) < 200_000  # an image is thousands of times larger
    bed_cli("down")


def test_clean_lists_first_and_removes_only_ended_runs(bed_cli: Cli, bed: Bed) -> None:
    bed_cli("up", bed_cli.job("old", **bed_job(run={"command": ["echo", "done"]})))
    bed_cli("down")
    bed_cli("up", "-d", bed_cli.job("new", **bed_job(run={"command": ["sleep", "60"]})))
    bed.sh(bed.nodes[0], "echo mine > /home/trainer/.launcher/notes")
    old, new = (run.name for run in bed_cli.runs())
    listed = bed_cli("clean")
    assert old in listed.stdout
    assert new not in listed.stdout
    assert "--yes" in listed.stderr
    assert old in bed.sh(bed.nodes[0], "ls /home/trainer/.launcher")
    bed_cli("clean", "--yes")
    assert sorted(bed.sh(bed.nodes[0], "ls /home/trainer/.launcher").split()) == sorted([new, "notes", "cache"])
    assert "nothing to remove" in bed_cli("clean").stdout
    bed_cli("down")
