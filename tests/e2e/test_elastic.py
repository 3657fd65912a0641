"""A run whose nodes may be lost: plain processes on this machine, one of them killed for good."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest

from tests.e2e.cli import Cli
from tests.e2e.test_process_runtime import home_cli, process_job  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(400)


def kill_node(name: str) -> None:
    """Its supervisor and every process below it, at once: nothing starts it again."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()[1:]]
    doomed = [pid for pid, _, args in rows if "supervisor.py" in args and args.endswith(f".node/{name}")]
    assert doomed
    for pid in doomed:
        doomed += [child for child, parent, _ in rows if parent == pid]
    for pid in doomed:
        os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize("lost", ["local-0", "local-2"])
def test_a_run_goes_on_without_a_node(home_cli: Cli, lost: str) -> None:  # noqa: F811 - the fixture
    keys: dict[str, Any] = {"nodes": ["local"] * 3, "min_nodes": 2, "lost_after": "10s", "port": 29750}
    home_cli.program("steps.py")
    job = home_cli.job("elastic", **process_job(run={"script": "steps.py", "args": ["60", "5", "0.3"]}, **keys))
    up = home_cli.start("up", job)
    assert up.stdout is not None
    while "step 10" not in up.stdout.readline():
        pass
    kill_node(lost)
    output, messages = up.communicate(timeout=240)
    assert up.returncode == 0, messages
    assert f"world 2 of 3 without {lost}" in output
    assert "begins after step 10" in output or "begins after step 15" in output
    assert f"without {lost}" in messages
    home_cli("down", code=None)
