"""With min_nodes: the node that ends generations is reported and excluded, or the run ends with its error."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cli import Cli
from tests.e2e.drill import Drill
from tests.e2e.test_elastic import processes_of
from tests.e2e.test_process_runtime import process_job

pytestmark = pytest.mark.timeout(400)


def follow(cli: Cli, program: list[str], nodes: int, least: int, lost_after: str = "5s", **env: str) -> Drill:
    command = [sys.executable, cli.program(program[0]), *program[1:]]
    keys: dict[str, Any] = {"nodes": ["local"] * nodes, "min_nodes": least, "lost_after": lost_after}
    job = process_job(run={"command": command}, **keys)
    job["env"] |= env
    return Drill.follow(cli, "up", cli.job("blame", **job))


def worlds(up: Drill) -> list[str]:
    """Return the report of each generation, by the logs of the nodes with rank 0."""
    return [line for _, line in up.lines if "rank 0 is now on" in line]


def rows(cli: Cli) -> dict[str, Any]:
    return {row["node"]: row for row in cli.result()["nodes"]}


@pytest.mark.slow
def test_a_failing_command_ends_the_run_if_no_quorum_is_left_without_its_node(home_cli: Cli) -> None:
    up = follow(home_cli, ["fails.py", "local-1", "3"], 3, 3)
    up.end(1, timeout=90)
    failure = home_cli.result()["failure"]
    assert (failure["node"], failure["exit_code"]) == ("local-1", 3), str(up)
    assert "3 generations in a row ended with the same error, on local-1: exit code 3" in failure["what"]
    assert [rows(home_cli)[name]["victim"] for name in ("local-0", "local-1", "local-2")] == [True, False, True]
    assert all(row["restarts"] <= 3 for row in rows(home_cli).values()), rows(home_cli)
    assert len(worlds(up)) == 3, str(up)
    home_cli("down")


@pytest.mark.ci
def test_a_programs_own_error_ends_the_run_on_all_nodes(home_cli: Cli) -> None:
    run = {"script": home_cli.program("fails.py"), "args": ["all", "0"]}
    keys: dict[str, Any] = {"nodes": ["local"] * 2, "min_nodes": 2, "lost_after": "5s"}
    up = Drill.follow(home_cli, "up", home_cli.job("bug", **process_job(run=run, **keys)))
    up.end(1, timeout=150)
    failure = home_cli.result()["failure"]
    assert failure["words"].endswith("KeyError: 'dog'")
    assert re.search("3 generations in a row ended with the same error, on local-.*: KeyError: 'dog'$", failure["what"])
    assert all(row["restarts"] <= 3 for row in rows(home_cli).values()), rows(home_cli)
    home_cli("down")


@pytest.mark.slow
def test_a_node_whose_disk_is_full_is_excluded_and_the_others_finish(home_cli: Cli) -> None:
    up = follow(home_cli, ["chain.py", "100", "5", "0.1"], 4, 3, FULL="local-0")
    up.sees("world 3 of 4: local-0 sits out, as generations 1, 2 ended because of it$", timeout=90)
    up.sees("^generation 3 step 5 ")
    output = home_cli("status").stdout
    assert "local-0 sits out, as generations 1, 2 ended because of it" in output
    seen = {node["node"]: node for node in json.loads(home_cli("status", "--json").stdout)["nodes"]}
    assert seen["local-0"]["state"] == "waiting"
    assert re.search("sits out, as generations 1, 2 ended because of this node", seen["local-0"]["last"])
    up.end(0)
    assert len(worlds(up)) == 3, str(up)
    home_cli("down")


def _until(cli: Cli, node: str, words: str) -> None:
    log = Path(cli.env["HOME"], ".launcher", cli.runs()[-1].name, "logs", f"{node}.log")
    deadline = time.monotonic() + 120
    while words not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # a short process that entry.sh starts every second
            os.kill(pid, number)


@pytest.mark.ci
def test_a_flapping_node_is_excluded_and_the_others_finish(home_cli: Cli) -> None:
    """It always comes back just before the others continue without it, and would be rank 0 again."""
    up = follow(home_cli, ["chain.py", "200", "5", "0.1"], 4, 3, lost_after="8s")
    since = time.monotonic()
    for count in range(1, 4):
        up.sees(r"^generation \d+ step [1-9]\d* \w+$", after=since)
        frozen = processes_of(home_cli, "local-0", "^(?!.*supervisor.py)")
        _send(frozen, signal.SIGSTOP)
        if count <= 2:
            _until(home_cli, "local-1", f"generation {count} ended on this node: no message from local-0 for 8 s")
        else:
            time.sleep(9)  # nobody misses it
        since = time.monotonic()
        _send(frozen, signal.SIGCONT)
        if count <= 2:
            up.sees(f"launcher: generation {count + 1}: rank 0 is now on", after=since)
    up.end(0)
    [*before, last] = worlds(up)
    assert len(before) == 2, str(up)
    assert "rank 0 is now on local-1, world 3 of 4: local-0 sits out, as generations 1, 2 ended because of it" in last
    home_cli("down")
