"""`up JOB --into GROUP`: one more variant of a sweep, on a free machine of its pool."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from launcher.api.jobs import load
from launcher.features.sweeps.into import _member as member
from launcher.features.sweeps.into import _sets_codes as sets_codes
from tests.e2e.cli import Cli
from tests.features.sweeps.test_pool import Job, group_of, wait_until_started

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def job(home_cli: Cli) -> Job:
    """A sweep of one variant, which is done, on a pool of two. Further variants run until `go` is there."""
    job = Job(home_cli, ["local"] * 2, variants=1)
    job.go.touch()
    home_cli("up", job.file)
    job.go.unlink()
    return job


def added(cli: Cli, job: Job, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cli("up", job.file, "--into", "pool", "-d", "--json", *more).stdout)
    return found


@pytest.mark.ci
def test_a_variant_is_added_on_a_free_machine_and_waits_for_one(home_cli: Cli, job: Job) -> None:
    group = group_of(home_cli)
    first = added(home_cli, job, "--set", "run.args.x=5")
    assert first == {"run": home_cli.runs()[-1].name, "group": group, "variant": "x=5", "nodes": ["local-0"]}
    second = added(home_cli, job, "--set", "run.args.x=5")
    assert (second["variant"], second["nodes"]) == ("x=5 #2", ["local-1"])
    refused = home_cli("up", job.file, "--into", group, code=3).stderr
    assert f"node local-0: runs {first['run']} (x=5)" in refused
    assert f"node local-1: runs {second['run']} (x=5 #2)" in refused
    assert "wait for it: --wait" in refused
    third = home_cli.start("up", job.file, "--into", group, "--wait", "--set", "run.args.x=7")
    assert third.stderr
    while "waiting: node local-0: runs " not in third.stderr.readline():
        assert third.poll() is None
    job.go.touch()
    assert third.wait(120) == 0, third.stderr.read()
    assert sorted(job.lines()) == sorted(f"{what} {x}" for x in (1, 5, 5, 7) for what in ("begin", "end"))
    home_cli("logs", second["run"])
    home_cli("logs", first["run"])
    ledger = json.loads(home_cli("compare", group, "--json").stdout)
    assert [(each["variant"], each["values"], each["state"]) for each in ledger] == [
        ("x=1", {"x": "1"}, "done"),
        ("x=5", {"x": "5"}, "done"),
        ("x=5 #2", {"x": "5"}, "done"),
        ("x=7", {"x": "7"}, "done"),
    ]
    assert len(home_cli.runs()) == 4  # a refused one leaves none


def test_what_cannot_be_added_is_refused(home_cli: Cli, job: Job) -> None:
    into = ("up", job.file, "--into")
    assert "nothing is not a sweep recorded here" in home_cli(*into, "nothing", code=2).stderr
    other = home_cli(*into, "pool", "--set", "name=other", code=2).stderr
    assert f"{group_of(home_cli)} is a sweep of pool, and this job is other" in other
    assert "needs -d" in home_cli(*into, "pool", "--json", code=2).stderr
    assert "excludes --into" in home_cli(*into, "pool", "--max-parallel", 1, code=2).stderr
    assert len(home_cli.runs()) == 1
    sweep = home_cli.start("up", job.file)
    wait_until_started(home_cli, 2)
    assert "a launcher runs its variants, and would use the same machines" in home_cli(*into, "pool", code=2).stderr
    job.go.touch()
    assert sweep.wait(60) == 0


def test_what_was_edited_in_the_job_file_is_in_the_name(home_cli: Cli, job: Job) -> None:
    """Also an argument that the sweep varies; what is as it was, and the machines, are not."""
    job.go.touch()
    keys = yaml.safe_load(job.file.read_text())
    keys["run"]["args"], keys["env"] = {"x": 5, "y": [1, 2]}, {"HF_TOKEN": "hf_1"}
    job.file.write_text(yaml.safe_dump({**keys, "nodes": {"pool": ["local"]}}))
    named = "x=5 y=1,2 HF_TOKEN=***"
    assert added(home_cli, job)["variant"] == named
    home_cli("logs", home_cli.runs()[-1].name)
    last = json.loads(home_cli("compare", "pool", "--json").stdout)[-1]
    assert (last["variant"], last["values"]) == (named, {"x": "5", "y": "1,2", "HF_TOKEN": "***"})
    assert added(home_cli, job, "--set", "run.args.x=6")["variant"] == "x=6 y=1,2 HF_TOKEN=***"


def test_a_later_run_of_the_same_name_does_not_hide_the_sweep(home_cli: Cli, job: Job) -> None:
    job.go.touch()
    group = group_of(home_cli)
    single = ("up", job.file, "--set", "nodes=[local]", "--set", "sweep=null")
    home_cli(*single)
    assert added(home_cli, job, "--set", "run.args.x=5")["group"] == group
    home_cli("logs", home_cli.runs()[-1].name)
    home_cli(*single)
    again = home_cli("up", job.file, "--resume", "pool", "--set", "env.A=1").stderr
    assert f"the job has changed since {group} was started: A=1 (default before)" in again
    assert "the variants that are started now use it, but for those that --into has added" in again
    told = home_cli("up", job.file, "--into", group, "--resume", group, code=2).stderr
    assert f"--resume: {group} is the sweep {group}, and --into starts a single run" in told
    assert len(home_cli.runs()) == 4


@pytest.mark.parametrize(
    ("sets", "name", "values"),
    [
        (["run.args.lr=0.1", "env.A=b c"], "lr=0.1 env.A=b c", {"lr": "0.1", "env.A": "b c"}),
        (["env.HF_TOKEN=hf_123"], "env.HF_TOKEN=***", {"env.HF_TOKEN": "***"}),
        ([], "default", {}),
    ],
)
def test_an_added_variant_is_named_after_what_is_set(sets: list[str], name: str, values: dict[str, str]) -> None:
    job = load({"name": "pool", "runtime": "process", "nodes": ["local"], "run": {"command": ["true"]}}, set=sets)
    made = member("pool-20261128-200000-bbbb", job)
    assert (made.variant, made.values) == (name, values)


@pytest.mark.parametrize(
    ("assignment", "given"),
    [
        ("sweep.code=[./a, ./b]", True),
        ("sweep={code: [./a]}", True),
        ("sweep.budget=20s", False),
        ("run.args.note=a sweep", False),
    ],
)
def test_only_codes_that_are_set_are_refused_as_such(assignment: str, given: bool) -> None:
    keys = {"name": "pool", "runtime": "process", "nodes": ["local"], "run": {"command": ["true"]}}
    assert sets_codes(load({**keys, "sweep": {"code": ["./a"]}}, set=[assignment])) is given
