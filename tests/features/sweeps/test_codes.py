"""Variants of code: revisions of the user's repository, and folders; a variant that runs again has the code it had."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.cli import Cli
from tests.repositories import commit, git

pytestmark = pytest.mark.timeout(300)


def ledger(cli: Cli) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cli("compare", "codes", "--json").stdout)
    return found


@pytest.mark.ci
def test_a_variant_has_its_code_also_when_it_runs_again(home_cli: Cli) -> None:
    """All but the first two words fail until `go` is there."""
    here = home_cli.cwd
    said, go, tree = (here.parent / name for name in ("said", "go", "tree"))
    git(here, "init", "--quiet", "--initial-branch", "main")
    first, second = commit(here, {"word": "one\n"}), commit(here, {"word": "two\n"})
    git(here, "worktree", "add", "--quiet", "--detach", str(tree), first)
    (tree / "word").write_text("tree\n")
    program = f"cat word >> '{said}'; grep -q -e one -e tree word || test -e '{go}'"
    keys: dict[str, Any] = {"runtime": "process", "nodes": {"pool": ["local"] * 2}}
    run = {"command": ["sh", "-c", program]}
    job = home_cli.job("codes", **keys, run=run, sweep={"code": ["main~1", "main", "../tree"]})
    table = home_cli("up", job, code=1).stderr
    assert sorted(said.read_text().split()) == ["one", "tree", "two"]
    names = [f"code={first[:8]}", f"code={second[:8]}", "code=../tree"]
    assert all(name.removeprefix("code=") in table for name in names)
    assert f"code: 1 file, 4 B, of {first[:8]}" in table
    known = ledger(home_cli)
    assert [(each["variant"], each["revision"], each["state"]) for each in known] == [
        (names[0], first, "done"),
        (names[1], second, "failed"),
        (names[2], None, "done"),
    ]
    assert [each["values"]["code"] for each in known] == [first[:8], second[:8], "../tree"]
    assert known[1]["changes"].splitlines()[0].split() == ["word", "|", "2", "+-"]
    assert len({each["code"] for each in known}) == 3
    assert all(name in home_cli("compare", "codes").stdout for name in names)

    third = commit(here, {"word": "three\n"})
    (here / "word").write_text("four\n")  # not committed
    index = here / ".git" / "index"
    before = index.read_bytes()
    for sets in (["revision=main"], ["env.A=1"]):
        made = json.loads(home_cli("up", job, "--into", "codes", "--set", *sets, "-d", "--json").stdout)
        home_cli("logs", made["run"], code=1)
    known = ledger(home_cli)
    assert [(each["variant"], each["revision"]) for each in known[3:]] == [
        (f"code={third[:8]}", third),
        ("env.A=1", None),
    ]

    (here / "word").write_text("five\n")
    go.touch()
    said.unlink()
    home_cli("up", job, "--resume", "codes")
    assert sorted(said.read_text().split()) == ["four", "three", "two"]  # although main has moved
    again = ledger(home_cli)
    assert {each["state"] for each in again} == {"done"}
    assert [(each["variant"], each["code"], each["revision"], each["changes"]) for each in again] == [
        (each["variant"], each["code"], each["revision"], each["changes"]) for each in known
    ]
    assert index.read_bytes() == before
    assert not [*here.parent.rglob("exported/*")]
    assert not [*(here.parent / "cache" / "launcher" / "sweeps").iterdir()]


def test_what_is_no_code_is_refused_before_anything_starts(home_cli: Cli) -> None:
    here = home_cli.cwd
    git(here, "init", "--quiet", "--initial-branch", "main")
    commit(here, {"word": "one\n"})
    run, keys = {"script": "word"}, {"runtime": "process", "nodes": ["local"]}
    job = home_cli.job("codes", **keys, run=run, sweep={"code": ["main", "none"]})
    assert "sweep.code.1: no such revision" in home_cli("up", job, code=2).stderr
    assert "sweep.code.1: no such folder" in home_cli("up", job, "--set", "sweep.code=[main, ./none]", code=2).stderr
    git(here, "rm", "--quiet", "--cached", "word")
    git(here, "commit", "--quiet", "--message", "none")
    told = home_cli("up", job, "--set", "sweep.code=[main~1, main]", code=2).stderr
    assert "run.script: no such file: " in told or "has no file" in told
    assert "remove it" in home_cli("up", job, "--set", "revision=main", "--set", "sweep.code=[main]", code=2).stderr
    assert home_cli.runs() == []
    assert (
        "1 variant; the plan is that of the first"
        in home_cli("plan", job, "--offline", "--set", "sweep.code=[main~1]").stdout
    )
