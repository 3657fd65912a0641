"""Claims of plain processes: one owner per name, even with concurrent requests."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from launcher.model.labels import RUN
from launcher.node.process import folders as process_claims


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
    assert not (home / ".launcher" / ".claims").exists()


def test_all_claims_of_the_machine_are_listed(home: Path) -> None:
    assert process_claims.claims() == []
    assert not (home / ".launcher").exists()
    process_claims.claim("gpu-0", {RUN: "a"})
    process_claims.claim("gpu-1", {RUN: "b"})
    assert [(claim.name, claim.labels[RUN]) for claim in process_claims.claims()] == [("gpu-0", "a"), ("gpu-1", "b")]
