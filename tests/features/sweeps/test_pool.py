"""Sweeps over a pool: variants run in parallel; failures, a killed launcher, Ctrl-C and resuming."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cli import Cli
from tests.nvidia import Machine, cards
from tests.ports import free_port

pytestmark = pytest.mark.timeout(200)

# Records its start and end in a file; variant 3 fails, the others wait for a file before they exit.
PROGRAM = """
echo begin $2 >>LOG
case "$2" in 3) exit 4;; esac
while [ ! -e GO ]; do sleep 0.05; done
echo end $2 >>LOG
"""


class Job:
    def __init__(self, cli: Cli, nodes: list[str], variants: int) -> None:
        self.log, self.go = cli.cwd / "log.txt", cli.cwd / "go"
        script = PROGRAM.replace("LOG", str(self.log)).replace("GO", str(self.go))
        run = {"command": ["sh", "-c", script, "sh"]}
        sweep = {"grid": {"x": list(range(1, variants + 1))}}
        self.file = cli.job("pool", runtime="process", nodes={"pool": nodes}, run=run, sweep=sweep)

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def most_at_once(self) -> int:
        """Return the largest number of variants that ran at the same time; variant 3 only begins."""
        running = [1 if line.startswith("begin") else -1 for line in self.lines() if line != "begin 3"]
        return max(itertools.accumulate(running))

    def wait_for(self, begun: int) -> None:
        deadline = time.monotonic() + 60
        while sum(line.startswith("begin") for line in self.lines()) < begun:
            assert time.monotonic() < deadline, self.lines()
            time.sleep(0.05)


def events(run: Path) -> list[dict[str, object]]:
    path = run / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def group_of(cli: Cli) -> str:
    return next(str(event["group"]) for event in events(cli.runs()[-1]) if event["event"] == "group")


def wait_until_started(cli: Cli, runs: int) -> None:
    """A program begins shortly before its launcher records the start; a start without a record is repeated."""
    deadline = time.monotonic() + 60
    while sum(any(event["event"] == "started" for event in events(run)) for run in cli.runs()) < runs:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def states(cli: Cli, group: str) -> dict[str, str]:
    return {row["label"]: row["state"] for row in json.loads(cli("compare", group, "--json").stdout)}


def now(cli: Cli, group: str) -> dict[str, dict[str, Any]]:
    """The rows of `status`, by variant."""
    return {row["variant"]: row for row in json.loads(cli("status", group, "--json", code=None).stdout)}


def test_as_many_variants_run_at_once_as_there_are_machines(home_cli: Cli) -> None:
    job = Job(home_cli, ["local"] * 3, variants=6)
    up = home_cli.start("up", job.file)
    job.wait_for(begun=4)  # the failed one makes room for the next one
    job.go.touch()
    _, messages = up.communicate(timeout=60)
    assert up.returncode == 1, messages
    assert Counter(job.lines()) == Counter([f"begin {x}" for x in range(1, 7)] + [f"end {x}" for x in (1, 2, 4, 5, 6)])
    assert job.most_at_once() == 3
    assert "x=3: failed, local-" in messages
    assert "5 done, 1 failed" in messages
    assert ": 6 variants on 1 machine\n" in messages
    assert set(re.findall("running on (.*?):", messages)) == {"local-0", "local-1", "local-2"}
    done = states(home_cli, group_of(home_cli))
    assert done == {f"x={x}": "failed" if x == 3 else "done" for x in range(1, 7)}
    first = json.loads(home_cli("compare", "--json").stdout)[0]
    assert (first["values"], first["code"] is None, first["seconds"] > 0) == ({"x": "1"}, False, True)
    assert json.loads(home_cli("compare", "--json").stdout) == json.loads(
        home_cli("compare", group_of(home_cli), "--json").stdout
    )  # the latest sweep

    (elsewhere := home_cli.cwd / "elsewhere").mkdir()
    failed = next(run for run in home_cli.runs() if json.loads((run / "result.json").read_text())["state"] == "failed")
    for name in ((), ("pool",), (group_of(home_cli),)):
        seen = Cli(elsewhere, home_cli.env)("runs", *name, "--nodes", "local")
        assert failed.name not in seen.stdout  # its container is removed
        not_listed = f"not listed: 1 run with files on these nodes, but without a container: {failed.name}"
        doubt = "a variant that is listed may have its latest run among them"
        assert f"{not_listed}; {doubt}; to list them: launcher runs, in" in seen.stderr


def test_clean_names_the_variants_of_output_folders(home_cli: Cli) -> None:
    run = {"command": ["sh", "-c", 'echo "$2" >"$LAUNCHER_OUTPUT/value"', "sh"]}
    home_cli("up", home_cli.job("own", runtime="process", nodes=["local"], run=run, sweep=[{"x": 1}, {"x": 2}]))
    home_cli("down", group_of(home_cli))
    left = home_cli("clean").stdout
    for index, run_folder in enumerate(home_cli.runs(), start=1):
        assert f"/{run_folder.name} (x={index})  " in left
    outputs = json.loads(home_cli("clean", "--json").stdout)[0]["outputs"]
    assert sorted(output["variant"] for output in outputs) == ["x=1", "x=2"]


def test_at_most_as_many_as_asked(home_cli: Cli) -> None:
    job = Job(home_cli, ["local"] * 3, variants=2)
    up = home_cli.start("up", job.file, "--max-parallel", 1)
    job.wait_for(begun=1)
    job.go.touch()
    assert up.wait(60) == 0
    assert job.lines() == ["begin 1", "end 1", "begin 2", "end 2"]


def test_a_port_in_use_keeps_no_variant_waiting(home_cli: Cli) -> None:
    job = Job(home_cli, ["local"], variants=2)
    job.go.touch()
    port = free_port()
    with socket.create_server(("127.0.0.1", port)), socket.socket() as later:
        up = home_cli.start("up", job.file, "--set", f"port={port}")
        assert up.stderr
        while " variants on " not in up.stderr.readline():  # the sweep knows the first one
            assert up.poll() is None
        later.bind(("127.0.0.1", port + 2))  # port of the second variant
        later.listen()
        messages = up.communicate(timeout=60)[1]
    assert up.returncode == 0, messages
    assert f"waiting: local: rendezvous port {port + 2} is in use" in messages
    assert "is excluded" not in messages


@pytest.fixture
def machine(home_cli: Cli, tmp_path: Path) -> Cli:
    """This machine, with a fake nvidia-smi that reports four idle GPUs."""
    (tmp_path / "bin").mkdir()
    Machine(cards(4)).install(tmp_path / "bin")
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SMI_CALLS": str(tmp_path / "calls")}
    return Cli(home_cli.cwd, {**home_cli.env, **path})


def test_each_variant_gets_its_own_idle_gpus(machine: Cli) -> None:
    job = Job(machine, ["local"] * 2, variants=2)
    up = machine.start("up", job.file, "--set", "gpus=2")
    job.wait_for(begun=2)
    job.go.touch()
    messages = up.communicate(timeout=60)[1]
    assert up.returncode == 0, messages
    assert "waiting" not in messages
    plans = [json.loads((run / "plan.json").read_text()) for run in machine.runs()]
    assert len({gpu for plan in plans for gpu in plan["nodes"][0]["container"]["gpus"]}) == 4
    assert len(plans) == 2


def test_tries_while_a_gpu_is_in_use_leave_no_runs(machine: Cli) -> None:
    job = Job(machine, ["local"] * 2, variants=2)
    up = machine.start("up", job.file)  # each of them takes all GPUs
    assert up.stderr
    seen = []
    while not any("waiting" in line for line in seen):
        seen.append(up.stderr.readline())
        assert up.poll() is None, seen
    job.wait_for(begun=1)
    deadline = time.monotonic() + 60
    while len(machine.runs()) > 1:  # until the other one is rolled back
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.go.touch()
    messages = up.communicate(timeout=60)[1]
    assert up.returncode == 0, messages
    assert len(machine.runs()) == 2


@pytest.mark.ci
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "left"])
def test_a_resumed_sweep_repeats_nothing(home_cli: Cli, how: signal.Signals) -> None:
    job = Job(home_cli, ["local"] * 2, variants=5)
    job.go.touch()
    home_cli("up", job.file, "--set", "sweep=[{x: 1}]")
    job.go.unlink()
    group = group_of(home_cli)
    up = home_cli.start("up", job.file, "--resume", group)  # 1 has a result already
    job.wait_for(begun=4)  # 1, and now 2, then 3, which fails, and 4
    wait_until_started(home_cli, runs=4)
    up.send_signal(how)
    _, messages = up.communicate(timeout=60)
    if how is signal.SIGINT:
        assert up.returncode == 0
        assert "still running: x=2 on local-0, x=4 on local-1" in messages
        assert "not started: x=5" in messages
        assert f"launcher up {job.file} --resume {group}" in messages
    shown = home_cli("runs")
    assert "1 not started" in shown.stdout
    assert f"no launcher on this machine starts the others: launcher up {job.file} --resume {group}" in shown.stderr
    assert json.loads(home_cli("status", group, "--json").stdout)[-1]["variant"] == "x=5"
    again = home_cli.start("up", job.file, "--resume", group)
    job.go.touch()
    _, messages = again.communicate(timeout=60)
    assert again.returncode == 1, messages
    assert Counter(job.lines()) == Counter(
        [*(f"begin {x}" for x in range(1, 6)), *(f"end {x}" for x in (1, 2, 4, 5)), "begin 3"]
    )  # failed variants are run again


def test_what_ended_while_nobody_followed_is_concluded_before_it_is_run_again(home_cli: Cli) -> None:
    """Each variant exits with the code in a file of its own, once that is there."""
    here = home_cli.cwd
    program = "echo $2 >$LAUNCHER_OUTPUT/own; until [ -s end$2 ]; do sleep 0.05; done; exit $(cat end$2)"
    run = {"command": ["sh", "-c", f"cd '{here}' && {program}", "sh"]}
    keys = {"runtime": "process", "nodes": {"pool": ["local"] * 2}, "sweep": {"grid": {"x": [1, 2]}}}
    job = home_cli.job("pool", run=run, **keys)
    up = home_cli.start("up", job)
    wait_until_started(home_cli, 2)
    up.send_signal(signal.SIGINT)
    assert up.wait(60) == 0
    group = group_of(home_cli)
    (here / "end1").write_text("0")
    (here / "end2").write_text("4")
    deadline = time.monotonic() + 60
    seen = now(home_cli, group)
    while (seen["x=1"]["state"], seen["x=2"]["state"]) != ("done", "failed"):
        assert time.monotonic() < deadline, seen
        seen = now(home_cli, group)
    first = seen["x=2"]["run"]
    (here / "end2").write_text("0")
    messages = home_cli("up", job, "--resume", group).stderr
    assert len(home_cli.runs()) == 3
    assert re.findall("(x=.): running on .*: launcher logs (.*)", messages) == [("x=2", home_cli.runs()[-1].name)]
    assert "x=1: done" in messages
    assert re.search(r"x=2: local-\d: resumes from ", messages)
    assert f"x=2: {first} ended while no launcher followed it (failed, " in messages
    assert "2 done" in messages
    assert json.loads((here / "runs" / first / "result.json").read_text())["state"] == "failed"


def test_what_could_not_be_done_at_the_end_of_a_variant_is_said_with_its_name(home_cli: Cli) -> None:
    """The program takes the place of a recorded result, and no notification can be sent."""
    settings = Path(home_cli.env["HOME"], "settings")
    (settings / "launcher").mkdir(parents=True)
    (settings / "launcher" / "settings.yaml").write_text("notify: {command: ['false']}")
    (settings / "launcher" / "settings.yaml").chmod(0o600)
    program = f"if [ $2 = 1 ]; then mkdir '{home_cli.cwd}'/runs/$LAUNCHER_RUN/result.json; fi"
    keys = {"runtime": "process", "nodes": {"pool": ["local"]}, "sweep": {"grid": {"x": [1, 2]}}}
    job = home_cli.job("pool", run={"command": ["sh", "-c", program, "sh"]}, **keys)
    cli = Cli(home_cli.cwd, {**home_cli.env, "XDG_CONFIG_HOME": str(settings)})
    messages = cli("up", job).stderr
    assert "2 done" in messages
    for x in (1, 2):
        assert f"warning: x={x}: notification failed: notify.command false: exit code 1" in messages
    first = home_cli.runs()[0].name
    assert f"warning: x=1: not downloaded: runs/{first}/result.json was not written: " in messages


@pytest.mark.ci
@pytest.mark.parametrize("name", ["create", "start"])
def test_a_variant_whose_start_was_interrupted_is_started_again(home_cli: Cli, name: str) -> None:
    job = Job(home_cli, ["local"] * 2, variants=2)
    job.go.touch()
    killed = (sys.executable, "-m", "tests.e2e.killed", f"before:{name}_process:2")
    Cli(home_cli.cwd, home_cli.env, killed)("up", job.file, "--max-parallel", 1, code=-signal.SIGKILL)
    group = group_of(home_cli)
    done = home_cli("up", job.file, "--resume", group)
    assert job.lines() == ["begin 1", "end 1", "begin 2", "end 2"]
    assert "2 done" in done.stderr
    assert states(home_cli, group) == {"x=1": "done", "x=2": "done"}
    ended = json.loads(home_cli("status", home_cli.runs()[1].name, "--json").stdout)
    assert ended["state"] == "stopped", ended


def test_a_sweep_that_another_launcher_runs_is_not_resumed_beside_it(home_cli: Cli) -> None:
    """Both would start the same variants; a suspended launcher goes on later. What a killed one held is free."""
    job = Job(home_cli, ["local"], variants=2)
    up = home_cli.start("up", job.file)
    wait_until_started(home_cli, 1)
    up.send_signal(signal.SIGSTOP)
    group = group_of(home_cli)
    refused = home_cli("up", job.file, "--resume", group, code=2).stderr
    assert f"sweep {group}: another launcher runs its variants" in refused
    up.kill()
    assert up.wait(60) == -signal.SIGKILL
    job.go.touch()
    home_cli("up", job.file, "--resume", group)
    assert job.lines() == ["begin 1", "end 1", "begin 2", "end 2"]
    assert not list(Path(home_cli.env["XDG_CACHE_HOME"]).rglob("*.lock"))


def test_a_second_ctrl_c_stops_what_runs(home_cli: Cli) -> None:
    job = Job(home_cli, ["local"] * 2, variants=5)
    up = home_cli.start("up", job.file)
    assert up.stderr
    job.wait_for(begun=2)
    up.send_signal(signal.SIGINT)
    for line in up.stderr:
        if "Ctrl-C again" in line:
            break
    up.send_signal(signal.SIGINT)
    messages = up.stderr.read()
    assert up.wait(60) == 5, messages
    assert not subprocess.run(["pgrep", "-f", str(job.log)], capture_output=True, check=False).stdout
    assert Counter(states(home_cli, group_of(home_cli)).values()) == {"stopped": 2, "not started": 3}
    ledger = json.loads(home_cli("compare", group_of(home_cli), "--json").stdout)
    assert [each["seconds"] is not None for each in ledger] == [each["run"] is not None for each in ledger]


def test_a_group_that_is_no_sweep_is_refused(home_cli: Cli, tmp_path: Path) -> None:
    job = Job(home_cli, ["local"], variants=2)
    refused = home_cli("up", "-d", job.file, code=2)
    assert "nohup launcher up" in refused.stderr
    assert "start when a machine of the pool is free" in refused.stderr
    refused = home_cli("up", job.file, "--resume", "pool-20260101-000000-0000", code=2)
    assert "is not a sweep recorded here" in refused.stderr


def test_a_sweep_that_is_resumed_by_another_job_is_told(home_cli: Cli) -> None:
    job = Job(home_cli, ["local"], variants=2)
    job.go.touch()
    first = ("up", job.file, "--set", "sweep=[{x: 1}]", "--set", "env.RATE=0.1")
    home_cli(*first)
    group = group_of(home_cli)
    refused = home_cli("up", job.file, "--resume", group, "--set", "name=other", code=2).stderr
    assert f"{group} is a sweep of pool, and this job is other" in refused
    assert len(home_cli.runs()) == 1
    same = home_cli(*first, "--resume", group).stderr
    assert "has changed" not in same
    assert "not in the job" not in same
    known = json.loads((home_cli.cwd / "runs" / ".sweeps" / f"{group}.json").read_text())
    assert known["options"] == [*first[2:]]
    messages = home_cli("up", job.file, "--resume", group, "--set", "env.RATE=0.2").stderr
    assert f"the job has changed since {group} was started: RATE=0.2 (0.1 before)" in messages
    assert "not in the job" not in messages
    fewer = home_cli("up", job.file, "--resume", group, "--set", "sweep=[{x: 2}]").stderr
    assert f"variants of {group} that are not in the job are left as they are: x=1\n" in fewer


@pytest.mark.ci
def test_a_variant_that_was_started_is_not_started_again(home_cli: Cli) -> None:
    """Its launcher was killed before it could record the start; the sweep is found by the job's name."""
    job = Job(home_cli, ["local"] * 2, variants=2)
    killed = (sys.executable, "-m", "tests.e2e.killed", "after:start_process:2")
    Cli(home_cli.cwd, home_cli.env, killed)("up", job.file, "--max-parallel", 2, code=-signal.SIGKILL)
    job.wait_for(begun=2)
    again = home_cli.start("up", job.file, "--resume", "pool")
    job.go.touch()
    messages = again.communicate(timeout=60)[1]
    assert again.returncode == 0, messages
    assert Counter(job.lines()) == Counter(["begin 1", "begin 2", "end 1", "end 2"])
    assert len(home_cli.runs()) == 2
    assert "2 done" in messages
