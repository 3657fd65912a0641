"""An agent's hour: variants of code on a pool of two, one of which crashes; the agent is killed and started again. The
ledger is what the programs have counted themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.cli import ROOT, Cli

# Its first line is what the agent changes. `log` is written by the programs alone.
PROGRAM = """RATE = 1.0
import json, os, pathlib
log, out = pathlib.Path("LOG"), pathlib.Path(os.environ["LAUNCHER_OUTPUT"])
with log.open("a") as file:
    file.write(json.dumps({"run": os.environ["LAUNCHER_RUN"], "rate": RATE}) + "\\n")
begun = [json.loads(line)["run"] for line in log.read_text().splitlines()].index(os.environ["LAUNCHER_RUN"]) + 1
if begun == 3:
    raise ValueError("loss is nan")
with (out / "metrics.jsonl").open("w") as metrics:
    for step in range(1, 4):
        metrics.write(json.dumps({"kind": "step", "time": 1.0, "step": step, "rate": RATE, "acc": RATE * step}) + "\\n")
"""
COUNT = 4  # variants


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_the_ledger_of_an_agents_hour_is_what_its_programs_counted(home_cli: Cli) -> None:
    log = home_cli.cwd.parent / "log"
    (home_cli.cwd / "program.py").write_text(PROGRAM.replace("LOG", str(log)))
    keys = {"runtime": "process", "nodes": {"pool": ["local"] * 2}, "sweep": [["first"]]}
    job = home_cli.job("hour", **keys, run={"command": ["python3", "program.py"]})
    job.rename(job.with_name("job.yaml"))
    home_cli("up", "job.yaml")
    environ = {**os.environ, **home_cli.env, "PYTHONPATH": str(ROOT)}
    call = [sys.executable, str(Path(__file__).with_name("agent.py")), "hour", str(COUNT)]

    def begun() -> list[dict[str, object]]:
        return [json.loads(line) for line in log.read_text().splitlines()]

    agent = subprocess.Popen(call, cwd=home_cli.cwd, env=environ, stderr=subprocess.PIPE)
    while len(begun()) < COUNT // 2:
        assert agent.poll() is None
        time.sleep(0.05)
    agent.kill()
    agent.communicate(timeout=300)  # until the `up` that it had called has ended, too
    subprocess.run(call, cwd=home_cli.cwd, env=environ, check=True)
    for run in home_cli.runs():
        home_cli("logs", run.name, code=None)  # until it has ended
    home_cli("fetch", "hour")
    ledger = json.loads(home_cli("compare", "hour", "--json").stdout)
    assert COUNT <= len(ledger) <= COUNT + 2
    assert sorted(each["run"] for each in ledger) == sorted(str(line["run"]) for line in begun())
    rates = {line["run"]: line["rate"] for line in begun()}
    assert len({*rates.values()}) == len({each["code"] for each in ledger})
    crashed = begun()[2]["run"]
    for each in ledger:
        if each["run"] == crashed:
            assert (each["state"], each["scalars"]) == ("failed", {})
            assert "ValueError: loss is nan" in each["failure"]["what"]
            continue
        assert each["state"] == "done"
        assert each["scalars"]["rate"]["last"]["value"] == rates[each["run"]]
        assert each["scalars"]["acc"]["max"] == {"step": 3, "value": pytest.approx(3 * rates[each["run"]])}
