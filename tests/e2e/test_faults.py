"""What breaks, and what happens then: the run goes on from its last checkpoint, or ends with the reason."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from tests.bed import faults
from tests.bed.bed import Bed, Node
from tests.e2e.cli import Cli
from tests.e2e.drill import INTERVAL, Drill, kill_container, kill_rank
from tests.e2e.test_two_nodes import digits, train_job

pytestmark = [pytest.mark.bed, pytest.mark.timeout(400)]


def restart_engine(bed: Bed, node: Node) -> None:
    """As `systemctl restart docker` after the engine's own crash."""
    with faults.without_engine(bed, node):
        time.sleep(1)


def power_cycle(bed: Bed, node: Node) -> None:
    faults.power_off(node)
    time.sleep(2)
    faults.power_on(bed, node)


FAULTS: dict[str, tuple[Callable[[Bed, Node], None], int]] = {
    "a worker is killed": (kill_rank, 1),
    "the master's rank is killed": (kill_rank, 0),
    "a container is killed": (kill_container, 1),
    "the master's container is killed": (kill_container, 0),
    "a node's engine is restarted": (restart_engine, 1),
    "a node loses power and comes back": (power_cycle, 1),
    "the master loses power and comes back": (power_cycle, 0),
}
EVERYDAY = {"a worker is killed", "a node loses power and comes back"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in EVERYDAY else [pytest.mark.slow], id=n.replace(" ", "-")) for n in FAULTS]
)
def test_the_run_goes_on_from_its_last_checkpoint(bed_cli: Cli, bed: Bed, name: str) -> None:
    fault, place = FAULTS[name]
    drill = Drill.begin(bed_cli, "again", restarts=3)
    drill.sees("^step 23$")
    broken = time.monotonic()
    fault(bed, bed.nodes[place])
    drill.end(0)
    lost, seconds = drill.lost_steps(), drill.recovered(broken)
    print(f"{name}: training again after {seconds:.1f} s, {lost} steps done again")
    assert lost
    assert max(lost) <= INTERVAL + 1  # the step under way counts too
    assert {step for _, step in drill.steps} == set(range(1, 151))
    drill.no_line_lost(bed)
    assert any("started again" in line for _, line in drill.news), str(drill)
    result = bed_cli.result()
    assert (result["state"], result["exit_code"]) == ("done", 0)
    assert all(1 <= node["restarts"] <= 3 for node in result["nodes"])
    seen = json.loads(bed_cli("status", "--json").stdout)
    assert [len(node["restarted"]) == node["restarts"] for node in seen["nodes"]] == [True, True]
    print("why:", [node["restarted"] for node in seen["nodes"]])
    assert "restart 1 after" in bed_cli("status").stdout
    bed_cli("down")
    assert bed.wait_clean() == []


@pytest.mark.slow
def test_the_trainer_itself_goes_on_after_its_container_was_killed(bed_cli: Cli, bed: Bed) -> None:
    digits(bed_cli.cwd, train=120, val=31)
    job = train_job(batch_size=4, epochs=12)
    drill = Drill.follow(bed_cli, "up", bed_cli.job("trainer", **{**job, "restarts": 2}))
    drill.sees(r"Epoch: \[3\]")
    kill_container(bed, bed.nodes[1])
    drill.sees("train: resumed /output/checkpoints/last.pt at epoch")
    drill.end(0)
    epochs = [json.loads(line) for line in (bed_cli.runs()[-1] / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in epochs if line["kind"] == "epoch"] == list(range(1, 13))
    assert [node["restarts"] for node in bed_cli.result()["nodes"]] == [1, 1]
    bed_cli("down")
