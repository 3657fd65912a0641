"""Variants of code: revisions of the user's repository, and folders; a variant that runs again has the code it had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.api.jobs import load
from launcher.errors import JobInvalid
from launcher.features.sweeps.codes import resolved_sweep
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
    asked = [f"{first[:8]} (main~1)", f"{second[:8]} (main)", "../tree"]
    assert all(f"\n{name}  " in table for name in asked)  # of its last table
    assert f"code: 1 file, 4 B, of {asked[0]}" in table
    assert [each["label"] for each in ledger(home_cli)] == [f"code={name}" for name in asked]
    assert [each["asked"] for each in ledger(home_cli)] == ["main~1", "main", None]
    for shown in (home_cli("status", "codes"), home_cli("runs", "codes"), home_cli("compare", "codes")):
        assert all(f"code={name} " in shown.stdout for name in asked)
    known = ledger(home_cli)
    assert [(each["variant"], each["revision"], each["state"]) for each in known] == [
        (names[0], first, "done"),
        (names[1], second, "failed"),
        (names[2], None, "done"),
    ]
    assert [each["values"]["code"] for each in known] == [first[:8], second[:8], "../tree"]
    assert known[1]["changes"].splitlines()[0].split() == ["word", "|", "2", "+-"]
    assert len({each["code"] for each in known}) == 3

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
    assert f"code={third[:8]} (main) " in home_cli("runs", "codes").stdout

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


def test_the_commit_of_a_revision_is_shown_of_each_variant(home_cli: Cli) -> None:
    """It may have moved when one is run again; the second one fails until `go` is there."""
    here = home_cli.cwd
    go = here.parent / "go"
    git(here, "init", "--quiet", "--initial-branch", "main")
    first = commit(here, {"word": "one\n"})[:8]
    run = {"command": ["sh", "-c", f"[ $2 = 1 ] || test -e '{go}'", "sh"]}
    keys: dict[str, Any] = {"runtime": "process", "nodes": {"pool": ["local"]}, "run": run, "revision": "HEAD"}
    job = home_cli.job("codes", **keys, sweep={"grid": {"lr": [1, 2]}})
    table = home_cli("up", job, code=1).stderr
    assert f"code={first} (HEAD) lr=1: done" in table
    assert "code  " not in table  # of its last table: all have the same one
    second = commit(here, {"word": "two\n"})[:8]
    go.touch()
    added = home_cli("up", job, "--into", "codes", "--set", "run.args.lr=3", "-d").stderr
    home_cli("logs", home_cli.runs()[-1].name)
    names = [f"code={first} (HEAD) lr=1", f"code={second} (HEAD) lr=2", f"code={second} (HEAD) lr=3"]
    assert f"({names[2]}) runs on local" in added
    table = home_cli("up", job, "--resume", "codes").stderr
    last = table[table.index("3 done") :].splitlines()
    assert [line.split()[:3] for line in last[2:5]] == [[name.split()[0][5:], "(HEAD)", name[-1]] for name in names]
    assert [each["label"] for each in ledger(home_cli)] == names
    assert [each["variant"] for each in ledger(home_cli)][:2] == ["lr=1", "lr=2"]
    for shown in (home_cli("status", "codes"), home_cli("runs", "codes"), home_cli("compare", "codes")):
        assert all(f"{name} " in shown.stdout for name in names), shown.stdout


def test_all_variants_of_a_folder_have_what_it_was_when_the_first_one_started(home_cli: Cli) -> None:
    tree = home_cli.cwd.parent / "tree"
    tree.mkdir()
    (tree / "word").write_text("first\n")
    run = {"command": ["sh", "-c", f"cat word; echo later >'{tree}/word'"]}
    sweep = {"code": ["../tree"], "grid": {"lr": [1, 2]}}
    home_cli("up", home_cli.job("codes", runtime="process", nodes={"pool": ["local"]}, run=run, sweep=sweep))
    said = [home_cli("logs", each.name, "--no-follow").stdout for each in home_cli.runs()]
    assert said == ["first\n", "first\n"]
    assert len({each["code"] for each in ledger(home_cli)}) == 1


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


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ({"script": "main.py"}, "run.script: no such file: {}/main.py"),
        ({"command": ["python3", "./main.py"]}, "{} has no ./main.py, which the job starts"),
        ({"module": "main"}, "{} has no main, which the job starts"),
    ],
)
def test_folders_without_the_program_are_refused_with_one_error(
    run: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        (tmp_path / name).mkdir()
    for file in ("main.py", "b/main.py"):
        (tmp_path / file).touch()
    codes = [str(tmp_path / name) for name in "abc"]
    keys = {"name": "x", "runtime": "process", "nodes": ["local"], "run": run}
    with pytest.raises(JobInvalid) as told:
        resolved_sweep(load({**keys, "sweep": {"code": codes, "grid": {"lr": [1, 2]}}}), None)
    assert [line for line in str(told.value).splitlines() if says.format(codes[0]) in line]
    assert [line for line in str(told.value).splitlines() if says.format(codes[2]) in line]
    assert len(str(told.value).splitlines()) == 2
    resolved_sweep(load({**keys, "sweep": {"code": codes[1:2]}}), None)


def test_what_no_code_has_may_be_in_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    trainer = {"module": "train", "args": {"data": "x"}}
    for run in ({"command": ["python3", "tool.py"]}, {"module": "tool"}, trainer):
        job = load(
            {"name": "x", "runtime": "process", "nodes": ["local"], "run": run, "sweep": {"code": ["./a", "./b"]}}
        )
        assert resolved_sweep(job, None).codes == job.codes
