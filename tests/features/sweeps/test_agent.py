"""An agent's hour: variants of code on a pool of two, one of which crashes and one hangs; the agent is killed and
started again. The ledger is what the programs have counted themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cli import ROOT, Cli
from tests.repositories import git

# Its first line is what the agent changes. `log` is written by the programs alone.
PROGRAM = """RATE = 1.0
import json, os, pathlib, time
log, out = pathlib.Path("LOG"), pathlib.Path(os.environ["LAUNCHER_OUTPUT"])
with log.open("a") as file:
    file.write(json.dumps({"run": os.environ["LAUNCHER_RUN"], "rate": RATE}) + "\\n")
begun = [json.loads(line)["run"] for line in log.read_text().splitlines()].index(os.environ["LAUNCHER_RUN"]) + 1
if begun == CRASHES:
    raise ValueError("loss is nan")
if begun == HANGS:
    with (out / "metrics.jsonl").open("w") as metrics:
        metrics.write(json.dumps({"kind": "step", "time": 1.0, "step": 1, "rate": RATE, "acc": 0.0}) + "\\n")
    time.sleep(3600)
with (out / "metrics.jsonl").open("w") as metrics:
    for step in range(1, 4):
        metrics.write(json.dumps({"kind": "step", "time": 1.0, "step": step, "rate": RATE, "acc": RATE * step}) + "\\n")
"""
CRASHES, HANGS = 3, 6  # the programs, in the order in which they begin


@pytest.mark.parametrize("count", [pytest.param(4, marks=pytest.mark.ci), pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_the_ledger_of_an_agents_hour_is_what_its_programs_counted(home_cli: Cli, count: int) -> None:
    log = home_cli.cwd.parent / "log"
    program = PROGRAM.replace("LOG", str(log)).replace("CRASHES", str(CRASHES)).replace("HANGS", str(HANGS))
    (home_cli.cwd / "program.py").write_text(program)
    keys: dict[str, Any] = {"runtime": "process", "nodes": {"pool": ["local"] * 2}, "sweep": [["first"]]}
    keys |= {"budget": "30s"} if count >= HANGS else {}
    job = home_cli.job("hour", **keys, run={"command": ["python3", "program.py"]})
    job.rename(job.with_name("job.yaml"))
    git(home_cli.cwd, "init", "--quiet")
    git(home_cli.cwd, "add", "program.py")
    git(home_cli.cwd, "commit", "--quiet", "--message", "first")
    home_cli("up", "job.yaml")
    environ = {**os.environ, **home_cli.env, "PYTHONPATH": str(ROOT)}
    call = [sys.executable, str(Path(__file__).with_name("agent.py")), "hour", str(count)]

    def begun() -> list[dict[str, object]]:
        return [json.loads(line) for line in log.read_text().splitlines()]

    agent = subprocess.Popen(call, cwd=home_cli.cwd, env=environ, stderr=subprocess.PIPE)
    while len(begun()) < count // 2:
        assert agent.poll() is None
        time.sleep(0.05)
    agent.kill()
    agent.communicate(timeout=300)  # until the `up` that it had called has ended, too
    subprocess.run(call, cwd=home_cli.cwd, env=environ, check=True)
    for run in home_cli.runs():
        home_cli("logs", run.name, code=None)  # until it has ended
    home_cli("fetch", "hour")
    ledger = json.loads(home_cli("compare", "hour", "--json").stdout)
    assert count <= len(ledger) <= count + 2
    assert sorted(each["run"] for each in ledger) == sorted(str(line["run"]) for line in begun())
    rates = {line["run"]: line["rate"] for line in begun()}
    assert len({*rates.values()}) == len({each["code"] for each in ledger})
    runs = {number: line["run"] for number, line in enumerate(begun(), 1)}
    for each in ledger:
        if each["revision"] is not None:
            program = git(home_cli.cwd, "show", f"{each['revision']}:program.py")
            assert program.startswith(f"RATE = {rates[each['run']]}\n")
            assert each["variant"].startswith(f"code={each['revision'][:8]}")
        assert each["ended_by"] == ("budget" if each["run"] == runs.get(HANGS) else None)
        if each["run"] == runs[CRASHES]:
            assert (each["state"], each["scalars"]) == ("failed", {})
            assert "ValueError: loss is nan" in each["failure"]["what"]
            continue
        assert each["state"] == "done"
        assert each["scalars"]["rate"]["last"]["value"] == rates[each["run"]]
        if each["run"] == runs.get(HANGS):
            assert each["scalars"]["acc"]["last"] == {"step": 1, "value": 0.0}
            continue
        assert each["scalars"]["acc"]["max"] == {"step": 3, "value": pytest.approx(3 * rates[each["run"]])}
