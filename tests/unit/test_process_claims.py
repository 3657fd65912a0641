"""Claims of plain processes: one owner per name, even with concurrent requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.errors import InUse
from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.labels import RUN
from launcher.node.process import folders as process_claims
from launcher.node.process.engine import ProcessEngine
from launcher.planning.checks import wait_or_stop
from launcher.run.begin.claims import claim_all, claimed
from tests.ports import free_port
from tests.unit.test_plan import job, node, planned


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_exactly_one_of_many_gets_the_claim() -> None:
    got: list[str] = []

    def ask(run: str) -> None:
        if process_claims.claim("gpu-0", {RUN: run}) is None:
            got.append(run)

    threads = [threading.Thread(target=ask, args=(f"run-{i}",)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    holder = process_claims.claim("gpu-0", {RUN: "late"})
    assert holder is not None
    assert holder.labels[RUN] == got[0]


@pytest.mark.parametrize(("run", "listens"), [({"module": "train"}, True), ({"command": ["a"]}, False)])
def test_a_single_node_locks_its_port_if_torchrun_listens(run: dict[str, object], listens: bool) -> None:
    port = free_port()  # `claim_all` looks at the ports of this machine
    plan = planned(job(1, run=run, port=port), [node(0)])
    claim_all(ProcessEngine(plan.master.node), plan)
    assert [claim.name for claim in process_claims.claims()] == [f"launcher-port-{port}"] * listens


def test_two_doctors_do_not_measure_a_node_at_the_same_time() -> None:
    """Whichever locks the node first has it, until its container is gone. The advice is not to take it down."""

    class Used(ProcessEngine):
        def list(self, wanted: Mapping[str, str | None]) -> Sequence[ContainerState]:
            return [state] if wanted.keys() == {labels.RUN, labels.NODE} else super().list(wanted)

    plans, port = [], free_port()
    for run in ("doctor-20260101-000000-aaaa", "doctor-20260101-000000-bbbb"):
        made = planned(job(1, port=port), [node(0)])
        marks = {name: text.replace(made.run, run) for name, text in made.master.container.labels.items()}
        marks[labels.PURPOSE] = "bench"
        container = replace(made.master.container, labels=marks)
        plans.append(replace(made, nodes=(replace(made.master, container=container),)))
    first, second = plans
    state = ContainerState("c", "c", "", first.master.container.labels, Phase.RUNNING)
    engine = Used(first.master.node)
    claim_all(engine, first)
    (held,) = claimed(engine)[1]
    assert "down" not in wait_or_stop(held.run, held.hosts, "another")
    with pytest.raises(InUse, match="it is being measured by `doctor --bench` of"):
        claim_all(engine, second)
    state = replace(state, phase=Phase.EXITED)
    claim_all(engine, second)


def test_a_claim_is_released_only_by_its_own_id(home: Path) -> None:
    process_claims.claim("gpu-0", {RUN: "a"})
    old = process_claims.claim("gpu-0", {RUN: "b"})
    assert old is not None
    process_claims.release(lambda claim: claim.id == old.id)
    assert process_claims.claim("gpu-0", {RUN: "c"}) is None
    process_claims.release(lambda claim: claim.id == old.id)  # that one is gone; c's stays
    assert process_claims.claim("gpu-0", {RUN: "d"}) is not None
    process_claims.claim("gpu-1", {RUN: "c"})
    process_claims.release(lambda claim: claim.labels[RUN] == "c")
    assert not list((home / ".launcher").iterdir())


def test_machines_with_the_same_home_have_their_own_claims(home: Path) -> None:
    theirs = home / ".launcher" / ".claims-another-machine" / "port-29500"
    theirs.parent.mkdir(parents=True)
    theirs.write_text(json.dumps({RUN: "a"}))
    assert process_claims.claims() == []
    assert process_claims.claim("port-29500", {RUN: "b"}) is None
    process_claims.release(lambda _: True)
    assert theirs.exists()


def test_earlier_launchers_find_no_folder_among_their_claims(home: Path) -> None:
    """They read everything in .claims as a file."""
    process_claims.claim("gpu-0", {RUN: "a"})
    assert not (home / ".launcher" / ".claims").exists()


@pytest.mark.parametrize("text", ["", '{"launcher.run": "a', "[]", "null", "\xff"])
def test_a_claim_of_which_a_full_disk_kept_a_part_is_not_held(text: str) -> None:
    process_claims.claim("gpu-0", {RUN: "a"})
    process_claims.claim("gpu-1", {RUN: "b"})
    (process_claims.root() / f".claims-{process_claims.machine_id()}" / "gpu-0").write_text(text)
    assert [claim.name for claim in process_claims.claims()] == ["gpu-1"]
    assert process_claims.claim("gpu-0", {RUN: "c"}) is None
    process_claims.release(lambda claim: claim.labels[RUN] == "b")
    assert [claim.labels[RUN] for claim in process_claims.claims()] == ["c"]


def test_all_claims_of_the_machine_are_listed(home: Path) -> None:
    assert process_claims.claims() == []
    assert not (home / ".launcher").exists()
    process_claims.claim("gpu-0", {RUN: "a"})
    process_claims.claim("gpu-1", {RUN: "b"})
    assert [(claim.name, claim.labels[RUN]) for claim in process_claims.claims()] == [("gpu-0", "a"), ("gpu-1", "b")]
