"""Two launchers on the same nodes: a GPU belongs to one run; the other launcher names that run, or waits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.bed import faults
from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job
from tests.e2e.drill import Drill, output_folder

pytestmark = [pytest.mark.bed, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def gpus(bed: Bed) -> Iterator[list[str]]:
    with faults.fake_gpus(bed, bed.nodes[0], 2) as uuids:
        yield uuids


def job(cli: Cli, name: str, seconds: int, gpus: object = "all", **keys: object) -> object:
    """Return a job that runs for some seconds, or until its output folder has a file `enough`."""
    waits = f"i=0; while [ $i -lt {seconds * 5} ] && [ ! -e /output/enough ]; do sleep 0.2; i=$((i+1)); done"
    command = ["sh", "-c", f"echo begins; {waits}; echo ends"]
    return cli.job(name, **bed_job(nodes=["node1"], gpus=gpus, run={"command": command}, **keys))


def test_a_gpu_in_use_is_refused_naming_its_run_and_owner(bed_cli: Cli, bed: Bed, gpus: list[str]) -> None:
    bed_cli("up", "-d", job(bed_cli, "first", 600, [0]))
    first = bed_cli.runs()[-1].name
    refused = bed_cli("up", job(bed_cli, "second", 1), "--set", "port=29501", code=3)
    assert f"GPU {gpus[0]} is in use by run {first} of " in refused.stderr
    assert "--wait" in refused.stderr
    # The other GPU is free, and a refused run does not hold it.
    bed_cli("up", job(bed_cli, "third", 1, [1]), "--set", "port=29501")
    bed_cli("down", first)
    bed_cli("up", job(bed_cli, "second", 1))
    bed_cli("down", "--all")
    assert bed.wait_clean() == []


def test_a_number_selects_the_gpu_that_no_run_holds(bed_cli: Cli, bed: Bed, gpus: list[str]) -> None:
    bed_cli("up", "-d", job(bed_cli, "first", 600, [0]))
    first = bed_cli.runs()[-1].name
    bed_cli("up", "-d", job(bed_cli, "second", 600, 1), "--set", "port=29501")
    assert [node["gpus"] for node in json.loads(bed_cli("status", "--json").stdout)["nodes"]] == [gpus[1:]]
    refused = bed_cli("up", job(bed_cli, "third", 1, 1), "--set", "port=29502", code=3).stderr
    assert f"1 GPU requested, 0 of 2 are idle: GPU 0: the run {first} of " in refused
    assert f"the run {first} of" in " ".join(bed_cli("status", "--nodes", "node1").stdout.split())
    bed_cli("down", "--all")
    assert bed.wait_clean() == []


def test_wait_waits_and_an_ended_run_holds_no_gpu(bed_cli: Cli, bed: Bed, gpus: list[str]) -> None:
    bed_cli("up", "-d", job(bed_cli, "before", 600))
    enough = output_folder(bed_cli) / "enough"
    drill = Drill.follow(bed_cli, "up", "--wait", job(bed_cli, "after", 1), "--set", "port=29501")
    waited = drill.sees("waiting: node node1: GPU .* is in use by run before-")
    bed.sh(bed.nodes[0], f"touch {enough}")
    began = drill.sees("^begins$")
    drill.end(0)
    print(f"waited {began - waited:.1f} s for a run that was not taken down")
    bed_cli("down", "--all")
    assert bed.wait_clean() == []


def test_exactly_one_of_many_concurrent_runs_gets_the_gpu(bed_cli: Cli, bed: Bed, gpus: list[str]) -> None:
    file = job(bed_cli, "race", 600)
    started = [bed_cli.start("up", "-d", file, "--set", f"port={29500 + i}") for i in range(5)]
    codes = []
    for process in started:
        _, err = process.communicate(timeout=120)
        codes.append(process.returncode)
        assert process.returncode == 0 or "is in use by run race-" in err, err
    print("exit codes of five at once:", codes)
    assert sorted(codes) in ([0, 3, 3, 3, 3], [3, 3, 3, 3, 3])
    names = bed.docker(bed.nodes[0], "ps", "--format", "{{.Names}}").split()
    assert len(names) == codes.count(0)
    bed_cli("down", "--nodes", "node1", "--all")
    assert bed.wait_clean() == []


def test_a_claim_of_a_removed_run_is_released(bed_cli: Cli, bed: Bed, gpus: list[str]) -> None:
    bed_cli("up", "-d", job(bed_cli, "gone", 600))
    # The run's container was removed manually, but its claims still exist.
    bed.docker(bed.nodes[0], "rm", "-f", f"launcher-{bed_cli.runs()[-1].name}-0")
    assert len(bed.leftovers(bed.nodes[0]).containers) == 2
    bed_cli("up", job(bed_cli, "next", 1))
    assert bed_cli.result()["state"] == "done"
    assert [node["gpus"] for node in json.loads(bed_cli("status", "--json").stdout)["nodes"]] == [gpus]
    bed_cli("down", "--all")
    assert bed.wait_clean() == []


@pytest.mark.slow
def test_the_node_reboots_and_the_run_keeps_its_gpus(bed_cli: Cli, bed: Bed, gpus: list[str]) -> None:
    bed_cli("up", "-d", job(bed_cli, "boots", 600, restarts=1))
    faults.power_off(bed.nodes[0])
    time.sleep(1)
    faults.power_on(bed, bed.nodes[0])
    refused = bed_cli("up", job(bed_cli, "second", 1), "--set", "port=29501", code=3)
    assert "is in use by run boots-" in refused.stderr
    bed_cli("down", "--all")


def test_a_container_that_only_has_the_name_of_a_claim_is_reported(bed_cli: Cli, bed: Bed, gpus: list[str]) -> None:
    name, labels = f"launcher-gpu-{gpus[0]}", ("--label", "launcher.run=x", "--label", "launcher.created=soon")
    bed.docker(bed.nodes[0], "create", "--name", name, *labels, "launcher-bed-train")
    refused = bed_cli("up", job(bed_cli, "second", 1), code=3)
    assert f"docker rm -f {name}" in refused.stderr
