"""A sweep over a pool: handling of a variant whose machine does not respond."""

# ruff: noqa: SLF001 - real machines that do not respond need the bed, which takes minutes
from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.api.history import recorded_runs
from launcher.api.jobs import load
from launcher.api.run import Run
from launcher.errors import NodesFailed, NodeUnreachable
from launcher.features.sweeps.pool import Placement
from launcher.features.sweeps.sweep import Sweep, SweepState, _LostError
from launcher.records.paths import RunPaths
from launcher.records.store import NodeOfRun, Record
from launcher.run.result import Failure, Outcome
from launcher.run.state import RunState
from launcher.run.watch import messages
from tests.unit.test_record_fuzz import call

RUN = "job-20260101-000000-000a"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Iterator[Sweep]:
    """Return a sweep with one variant, which runs on both of its machines."""
    monkeypatch.chdir(tmp_path)
    pool = {"pool": ["local", "local"], "each": 2}
    keys = {"name": "job", "runtime": "process", "nodes": pool, "run": {"command": ["true"]}}
    made = Sweep(load({**keys, "sweep": [{"lr": 1}], "lost_after": "5s"}), log=said.append)
    (work,) = made._work
    work.run = Run(Record(RunPaths(tmp_path / "runs" / RUN)))
    made._show(work, state=SweepState.RUNNING, nodes=("local-0", "local-1"), run=RUN)
    yield made
    made._machines.close()


def test_a_lost_connection_does_not_make_a_machine_silent(sweep: Sweep) -> None:
    (work,) = sweep._work
    sweep._note(work, messages.NodeAway("local-1", "cut", time.time() - 29))  # time of its last sign of life
    assert work.silent.keys() == {"local-1"}
    work.silent["local-1"] -= 5.1
    with pytest.raises(_LostError):
        sweep._note(work, messages.Tick())
    sweep._note(work, messages.NodeBack("local-1"))
    sweep._note(work, messages.Tick())


def test_who_stops_or_removes_a_variant_is_said(sweep: Sweep, said: list[str]) -> None:
    (work,) = sweep._work
    said.clear()
    for message in (messages.NodeStopped("local-1", "me@host"), messages.NodeRemoved("local-0", "/folder")):
        sweep._note(work, message)
    assert said == [
        "lr=1: me@host is stopping it on local-1, from another terminal",
        "lr=1: what ran on local-0 was removed by another process",
    ]


@pytest.mark.parametrize(("failed", "moves"), [("local-1", True), ("local-0", False)])
def test_a_variant_that_failed_with_its_lost_machine_moves(
    sweep: Sweep, said: list[str], failed: str, moves: bool
) -> None:
    (work,) = sweep._work
    sweep._note(work, messages.NodeAway("local-1", "cut", time.time()))
    failure = Failure(failed, None, None, "stopped responding", "", "")
    sweep._conclude(work, Outcome(RUN, RunState.FAILED, failure))
    assert sweep.variants()[0].state is (SweepState.WAITING if moves else SweepState.FAILED)
    assert (work.earlier == RUN) is moves
    assert any(line.startswith("local-1 stopped responding: lr=1 moves") for line in said) is moves
    sweep.leave()
    assert any(f"launcher down {RUN}" in line for line in said) is moves


def test_only_the_machine_that_does_not_respond_is_excluded(sweep: Sweep, said: list[str]) -> None:
    """Of a resumed sweep: the other machine of the variant may run others meanwhile."""
    (work,) = sweep._work
    lost = NodesFailed([NodeUnreachable("local-1", "the ssh connection to local-1 was lost")])
    sweep._refused(work, Placement(("local-0", "local-1"), 29500), lost)
    assert [line for line in said if "excluded" in line] == [
        "local-1 is excluded until it responds again: the ssh connection to local-1 was lost"
    ]
    moves = "lr=1 moves to another machine; the results of"
    assert f"local-1 did not respond when the sweep was resumed: {moves} {RUN} will be discarded" in said


@pytest.mark.parametrize("where", ["local-1", "node local-1"])
def test_a_machine_that_only_has_the_files_of_a_variant_is_excluded_itself(
    sweep: Sweep, said: list[str], where: str
) -> None:
    """Not the one on which the variant was to be resumed."""
    (work,) = sweep._work
    work.run = None
    sweep._refused(work, Placement(("local-0",), 29500), NodeUnreachable(where, "the ssh connection was lost"))
    assert [line for line in said if "excluded" in line] == [
        "local-1 is excluded until it responds again: the ssh connection was lost"
    ]
    assert sweep.variants()[0].state is SweepState.WAITING


def test_a_run_whose_variant_has_moved_is_listed_as_discarded_whatever_became_of_it(sweep: Sweep) -> None:
    """Until another one runs in its place, it is what it is: a resumed sweep may follow it again."""
    (work,) = sweep._work
    started = [RUN, "job-20260101-000001-000a"]
    for run in started:
        nodes = [NodeOfRun("local-0", "local", 0, run, str(Path.home() / ".launcher" / run), range(1))]
        if run != RUN:
            sweep._give_up(work, "stopped responding")
            assert [row.state for row in recorded_runs()] == ["done"]
        Record.rebuild(run, "process", nodes, group=work.own).finish(
            {"state": "done", "exit_code": 0, "ended_by": "budget"}
        )
    assert [(row.run, row.state) for row in recorded_runs()] == [(RUN, "discarded"), (started[1], "done")]
    listed = {line.split()[0]: line for line in call("runs", "--all")[1].splitlines()}
    assert ["by budget" in listed[run] for run in started] == [False, True]
