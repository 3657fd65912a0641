"""The names of a sweep, which every command understands alike, and what tables show of its runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import launcher
from launcher.api.history import named
from launcher.errors import RunUnknown
from launcher.local_files import locked
from launcher.model import labels
from launcher.model.plan import KnownSweep, Membership, Revision, is_run_id
from launcher.planning.containers import in_group
from launcher.planning.offline import offline
from launcher.records import sweeps
from launcher.records.groups import sweep_named
from launcher.records.paths import RunPaths
from launcher.records.store import Record
from launcher.records.sweeps import lock_of
from launcher.run.end.resumable import command_of
from tests.unit.test_record_fuzz import call, parse_job

JOB = "name: night\nruntime: process\nnodes: [local]\ngpus: none\nrun: {command: ['true']}\n"
OLD, NEW = "night-20261127-200000-aaaa", "night-20261128-200000-bbbb"
RUNS = {  # ID -> sweep, variant, state, top-1
    "other-20261127-190000-0000": (None, "", "done", 40.0),
    "night-20261127-200001-0001": (OLD, "lr=0.1", "done", 50.0),
    "night-20261128-200001-0001": (NEW, "lr=0.1", "failed", None),
    "night-20261128-200002-0002": (NEW, "lr=0.2", "done", 90.0),
    "night-20261128-200003-0003": (NEW, "lr=0.3", "done", 80.0),
    "night-20261128-210001-0004": (NEW, "lr=0.1", "done", 70.0),  # resumed
}
LATEST = [run for run in RUNS if run.startswith("night-20261128") and run != "night-20261128-200001-0001"]
ORDER = [LATEST[2], LATEST[0], LATEST[1]]  # as the variants were started first


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sweeps of one job, the second resumed, and a run of another job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for run, (group, variant, state, best) in RUNS.items():
        job = parse_job(JOB.replace("night", run.partition("-")[0]), "job.yaml")
        record, plan = Record(RunPaths(tmp_path / "runs" / run), []), offline(job, "code")
        record.paths.root.mkdir(parents=True)
        record.paths.plan.write_text(plan.to_json().replace(plan.run, run))
        if group is not None:
            record.join(Membership(group, variant))
        record.event("started")
        last = {} if best is None else {"val": {"top1": best}}
        record.finish({"state": state, "exit_code": int(state != "done"), "last": last})
    return tmp_path


@pytest.mark.parametrize("text", [None, "night", NEW, "night-20261128-2"])
def test_every_name_of_a_sweep_means_its_latest_variants(project: Path, text: str | None) -> None:
    del project
    assert (named(text).group, named(text).runs) == (NEW, ORDER)


def test_a_run_is_still_a_run(project: Path) -> None:
    del project
    for text in ("other", LATEST[0], "night-20261128-200002", "unknown"):
        assert (named(text).group, named(text).runs) == (None, [text])
    with pytest.raises(RunUnknown, match=f"matches 2 sweeps.*{OLD}, {NEW}"):
        named("night-2026")


def test_what_stops_runs_needs_the_sweeps_own_id(project: Path) -> None:
    """A job's name is its latest run, and a beginning that a run has may mean that run."""
    del project
    assert (named("night", to_stop=True).runs, named(None, to_stop=True).runs) == (["night"], [None])
    assert named("night-20261128-200000", to_stop=True).runs == [run for run in RUNS if "20261128" in run]
    with pytest.raises(RunUnknown, match=f"matches 1 sweep and 4 runs: {NEW}"):
        named("night-20261128", to_stop=True)


def test_what_takes_one_run_takes_the_latest_variant(project: Path) -> None:
    del project
    for text in (NEW, "night-20261128", "night"):
        assert launcher.find(text, log=None).id == LATEST[-1]
    assert launcher.find(OLD, log=None).id == "night-20261127-200001-0001"


@pytest.mark.parametrize("text", [(), ("night",), (NEW,), ("night-20261128",)])
def test_what_takes_one_run_says_which_variant_it_is_and_how_to_choose_another(
    project: Path, text: tuple[str, ...]
) -> None:
    del project
    printed = call("logs", *text, "--no-follow")[1]
    assert f"{LATEST[-1]}\n" in printed
    assert f"it is lr=0.1; for another variant give its run ID: launcher runs {NEW}\n" in printed
    assert "another variant" not in call("logs", LATEST[-1], "--no-follow")[1]


def test_runs_folds_sweeps_and_names_unfold_them(project: Path) -> None:
    del project
    _, printed = call("runs")
    shown = [line.split() for line in printed.splitlines()[1:]]
    assert [line[0] for line in shown] == ["other-20261127-190000-0000", OLD, NEW]
    assert shown[2][1:] == ["3", "done", "0", "local", "90.00", "lr=0.2"]
    assert [row.get("states") for row in json.loads(call("runs", "--json")[1])] == [None, {"done": 1}, {"done": 3}]
    for text in (NEW, "night"):
        every = json.loads(call("runs", text, "--json")[1])
        assert [row["run"] for row in every] == [run for run in RUNS if "20261128" in run]
        assert {row["variant"] for row in every} == {"lr=0.1", "lr=0.2", "lr=0.3"}
    assert len(json.loads(call("runs", "--all", "--json")[1])) == len(RUNS)
    assert f"night is the sweep {NEW}; others of this job: {OLD}\n" in call("runs", "night")[1]
    assert f"is the sweep {NEW}\n" in call("runs", "night-20261128-20000")[1]
    assert "is the sweep" not in call("runs", NEW)[1]
    lines = call("runs", NEW)[1].splitlines()
    assert lines[0].split() == ["run", "variant", "state", "exit", "nodes", "top-1"]
    assert lines[1].split()[1:3] == ["lr=0.1", "failed"]
    assert call("runs", "unknown")[0] == 2


def test_a_plan_lists_the_variants(project: Path) -> None:
    (project / "code").mkdir()
    sweep = "sweep: {grid: {lr: [0.1, 0.2], x: [a]}}"
    (project / "job.yaml").write_text(f"{JOB.replace('true', 'echo')}code: code\n{sweep}\n")
    _, text = call("plan", "job.yaml", "--offline")
    assert "2 variants; the plan is that of the first:" in text
    assert "echo --lr 0.1 --x a" in " ".join(text.split())
    assert "  lr=0.1 x=a\n  lr=0.2 x=a\n" in text
    printed = call("plan", "job.yaml", "--offline", "--json")[1]
    assert json.loads(printed[printed.index("{\n") :])["variants"] == ["lr=0.1 x=a", "lr=0.2 x=a"]


@given(st.text(max_size=200))
def test_a_long_variant_is_shown_with_both_its_ends(variant: str) -> None:
    shown = Membership(NEW, f"a=1 {variant} z=9").shown
    assert len(shown) <= 60
    assert (shown[:4], shown[-4:]) == ("a=1 ", " z=9")
    assert "…" in shown or len(variant) <= 52


@given(st.text(max_size=2000))
def test_the_labels_of_a_run_have_its_sweep(variant: str) -> None:
    plan = in_group(offline(parse_job(JOB, "job.yaml"), "code"), Membership(NEW, variant))
    own = {
        **plan.nodes[0].container.labels,
        labels.RUN: LATEST[0],
        labels.OUTPUT: f"/h/.launcher/{LATEST[0]}",
        labels.OWNER: "me@here",
    }
    read = labels.read(own).group
    assert is_run_id(LATEST[0])
    assert read is not None
    assert read.group == NEW
    assert read.variant.isprintable()
    assert len(read.variant) <= labels.LONGEST_VARIANT
    if variant.isprintable() and len(variant) <= labels.LONGEST_VARIANT:
        assert read.variant == variant


@pytest.mark.parametrize("wrong", [{labels.GROUP: "../x"}, {labels.VARIANT: "\x1b[2J"}, {labels.VARIANT: "x" * 1001}])
def test_labels_that_are_no_sweep_are_refused_and_old_ones_have_none(wrong: dict[str, str]) -> None:
    own = dict(offline(parse_job(JOB, "job.yaml"), "code").nodes[0].container.labels)
    own |= {labels.RUN: LATEST[0], labels.OUTPUT: f"/h/.launcher/{LATEST[0]}", labels.OWNER: "me@here"}
    assert labels.read(own).group is None
    assert not labels.readable({**own, **labels.of_group(Membership(NEW, "lr=1")), **wrong})


def test_a_record_that_is_rebuilt_from_labels_has_its_sweep(tmp_path: Path) -> None:
    nodes = Record.of(offline(parse_job(JOB, "job.yaml"), "code"), [], tmp_path).nodes()
    record = Record.rebuild(LATEST[0], "process", nodes, tmp_path, group=Membership(NEW, "lr=1"))
    assert Record(RunPaths(tmp_path / record.run)).group == Membership(NEW, "lr=1")


def test_variants_that_were_added_follow_those_of_the_sweep(tmp_path: Path) -> None:
    known = KnownSweep(("lr=1", "lr=2"), "job.yaml", ())
    sweeps.keep(Membership(NEW, "lr=1", known), Record(RunPaths(tmp_path / LATEST[0])).mask, tmp_path)
    assert sweeps.in_order(NEW, ["lr=9", "lr=2", "lr=1"], tmp_path) == ["lr=1", "lr=2", "lr=9"]


def sweep_of_code(project: Path) -> tuple[str, dict[str, str]]:
    """Return a sweep over three commits, of which the first one has run, and its variants with how each is shown."""
    commits = {"main": "1a2b3c4d" * 5, "try-1": "5e6f7a8b" * 5, "9c9c9c9c": "9c9c9c9c" * 5}
    names = [f"code={commit[:8]} lr=0.1" for commit in commits.values()]
    record = Record(RunPaths(project / "runs" / "night-20261129-200001-0001"))
    shutil.copytree(project / "runs" / LATEST[0], record.paths.root)
    record.paths.events.unlink()
    record.paths.plan.write_text(record.paths.plan.read_text().replace(LATEST[0], record.run))
    group = "night-20261129-200000-cccc"
    record.join(Membership(group, names[0], values={"code": "1a2b3c4d", "lr": 0.1}))
    record.of_revision(Revision(commits["main"], asked="main"))
    record.event("started")
    sweeps.keep(Membership(group, "", KnownSweep(tuple(names), commits=commits)), record.mask, project / "runs")
    shown = ["code=1a2b3c4d (main) lr=0.1", "code=5e6f7a8b (try-1) lr=0.1", "code=9c9c9c9c lr=0.1"]
    return group, dict(zip(names, shown, strict=True))


def test_a_variant_of_code_is_shown_with_the_name_that_was_asked_for(project: Path) -> None:
    """Also one that has no run yet. Its name, by which the sweep knows it, has only the commit."""
    group, variants = sweep_of_code(project)
    for command in ("status", "runs"):
        text = call(command, group)[1]
        assert [shown for shown in variants.values() if f"{shown}  " in text] == [*variants.values()], text


def test_what_a_killed_launcher_has_not_started_is_said(project: Path) -> None:
    """And which command starts it; not while a launcher does."""
    options = ("--set", "env.X=a b", "--nodes", "local,local")
    sweep = KnownSweep(("lr=0.1", "lr=0.2", "lr=0.3", "lr=0.4", "lr=0.5"), "my jobs/night.yaml", options)
    record = Record(RunPaths(project / "runs" / LATEST[-1]))
    sweeps.keep(Membership(NEW, "lr=0.1", sweep), record.mask, project / "runs")
    resume = f"launcher up 'my jobs/night.yaml' --set 'env.X=a b' --nodes local,local --resume {NEW}"

    def row() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(call("runs", "--json")[1])[-1]
        return found

    assert row()["states"] == {"done": 3, "not started": 2}
    assert (row()["exit_code"], row()["resume"]) == (None, resume)
    for args in ((), ("night",), (NEW,)):
        text = " ".join(call("runs", *args)[1].split())
        assert f"{NEW}: 3 done, 2 not started; no launcher on this machine starts the others: {resume}" in text
    assert [each["variant"] for each in json.loads(call("runs", NEW, "--json")[1])[-2:]] == ["lr=0.4", "lr=0.5"]
    assert call("status", NEW)[0] == 0
    lines = [line.split() for line in call("status", NEW)[1].splitlines()]
    table = lines[lines.index(["variant", "state", "run", "nodes"]) + 1 :]
    assert table[0] == ["lr=0.1", "done", LATEST[-1], "local"]
    assert [line[:3] for line in table[-2:]] == [["lr=0.4", "not", "started"], ["lr=0.5", "not", "started"]]
    assert len(table) == 5
    with locked(lock_of(NEW)):  # as a launcher does that runs the sweep
        assert (row()["states"], row()["resume"]) == ({"done": 3, "not started": 2}, "")
        assert "no launcher" not in call("runs")[1]
        assert f"{NEW}: 3 done, 2 not started\n" in call("runs", NEW)[1]
    assert row()["resume"] == resume  # its file is left by one that was killed


def test_a_run_of_a_sweep_is_continued_by_resuming_the_sweep(project: Path) -> None:
    """Its job file alone would start a run of none."""
    record = Record(RunPaths(project / "runs" / LATEST[0]))
    assert command_of(record) == f"launcher up JOB --resume {NEW}"
    sweep = KnownSweep(("lr=0.1",), "night.yaml", ("--set", "env.X=1"))
    sweeps.keep(Membership(NEW, "lr=0.1", sweep), record.mask, project / "runs")
    assert command_of(record) == f"launcher up night.yaml --set env.X=1 --resume {NEW}"
    alone = Record(RunPaths(project / "runs" / "other-20261127-190000-0000"))
    assert command_of(alone) == f"launcher up runs/{alone.run}/job.yaml --resume {alone.run}"


def with_a_later_run(project: Path) -> str:
    """Add a run of the sweep's name that is none of it; return what is said of it."""
    later = Record(RunPaths(project / "runs" / "night-20261129-200001-0001"))
    shutil.copytree(project / "runs" / LATEST[0], later.paths.root)
    later.paths.plan.write_text(later.paths.plan.read_text().replace(LATEST[0], later.run))
    later.paths.events.unlink()
    later.event("started")
    return f"the latest run of night is {later.run}; the latest sweep of night is {NEW}\n"


def test_a_later_run_of_the_same_name_is_told_from_the_sweep(project: Path) -> None:
    says = with_a_later_run(project)
    assert (named("night").group, sweep_named("night"), sweep_named(OLD)) == (None, NEW, OLD)
    assert says in call("fetch", "night")[1]
    assert "the latest sweep" not in call("fetch", "other")[1]


def test_who_stops_a_variant_is_told_that_its_sweep_goes_on(project: Path) -> None:
    record = Record(RunPaths(project / "runs" / LATEST[-1]))
    sweeps.keep(Membership(NEW, "", KnownSweep(("lr=0.1", "lr=0.2", "lr=0.3"))), record.mask, project / "runs")
    says = f"a launcher on this machine goes on with the sweep {NEW}"
    with locked(lock_of(NEW)):  # as a launcher does that runs the sweep
        assert says not in call("down", "night")[1]  # all have ended
        sweeps.keep(Membership(NEW, "", KnownSweep(("lr=0.3", "lr=0.4"))), record.mask, project / "runs")
        for name in ("night", LATEST[0], NEW):
            code, text = call("down", name)
            assert code == 0
            assert says in text
            assert f"launcher down {NEW}" in text
        assert says not in call("down", "other")[1]
    assert says not in call("down", "night")[1]  # no launcher does


def test_records_without_a_readable_list_of_variants_are_shown_as_before(project: Path) -> None:
    (project / "runs" / ".sweeps").mkdir()
    for text in ("", "[]", '{"variants": 1}', '{"variants": [1], "file": []}'):
        (project / "runs" / ".sweeps" / f"{NEW}.json").write_text(text)
        assert json.loads(call("runs", "--json")[1])[-1]["states"] == {"done": 3}
