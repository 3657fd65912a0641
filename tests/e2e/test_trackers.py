"""What experiment trackers write offline comes home with `fetch`, which says how to send it on."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cli import Cli

JOB: dict[str, Any] = {"runtime": "process", "nodes": ["local"]}
WRITES = """
mkdir -p $LAUNCHER_OUTPUT/wandb/offline-run-1 mlruns/0 .trackio models
echo run >$LAUNCHER_OUTPUT/wandb/offline-run-1/run-1.wandb
ln -s offline-run-1 $LAUNCHER_OUTPUT/wandb/latest-run
echo artifact >mlruns/0/model.txt
echo database >mlflow.db
echo database >.trackio/digits.db
echo large >models/weights.pt
"""
PROGRAM = """
import os

import mlflow, trackio, wandb

run = wandb.init(project="digits", dir=os.environ["LAUNCHER_OUTPUT"], mode="offline")
run.log({"loss": 0.5})
run.finish()
with mlflow.start_run():
    mlflow.log_metric("loss", 0.25, step=3)
trackio.init(project="digits")
trackio.log({"loss": 0.125})
trackio.finish()
"""
READ = """
import mlflow, sys

client = mlflow.MlflowClient(sys.argv[1])
print([run.data.metrics for found in client.search_experiments() for run in client.search_runs([found.experiment_id])])
"""


def test_their_files_are_fetched_and_nothing_else_of_the_program(home_cli: Cli) -> None:
    home_cli("up", home_cli.job("tracked", **JOB, run={"command": ["sh", "-c", WRITES]}))
    (folder,) = home_cli.runs()
    assert not (folder / "wandb").exists(), "they may be large: only if they are asked for"
    done = home_cli("fetch")
    assert (folder / "wandb" / "offline-run-1" / "run-1.wandb").read_text() == "run\n"
    assert sorted(path.name for path in (folder / "workdir" / "local").iterdir()) == [".trackio", "mlflow.db", "mlruns"]
    assert commands(done.stdout) == [
        f"wandb sync runs/{folder.name}/wandb/offline-run-*",
        f"mlflow ui --backend-store-uri sqlite:///runs/{folder.name}/workdir/local/mlflow.db",
        f"TRACKIO_DIR=runs/{folder.name}/workdir/local/.trackio trackio show",
    ]
    assert "ignored" not in done.stderr, "wandb's own links"
    assert "downloaded 0 bytes" in home_cli("fetch").stdout
    home_cli("down")


def commands(output: str) -> list[str]:
    return [line.partition("experiment tracker: ")[2] for line in output.splitlines() if "experiment tracker: " in line]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_trackers_themselves_read_what_was_fetched(home_cli: Cli, tmp_path: Path) -> None:
    """With wandb, mlflow and trackio as installed from the index today; nothing is sent anywhere."""
    tools = tmp_path / "venv" / "bin"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([tools / "python", "-m", "pip", "install", "-q", "wandb", "mlflow", "trackio"], check=True)
    (home_cli.cwd / "tracked.py").write_text(PROGRAM)
    command = [str(tools / "python"), "tracked.py"]
    home_cli("up", home_cli.job("tracked", **JOB, env={"TRACKIO_DIR": ".trackio"}, run={"command": command}))
    wandb, mlflow, trackio = commands(home_cli("fetch").stdout)
    (folder,) = home_cli.runs()

    def tool(*argv: object) -> str:
        done = subprocess.run(
            [str(tools / str(argv[0])), *map(str, argv[1:])],
            cwd=home_cli.cwd,
            env={**home_cli.env, "WANDB_MODE": "offline"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.stdout

    (run,) = home_cli.cwd.glob(wandb.removeprefix("wandb sync "))
    assert next(run.glob("*.wandb")).name in tool("wandb", "sync", run.relative_to(home_cli.cwd))
    assert "{'loss': 0.25}" in tool("python", "-c", READ, mlflow.rpartition(" ")[2])
    database = sqlite3.connect(folder / "workdir" / "local" / ".trackio" / "digits.db")
    assert "0.125" in str(database.execute("select * from metrics").fetchall())
    assert trackio.endswith("trackio show")
    home_cli("down")
