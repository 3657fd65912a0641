"""How long a program may save a checkpoint after SIGTERM: the limits of all layers, and what is said if one is over."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import launcher
from launcher import container_scripts
from launcher.features.kubernetes import manifests
from launcher.node.process import supervisor
from launcher.planning.command import SAVING
from launcher.run.end import stop
from tests.e2e.cli import Cli
from tests.ports import free_port
from train import deadline

SAVES = """
import os, signal, sys, time
def save(*_):
    time.sleep(float(sys.argv[1]))
    open(os.environ["LAUNCHER_OUTPUT"] + "/saved", "w").close()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True: time.sleep(0.1)
"""


def saving(cli: Cli, seconds: float, **keys: object) -> Path:
    (cli.cwd / "saves.py").write_text(SAVES)
    run = {"script": "saves.py", "args": [str(seconds)]}
    cli("up", "-d", cli.job("saves", runtime="process", nodes=["local"], run=run, **keys))
    cli.until_logged("ready")
    return Path(cli.env["HOME"], ".launcher", cli.runs()[-1].name, "saved")


def test_each_layer_has_more_time_than_the_one_inside_of_it() -> None:
    (ranks,) = map(int, SAVING.values())
    scripts = {name: text.decode() for name, text in container_scripts.scripts().items() if isinstance(text, bytes)}
    assert f'SAVING = "{ranks}"' in scripts["torchrun.py"]
    (entry,) = re.findall(r"^our_grace=(\d+)", scripts["entry.sh"], re.MULTILINE)
    assert deadline.SECONDS < ranks < stop.GRACE == int(entry) == supervisor.GRACE == manifests._GRACE  # noqa: SLF001


@pytest.mark.slow  # it waits
def test_a_save_of_38_s_is_complete(home_cli: Cli) -> None:
    saved = saving(home_cli, 38)
    down = home_cli("down")
    assert saved.exists()
    assert "killed" not in down.stderr


@pytest.mark.ci
def test_a_rank_that_is_killed_while_it_saves_is_named(home_cli: Cli) -> None:
    saved = saving(home_cli, 300, env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"})
    down = home_cli("down")
    assert not saved.exists()
    assert (
        "warning: rank 0 on local did not exit in time after SIGTERM and was killed: what it was saving" in down.stderr
    )
    assert "rank 0 did not exit within 1 s" in home_cli("logs", "--no-follow").stdout


def test_a_program_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(stop, "GRACE", 0.5)
    command = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"]
    keys = {"name": "stays", "runtime": "process", "nodes": ["local"], "run": {"command": command}}
    said: list[str] = []
    with launcher.up({**keys, "port": free_port()}, log=said.append) as run:
        assert next(run.logs()) == "ready"
        run.down()
    assert [line for line in said if line.startswith("warning: local did not exit in time after SIGTERM")] != []


def test_a_node_whose_ranks_had_exited_was_saving_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was killed is torchrun's agent, which waited for the other nodes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(stop, "GRACE", 3.0)
    left = 'mkdir -p "$LAUNCHER_OUTPUT/logs"; : >"$LAUNCHER_OUTPUT/logs/rank-0.log"'  # of a rank that has exited
    command = ["sh", "-c", f"trap '' TERM; {left}; unset RANK; exec sh -c 'echo ready; while :; do sleep 0.1; done'"]
    keys = {"name": "waits", "runtime": "process", "nodes": ["local"], "run": {"command": command}}
    said: list[str] = []
    with launcher.up({**keys, "port": free_port()}, log=said.append) as run:
        assert next(run.logs()) == "ready"
        removed = run.down()
    assert [container.state.exit_code for node in removed for container in node.containers] == [137]
    assert [line for line in said if "did not exit in time" in line] == []
