"""What a hundred variants leave on nodes and here is what docs/sweeps.md says, and `clean` removes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.cli import Cli
from tests.features.sweeps.test_pool import group_of
from tests.repositories import commit, git


def processes(home: Path) -> list[str]:
    """Return the command lines of processes that name this folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if str(home) in text and file.parent.name != str(os.getpid()):
            found.append(text)
    return found


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_what_a_hundred_variants_leave_is_removed(home_cli: Cli) -> None:
    here, home = home_cli.cwd, Path(home_cli.env["HOME"])
    git(here, "init", "--quiet", "--initial-branch", "main")
    commit(here, {"word": "one\n"})
    commit(here, {"word": "two\n"})
    keys = {"runtime": "process", "nodes": {"pool": ["local"] * 4}, "run": {"command": ["sh", "-c", "cat word", "sh"]}}
    job = home_cli.job("night", **keys, sweep={"code": ["main~1", "main"], "grid": {"x": list(range(50))}})
    home_cli("up", job, timeout=2400)
    group, runs = group_of(home_cli), [run.name for run in home_cli.runs()]
    cache = Path(home_cli.env.get("XDG_CACHE_HOME", home / ".cache")) / "launcher"
    assert len(runs) == 100
    assert sorted(path.name for path in (home / ".launcher").iterdir() if path.name != "cache") == sorted(runs)
    assert sorted(path.name for path in (here / "runs").iterdir()) == sorted([*runs, ".sweeps"])
    assert [path.name for path in (here / "runs" / ".sweeps").iterdir()] == [f"{group}.json"]
    assert [*(cache / "sweeps").iterdir()] == [*(cache / "exported").iterdir()] == []
    assert processes(home) == []

    home_cli("down", group, timeout=600)
    home_cli("clean", "--yes", timeout=600)
    assert [path.name for path in (home / ".launcher").iterdir() if path.name != "cache"] == []
    assert sorted(path.name for path in (here / "runs").iterdir()) == sorted([*runs, ".sweeps"])
    assert home_cli("clean").stdout.splitlines() == ["nothing to remove"]
