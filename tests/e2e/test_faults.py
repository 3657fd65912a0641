"""The fault table, part 1: faults that a restart overcomes. The run resumes from its last checkpoint.

Every test prints its figures: `LAUNCHER_FIGURES=FILE pytest -m '' tests/e2e/test_faults*.py`, then
`python -m tests.e2e.figures FILE` prints the table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from tests.bed import faults
from tests.bed.bed import Bed, Node
from tests.e2e.drill import INTERVAL, Drill, kill_container, kill_rank
from tests.e2e.figures import Figures
from tests.e2e.scene import Scene, rows
from tests.e2e.test_two_nodes import digits, train_job

pytestmark = [pytest.mark.bed, pytest.mark.timeout(500)]


def restart_engine(bed: Bed, node: Node) -> None:
    """Like `systemctl restart docker` after Docker crashed."""
    with faults.without_engine(bed, node):
        time.sleep(1)


def power_cycle(bed: Bed, node: Node) -> None:
    faults.power_off(node)
    time.sleep(2)
    faults.power_on(bed, node)


OVERCOME: dict[str, tuple[Callable[[Bed, Node], None], int]] = {
    "a rank is killed": (kill_rank, -1),
    "rank 0 is killed": (kill_rank, 0),
    "a container is killed": (kill_container, -1),
    "the master's container is killed": (kill_container, 0),
    "a node's engine is restarted": (restart_engine, -1),
    "a node is killed and restarted": (power_cycle, -1),
    "the master is killed and restarted": (power_cycle, 0),
}


@rows(
    OVERCOME,
    four={"a rank is killed", "a container is killed", "a node is killed and restarted"},
    everyday={"a node is killed and restarted"},  # process/test_torchrun.py kills a rank
)
def test_the_run_resumes_from_its_last_checkpoint(scene: Scene, name: str) -> None:
    fault, index = OVERCOME[name]
    drill = scene.begin("again", restarts=3)
    broken = time.monotonic()
    fault(scene.bed, scene.nodes[index])
    drill.end(0)
    reported, resumed, lost = drill.first(r": restarted \(", broken), drill.recovered(broken), drill.lost_steps()
    assert lost
    assert max(lost) <= INTERVAL + 1  # the step in progress counts too
    assert {step for _, step in drill.steps} == set(range(1, 151))
    assert reported is not None, str(drill)
    result = scene.cli.result()
    assert (result["state"], result["exit_code"]) == ("done", 0)
    assert all(1 <= node["restarts"] <= 3 for node in result["nodes"])
    seen = json.loads(scene.cli("status", "--json").stdout)
    assert all(len(node["restarted"]) == node["restarts"] for node in seen["nodes"])
    assert "restart 1 after" in scene.cli("status").stdout
    wrong = drill.lines_lost(scene.bed, scene.count)
    outcome = "done, " + "/".join(str(node["restarts"]) for node in result["nodes"]) + " restarts"
    Figures(name, scene.count, outcome, reported, resumed, max(lost) / INTERVAL, wrong, scene.clean()).publish()
    assert wrong == 0


@pytest.mark.parametrize("scene", [pytest.param(2, marks=pytest.mark.slow)], indirect=True)
def test_a_rank_killed_by_the_oom_killer_is_restarted(scene: Scene) -> None:
    drill = scene.begin("hoards", restarts=2, variables={"HOARD": "1:40"}, resources={"memory": "1500m"})
    drill.sees("^step 39$")
    broken = time.monotonic()
    drill.end(0)
    reported, resumed, lost = drill.first(r": restarted \(", broken), drill.recovered(broken), drill.lost_steps()
    assert max(lost) <= INTERVAL + 1
    assert {step for _, step in drill.steps} == set(range(1, 151))
    assert scene.cli.result()["nodes"][1]["restarts"] >= 1
    wrong = drill.lines_lost(scene.bed, scene.count)
    name = "a rank is killed by the OOM killer"
    Figures(name, 2, "done", reported, resumed, max(lost) / INTERVAL, wrong, scene.clean()).publish()
    assert wrong == 0


@pytest.mark.parametrize("scene", [pytest.param(2, marks=pytest.mark.slow)], indirect=True)
def test_the_trainer_resumes_after_its_container_was_killed(scene: Scene) -> None:
    digits(scene.cli.cwd, train=120, val=31)
    job = train_job(batch_size=4, epochs=12)
    drill = Drill.follow(scene.cli, "up", scene.cli.job("trainer", **{**job, "restarts": 2}))
    drill.sees(r"Epoch: \[3\]")
    kill_container(scene.bed, scene.nodes[1])
    drill.sees("train: resumed /output/checkpoints/last.pt at epoch")
    drill.end(0)
    epochs = [json.loads(line) for line in (scene.cli.runs()[-1] / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in epochs if line["kind"] == "epoch"] == list(range(1, 13))
    assert [node["restarts"] for node in scene.cli.result()["nodes"]] == [1, 1]
    scene.clean()
