"""Callers that lack what most have: a name for their uid, as in a container; HOME, as in a service of systemd."""

from __future__ import annotations

import os
import pwd
import sys
import tempfile
from pathlib import Path

import pytest

from launcher.model.home import user_name, with_home
from launcher.node.machine import LocalMachine
from tests.e2e.cli import Cli

UID = 54321


def test_a_uid_without_a_name_runs_a_job() -> None:
    if os.geteuid() != 0:
        pytest.skip("becomes another user")
    rights = "+dac_override,+dac_read_search"  # to read this tree
    other = ("setpriv", f"--reuid={UID}", "--clear-groups", f"--inh-caps={rights}", f"--ambient-caps={rights}")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to others
        project, home = Path(folder, "project"), Path(folder, "home")
        for path in (Path(folder), project, home):
            path.mkdir(exist_ok=True)
            os.chown(path, UID, UID)
        command = (*other, "env", "-u", "USER", "-u", "LOGNAME", sys.executable, "-m", "launcher")
        cli = Cli(project, {"HOME": str(home)}, command)
        job = cli.job("job", runtime="process", nodes=["local", "local"], gpus="none", run={"command": ["id", "-u"]})
        assert cli("up", job).stdout == f"{UID}\n"
        assert "0 failures" in cli("doctor", job).stdout
        assert f"by {UID}@" in cli("status").stdout
        cli("down", "--purge")


def test_a_caller_without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert LocalMachine("local", user_name()).script('echo "$HOME"').out.decode() == f"{home}\n"
    assert with_home({"A": "b"}) == {"A": "b", "HOME": home}
    assert with_home({"HOME": "/x"}) == {"HOME": "/x"}
    assert with_home({"HOME": "relative"}) == {"HOME": "relative"}  # refused where it is needed
