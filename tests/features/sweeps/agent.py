"""An agent that changes a program, one experiment after another, as docs/agents.md shows: `agent.py SWEEP COUNT`.

It remembers nothing: each change is chosen by the ledger, and is a commit. The folder has job.yaml and program.py, and
is a git repository.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CHANGED = "RATE = "


def call(*args: str, check: bool = True) -> str:
    command = [sys.executable, "-m", "launcher", *args]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=check).stdout


def git(*args: str) -> str:
    own = ("-c", "user.email=a@b", "-c", "user.name=a", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *own, *args], stdout=subprocess.PIPE, text=True, check=True).stdout


def ledger(sweep: str) -> list[dict[str, Any]]:
    call("fetch", sweep, check=False)  # what has ended since; one that just starts has nothing
    found: list[dict[str, Any]] = json.loads(call("compare", sweep, "--json"))
    return found


def best_rate(known: list[dict[str, Any]]) -> float:
    scalars = [each["scalars"] for each in known if "acc" in each["scalars"]]
    return max(((one["acc"]["max"]["value"], one["rate"]["last"]["value"]) for one in scalars), default=(0.0, 0.0))[1]


def hour(sweep: str, count: int) -> None:
    while len(known := ledger(sweep)) < count:
        rate = best_rate(known) + len(known) + 1  # no rate twice
        program = Path("program.py")
        lines = program.read_text().splitlines()
        program.write_text("\n".join([f"{CHANGED}{rate}", *lines[1:]]))
        git("commit", "--quiet", "--all", "--allow-empty", "--message", f"rate {rate}")
        call("up", "job.yaml", "--into", sweep, "--set", "revision=HEAD", "--wait", "-d", "--json")


if __name__ == "__main__":
    hour(sys.argv[1], int(sys.argv[2]))
