"""A sweep with a budget: what it ends is done, and everything that shows a run says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.api.jobs import load
from launcher.errors import JobInvalid
from launcher.features.sweeps.continued import with_budget
from launcher.job.dump import dump_job
from launcher.job.loader import parse_job
from launcher.job.models import Job
from launcher.job.overrides import expand_sweep
from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job
from tests.features.sweeps.test_pool import group_of

# Unless told that it `ends`, it goes on until it is stopped; so do the programs of the other nodes.
PROGRAM = """case "$*" in *ends*) exit 0;; esac
[ $LAUNCHER_NODE_RANK != 0 ] || echo '{"kind": "step", "step": 1, "acc": 1}' >$LAUNCHER_OUTPUT/metrics.jsonl
exec sleep 600
"""


def budgeted(cli: Cli, variants: list[int]) -> Path:
    keys: dict[str, Any] = {"runtime": "process", "run": {"command": ["sh", "-c", PROGRAM, "sh"]}}
    sweep = {"budget": "1s", "grid": {"x": variants}}
    return cli.job("hour", **keys, nodes={"pool": ["local"] * 4, "each": 2}, sweep=sweep)


@pytest.mark.timeout(200)
def test_what_the_budget_ends_is_done_and_said_everywhere(home_cli: Cli) -> None:
    shown = home_cli("up", budgeted(home_cli, [1])).stderr
    assert ["1", "done", "by", "budget"] in [line.split()[:4] for line in shown.splitlines()]
    found, [run] = home_cli.result(), home_cli.runs()
    assert (found["state"], found["exit_code"], found["ended_by"]) == ("done", 0, "budget")
    assert [node["exit_code"] for node in found["nodes"]] == [0, 0]
    [row] = json.loads(home_cli("compare", "--json").stdout)
    assert (row["state"], row["exit_code"], row["ended_by"]) == ("done", 0, "budget")
    assert "ended by their budget: all" in home_cli("compare").stderr
    [row] = json.loads(home_cli("runs", "--all", "--json").stdout)
    assert (row["state"], row["ended_by"]) == ("done", "budget")
    assert "done by budget" in home_cli("status", run.name).stdout
    assert json.loads(home_cli("status", run.name, "--json").stdout)["ended_by"] == "budget"


@pytest.mark.ci
@pytest.mark.timeout(200)
def test_it_is_not_run_again_and_each_variant_has_the_same_budget(
    home_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = budgeted(home_cli, [1, 2])
    home_cli("up", job)
    home_cli("up", job, "--resume", "hour")
    assert len(home_cli.runs()) == 2, "what the budget has ended is done"
    group = group_of(home_cli)
    other = home_cli("up", job, "--resume", "hour", "--set", "sweep.budget=1h", code=2).stderr
    assert f"--resume: the job has budget 1h, and {group} began with 1s" in " ".join(other.split())
    for sets in (["--set", "sweep.budget=1h"], ["--set", "sweep=[{x: 1}]", "--set", "budget=2s"]):
        told = home_cli("up", job, "--into", "hour", *sets, code=2).stderr
        assert f"and {group} began with 1s" in " ".join(told.split())
    for how in ("--into", "--resume"):
        told = home_cli("up", job, how, "hour", "--set", "sweep.budget=null", code=2).stderr
        assert f"{how}: the job has no budget, and {group} began with 1s" in " ".join(told.split())
    assert len(home_cli.runs()) == 2, "what is refused leaves no run"
    monkeypatch.chdir(home_cli.cwd)
    assert with_budget(load(job, set={"sweep": [{"x": 1}]}), group, "--resume").budget == 1
    assert "ended by its budget" in home_cli("up", job, "--into", "hour", "--set", "sweep=[{x: 1}]").stderr
    ledger = json.loads(home_cli("compare", group, "--json").stdout)
    assert [each["ended_by"] for each in ledger] == ["budget"] * 3


@pytest.mark.timeout(200)
def test_a_sweep_without_a_budget_leaves_it_to_each_variant(home_cli: Cli) -> None:
    job = budgeted(home_cli, [1])
    home_cli("up", job, "--set", "sweep=[[ends], [ends, too]]")
    sets = ("--set", "sweep=[[]]", "--set", "budget=1s")
    assert "ended by its budget" in home_cli("up", job, "--into", "hour", *sets).stderr
    ledger = json.loads(home_cli("compare", "hour", "--json").stdout)
    assert [each["ended_by"] for each in ledger] == [None, None, "budget"]
    assert f"ended by their budget: {ledger[2]['label']}" in " ".join(home_cli("compare", "hour").stderr.split())


@pytest.mark.timeout(240)
def test_on_two_machines_the_launcher_tells_the_other_node(bed_cli: Cli, bed: Bed) -> None:
    run = {"command": ["sh", "-c", PROGRAM, "sh"]}
    job = bed_cli.job("hour", **bed_job(run=run, sweep={"budget": "1s", "grid": {"x": [1]}}))
    assert "1 done" in bed_cli("up", job).stderr
    found, [run_folder] = bed_cli.result(), bed_cli.runs()
    assert (found["state"], found["ended_by"], found["failure"]) == ("done", "budget", None)
    assert [(node["exit_code"], node["victim"]) for node in found["nodes"]] == [(0, False)] * 2
    assert "launcher: the run has reached its budget" in (run_folder / "logs" / "node2.log").read_text()
    (bed_cli.cwd / "other").mkdir()
    nodes = ("--nodes", ",".join(node.alias for node in bed.nodes[:2]))
    rows = json.loads(Cli(bed_cli.cwd / "other", bed_cli.env)("runs", *nodes, "--all", "--json").stdout)
    assert [(row["state"], row["ended_by"]) for row in rows] == [("done", "budget")], "without a record"
    bed_cli("down", "--all")
    assert bed.wait_clean() == []


def job_of(*lines: str) -> Job:
    head = ["name: a", "runtime: process", "nodes: [local]", "run: {command: [true]}"]
    return parse_job("\n".join([*head, *lines]))


def test_the_budget_of_a_sweep_is_that_of_each_variant() -> None:
    job = job_of("sweep: {budget: 5m, grid: {lr: [1, 2]}}")
    variants = expand_sweep(job)
    assert [each.budget for each in variants] == [300, 300]
    assert parse_job(dump_job(variants[0])).budget == 300
    assert job_of("budget: 5m", "sweep: [{lr: 1}]") == job_of("sweep: {budget: 300s, grid: {lr: [1]}}")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["timeout: 5m", "sweep: {budget: 5m, grid: {a: [1]}}"], "is not reached: `timeout` ends the run, as failed"),
        (["budget: 1m", "sweep: {budget: 5m, grid: {a: [1]}}"], "sweep.budget: is also a key of the job"),
        (["sweep: {budget: soon, grid: {a: [1]}}"], "job.yaml:5: budget: expected a duration"),
        (["sweep: {budget: 5m}"], "expected a list of variants, or {grid"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(lines: list[str], said: str) -> None:
    with pytest.raises(JobInvalid) as refused:
        job_of(*lines)
    assert said in str(refused.value)


def test_a_budget_that_is_set_beside_that_of_the_sweep_is_told_its_key() -> None:
    keys = {"name": "a", "runtime": "process", "nodes": ["local"], "run": {"command": ["true"]}}
    with pytest.raises(JobInvalid, match=r"--set budget=2m: budget: the sweep has .*, --set sweep.budget=2m"):
        load({**keys, "sweep": {"budget": "1m", "grid": {"lr": [1]}}}, set=["budget=2m"])


def test_a_job_that_loses_nodes_has_no_budget() -> None:
    text = "name: a\nimage: {ref: a}\nnodes: [a, b, c]\nmin_nodes: 2\nbudget: 5m\nrun: {module: train}\n"
    with pytest.raises(JobInvalid, match="is counted on the node of rank 0, which changes with min_nodes"):
        parse_job(text)
