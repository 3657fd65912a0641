"""What happens on any day: a closed terminal, a launcher that is killed, nodes that speak another language."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cli import Cli
from tests.e2e.terminal import Person
from tests.e2e.test_crash import killed
from tests.ports import free_port

pytestmark = pytest.mark.timeout(300)


def process_job(**keys: Any) -> dict[str, Any]:
    return {"runtime": "process", "nodes": ["local", "local"], **keys}


def left(cli: Cli) -> list[Path]:
    """Containers and locks."""
    home = Path(cli.env["HOME"], ".launcher")
    return [*home.glob("*/.node/*"), *home.glob(".claims*/*")]


def test_a_closed_terminal_ends_the_launcher_and_not_the_run(home_cli: Cli) -> None:
    home_cli.program("ticks.py")
    job = home_cli.job("ticks", **process_job(nodes=["local"], run={"command": ["python3", "ticks.py", "100"]}))
    person = Person(home_cli, "up", job)
    person.sees("tick 3")
    person.close()
    followed = home_cli("logs")  # to the end
    assert [line for line in followed.stdout.splitlines() if line.startswith("tick")][-1].startswith("tick 99")
    assert home_cli.result()["state"] == "done"
    home_cli("down")
    assert left(home_cli) == []


def test_a_laptop_that_sleeps_until_the_run_has_ended_shows_all_of_it(home_cli: Cli) -> None:
    home_cli.program("ticks.py")
    job = home_cli.job("ticks", **process_job(nodes=["local"], run={"command": ["python3", "ticks.py", "30"]}))
    up = home_cli.start("up", job)
    assert up.stdout is not None
    assert up.stdout.readline() == "tick 0\n"
    up.send_signal(signal.SIGSTOP)
    until = time.monotonic() + 120
    while json.loads(home_cli("status", "--json").stdout)["state"] == "running":
        assert time.monotonic() < until
    up.send_signal(signal.SIGCONT)
    assert up.stdout.read().splitlines() == [f"tick {number}" for number in range(1, 30)]
    assert (up.wait(120), home_cli.result()["state"]) == (0, "done")


@pytest.mark.parametrize("when", ["after:create_process:1", "before:start_process:1", "after:start_process:1"])
def test_a_launcher_that_is_killed_during_the_start_blocks_nothing(home_cli: Cli, when: str) -> None:
    port = free_port()
    job = home_cli.job("starts", **process_job(port=port, run={"command": ["sleep", "600"]}))
    killed(home_cli, when, "up", job)
    assert json.loads(home_cli("status", "--json").stdout)["state"] in ("created", "running")
    home_cli("down", "--all", "--purge")
    assert left(home_cli) == []
    home_cli("up", job, "--set", "run.command=['true']")  # on the same port


@pytest.fixture(scope="module")
def locales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with German and Turkish, for LOCPATH."""
    if not (shutil.which("localedef") and Path("/usr/share/i18n/locales/tr_TR").exists()):
        pytest.skip("needs the package locales")
    folder = tmp_path_factory.mktemp("locales")
    making = [
        subprocess.Popen(["localedef", "-i", name, "-f", "UTF-8", folder / f"{name}.UTF-8"])
        for name in ("de_DE", "tr_TR")
    ]
    assert [one.wait() for one in making] == [0, 0]
    return folder


@pytest.mark.ci
@pytest.mark.parametrize("language", ["de_DE.UTF-8", "tr_TR.UTF-8"])
def test_a_node_may_speak_german_or_turkish(home_cli: Cli, locales: Path, language: str) -> None:
    """Messages, decimal commas, and letters without a dot."""
    cli = Cli(home_cli.cwd, {**home_cli.env, "LOCPATH": str(locales), "LC_ALL": language, "LANGUAGE": ""})
    asked = subprocess.run(["ls", "/none"], capture_output=True, text=True, env={**os.environ, **cli.env}, check=False)
    assert "No such file" not in asked.stderr
    saves = "mkdir -p $LAUNCHER_OUTPUT/checkpoints models; date >$LAUNCHER_OUTPUT/checkpoints/I.pt"
    writes = f"{saves}; sleep 0.1; date >>models/i.pt"
    job = cli.job("words", **process_job(run={"command": ["sh", "-c", f"{writes}; echo epoch; exit $1", "sh", "3"]}))
    failed = cli("up", job, code=1)
    assert "exited with code 3" in failed.stderr
    assert "continue from models/i.pt" in failed.stderr  # written last
    run = cli.runs()[-1].name
    told = cli("up", job, "--resume", run, "--set", "run.command.4='0'").stderr
    assert re.search(r"local-0: resumes from (its own \d files|local-1's models/i.pt)", told), told  # the newer one
    assert json.loads(cli("status", "--json").stdout)["state"] == "done"
    fetched = cli("fetch", "--checkpoints")
    assert "warning" not in fetched.stderr
    assert (cli.runs()[-1] / "checkpoints" / "I.pt").is_file()
    assert len(cli.runs()[-1].joinpath("workdir/local-0/models/i.pt").read_text().splitlines()) == 2
    cli("down", run)
    cli("down")
    assert left(cli) == []
    assert "words" in cli("clean", "--yes", "--unfetched").stdout
    assert not [*Path(cli.env["HOME"], ".launcher").iterdir()]


# As pytorch/examples' imagenet/main.py saves and resumes: in its working directory, by rank 0, with a copy of the best.
IMAGENET = """
import argparse, os, pickle, shutil
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--resume", default="")
args = parser.parse_args()
start = 0
if args.resume:
    if os.path.isfile(args.resume):
        start = pickle.load(open(args.resume, "rb"))["epoch"]
        print(f"=> loaded checkpoint '{args.resume}' (epoch {start})", flush=True)
    else:
        print(f"=> no checkpoint found at '{args.resume}'", flush=True)
for epoch in range(start, args.epochs):
    if os.environ["LAUNCHER_NODE_RANK"] == "0":
        pickle.dump({"epoch": epoch + 1}, open("checkpoint.pth.tar", "wb"))
        shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")
"""


def test_pytorchs_imagenet_example_resumes_on_every_node(home_cli: Cli) -> None:
    (home_cli.cwd / "main.py").write_text(IMAGENET)
    command = ["python3", "main.py", "--epochs", "2", "--resume", "checkpoint.pth.tar"]
    job = home_cli.job("imagenet", **process_job(run={"command": command}))
    assert "no checkpoint found" in home_cli("up", job).stdout
    first = home_cli.runs()[-1].name
    home_cli("down", first)
    home_cli("up", job, "--resume", first, "--set", "run.command.3='4'")
    for node in ("local-0", "local-1"):
        log = (home_cli.runs()[-1] / "logs" / f"{node}.log").read_text()
        assert "=> loaded checkpoint 'checkpoint.pth.tar' (epoch 2)" in log
    home_cli("fetch", "--checkpoints")
    assert (home_cli.runs()[-1] / "workdir" / "local-0" / "model_best.pth.tar").is_file()


RPC = """
import os, torch
import torch.distributed.rpc as rpc
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
if rank == 0:
    print("sum", int(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 2))), flush=True)
rpc.shutdown()
"""


@pytest.mark.ci
def test_torch_rpc_finds_its_peers(home_cli: Cli) -> None:
    (home_cli.cwd / "calls.py").write_text(RPC)
    job = home_cli.job("calls", **process_job(run={"script": "calls.py"}))
    assert "sum 3" in home_cli("up", job).stdout
