"""Elastic runs: plain processes on this machine, one of which is killed permanently."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.run.watch.observed import DONE_TIMEOUT
from tests.e2e.cli import Cli
from tests.e2e.drill import Drill
from tests.e2e.test_process_runtime import process_job

pytestmark = pytest.mark.timeout(400)


def processes_of(cli: Cli, name: str, pattern: str = "") -> list[int]:
    """Return the PIDs of the node's supervisor and its descendants whose command line matches `pattern`."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()[1:]]
    supervisor = re.compile(rf"supervisor\.py {re.escape(cli.env['HOME'])}/.*/{name}$")
    found = [pid for pid, _, args in rows if supervisor.search(args)]
    assert found
    for pid in found:  # grows during the loop
        found += [child for child, parent, _ in rows if parent == pid]
    return [int(pid) for pid, _, args in rows if pid in found and re.search(pattern, args)]


def kill_node(cli: Cli, name: str) -> None:
    """Kill all processes immediately, so that none is restarted."""
    for pid in processes_of(cli, name):
        with contextlib.suppress(ProcessLookupError):  # it exited because another one was killed
            os.kill(pid, signal.SIGKILL)


def status(cli: Cli) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = json.loads(cli("status", "--json").stdout)["nodes"]
    return nodes


def chain(cli: Cli, name: str, steps: int) -> Drill:
    """Three nodes, one of which may be lost, and a program without torch."""
    run = {"command": [sys.executable, cli.program("chain.py"), str(steps), "5", "0.1"]}
    keys: dict[str, Any] = {"nodes": ["local"] * 3, "min_nodes": 2, "lost_after": "5s"}
    return Drill.follow(cli, "up", cli.job(name, **process_job(run=run, **keys)))


@pytest.mark.ci
def test_a_run_continues_without_the_node_that_had_rank_0(home_cli: Cli) -> None:
    up = chain(home_cli, "chain", 60)
    up.sees("^generation 1 step 12 ")
    kill_node(home_cli, "local-0")
    up.sees("rank 0 is now on local-1, world 2 of 3: local-0 lost at")
    up.end(0)
    steps = [line.split()[1:4:2] for _, line in up.lines if re.match(r"generation \d+ step ", line)]
    assert [int(step) for generation, step in steps if generation == "1"][:12] == [*range(1, 13)]
    second = [int(step) for generation, step in steps if generation == "2"]
    assert second[0] > 10
    assert second == [*range(second[0], 61)]
    assert any("without local-0" in line for _, line in up.messages), str(up)
    home_cli("down", code=None)


@pytest.mark.slow  # the same with a program that needs no torch, above; with the trainer, test_elastic_output.py
@pytest.mark.parametrize(("kind", "lost"), [("script", "local-0"), ("command", "local-2")])
def test_a_torch_program_continues_without_a_node(home_cli: Cli, kind: str, lost: str) -> None:
    command = [home_cli.program("elastic.py"), "60", "5", "0.3"]
    run = {"script": command[0], "args": command[1:]} if kind == "script" else {"command": [sys.executable, *command]}
    keys: dict[str, Any] = {"nodes": ["local"] * 3, "min_nodes": 2, "lost_after": "10s"}
    up = Drill.follow(home_cli, "up", home_cli.job("elastic", **process_job(run=run, **keys)))
    up.sees("^step 12$")
    kill_node(home_cli, lost)
    up.sees(f"rank 0 is now on local-[01], world 2 of 3: {lost} lost at")
    up.end(0)
    starts = [int(line.split()[-1]) for _, line in up.lines if line.startswith("rank 0 begins after step ")]
    assert starts[0] == 0
    assert starts[1] >= 10
    assert any(line == "rank 0 finished with 120780" for _, line in up.lines), str(up)
    assert any(f"without {lost}" in line for _, line in up.messages), str(up)
    home_cli("down", code=None)


@pytest.mark.ci
def test_a_node_that_is_paused_when_the_others_finish_does_not_block_the_launcher(home_cli: Cli) -> None:
    up = chain(home_cli, "paused", 30)
    up.sees("^generation 1 step 12 ")
    # the supervisor continues: `docker pause` does not pause the engine either
    for pid in processes_of(home_cli, "local-2", "^(?!.*supervisor.py)"):
        with contextlib.suppress(ProcessLookupError):  # short-lived, such as sleep
            os.kill(pid, signal.SIGSTOP)
    up.sees("^generation 2 step 30 ")
    up.end(0, timeout=60)
    assert any("without local-2" in line for _, line in up.messages), str(up)
    home_cli("down")


@pytest.mark.slow
def test_a_node_whose_program_is_still_busy_when_the_others_have_exited_is_not_stopped(home_cli: Cli) -> None:
    run = {"script": home_cli.program("elastic.py"), "args": ["12", "5", "0.1"]}
    keys: dict[str, Any] = {"nodes": ["local"] * 3, "min_nodes": 2, "lost_after": "5s"}
    job = process_job(run=run, **keys)
    job["env"]["LINGER"] = str(DONE_TIMEOUT + 15)
    up = Drill.follow(home_cli, "up", home_cli.job("busy", **job))
    up.sees("rank 0 finished")
    [agent] = processes_of(home_cli, "local-0", r"^\S*python\S* \S*/kit/elastic\.py ")
    os.kill(agent, signal.SIGSTOP)  # the others no longer receive its messages, and exit
    started = time.monotonic()
    while (codes := [node["exit_code"] for node in status(home_cli)]).count(0) < 2:
        assert time.monotonic() < started + 60, codes
    time.sleep(DONE_TIMEOUT + 3)
    os.kill(agent, signal.SIGCONT)
    up.end(0)
    assert not any("without" in line for _, line in up.messages), str(up)
    home_cli("down")


@pytest.mark.ci
def test_a_run_of_which_too_few_nodes_are_left_says_so(home_cli: Cli) -> None:
    up = chain(home_cli, "few", 1000)
    up.sees("^generation 1 step 12 ")
    kill_node(home_cli, "local-0")
    up.sees("rank 0 is now on local-1, world 2 of 3: local-0 lost at")
    kill_node(home_cli, "local-2")
    up.end(1)
    failed = next(line for _, line in up.messages if line.startswith("failed "))
    assert "fewer than 2 nodes (min_nodes) were left" in failed, str(up)
    consequence = [line for _, line in up.messages if "terminated as a consequence" in line]
    assert consequence == ["terminated as a consequence: local-1"], str(up)
    home_cli("down", code=None)


@pytest.mark.slow
def test_a_second_loss_ends_the_run_and_keeps_its_checkpoint(home_cli: Cli) -> None:
    run = {"script": home_cli.program("elastic.py"), "args": ["1000", "5", "0.3"]}
    keys: dict[str, Any] = {"nodes": ["local"] * 3, "min_nodes": 2, "lost_after": "10s"}
    up = Drill.follow(home_cli, "up", home_cli.job("twice", **process_job(run=run, **keys)))
    up.sees("^step 12$")
    kill_node(home_cli, "local-0")
    up.sees("rank 0 begins after step 1[0-9]$")
    kill_node(home_cli, "local-2")
    up.end(1)
    print(up)
    kept = Path(home_cli.env["HOME"], ".launcher", home_cli.runs()[-1].name, "checkpoints")
    assert sorted(file.name for file in kept.iterdir()) == ["local-0.json", "local-1.json", "local-2.json"]
    home_cli("down", code=None)
