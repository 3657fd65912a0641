"""`runtime: process` through the CLI: no Docker, two nodes on this machine, the real digits."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cli import ROOT, Cli

pytestmark = pytest.mark.timeout(400)


def process_job(**keys: Any) -> dict[str, Any]:
    return {"runtime": "process", "nodes": ["local", "local"], "env": {"OMP_NUM_THREADS": "1"}, **keys}


def left(cli: Cli) -> list[Path]:
    """The content of ~/.launcher besides output folders."""
    return list(Path(cli.env["HOME"], ".launcher").glob("*/.node"))


def test_quickstart_learns_the_digits_and_collects_its_curves(home_cli: Cli) -> None:
    for name in ("train", "jobs"):
        shutil.copytree(ROOT / name, home_cli.cwd / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = home_cli("up", "jobs/quickstart.yaml", timeout=300)
    accuracy = re.search(r"validation top-1 ([\d.]+) %", done.stderr)
    assert accuracy, done.stderr
    assert float(accuracy[1]) >= 95
    run = home_cli.runs()[-1]
    assert home_cli.result()["state"] == "done"
    assert home_cli.result()["last"]["val"]["images"] == 397
    assert [p.stat().st_size for p in (run / "tensorboard").rglob("*.tfevents.*")]
    down = home_cli("down").stderr
    assert "local-1" in down
    assert left(home_cli) == []


def test_a_training_with_divided_weights_goes_on_with_another_number_of_processes(home_cli: Cli) -> None:
    for name in ("train", "jobs"):
        shutil.copytree(ROOT / name, home_cli.cwd / name, ignore=shutil.ignore_patterns("__pycache__"))
    home_cli("up", "jobs/quickstart_fsdp.yaml", "--set", "run.args.epochs=2", timeout=300)
    first = home_cli.runs()[-1]
    home_cli("fetch", first.name, "--checkpoints")
    assert len(list((first / "checkpoints" / "last.sharded").glob("*.distcp"))) == 2
    sets = ("--set", "run.args.epochs=3", "--set", "processes=3")
    again = home_cli("up", "jobs/quickstart_fsdp.yaml", "--resume", first.name, *sets, timeout=300)
    assert "last.sharded at epoch 3, step 0" in again.stdout
    assert home_cli.result()["state"] == "done"


def test_detaching_and_reattaching_loses_no_line(home_cli: Cli) -> None:
    script = home_cli.program("ticks.py")
    job = home_cli.job("ticks", **process_job(nodes=["local"], run={"command": ["python3", script, "60"]}))
    first = home_cli.start("up", job)
    assert first.stdout is not None
    seen = [first.stdout.readline().strip() for _ in range(5)]
    first.send_signal(signal.SIGINT)
    rest, messages = first.communicate(timeout=30)
    assert first.returncode == 0, messages
    assert "launcher logs ticks-" in messages
    assert "launcher down ticks-" in messages
    again = home_cli("logs")
    assert again.stdout.splitlines() == [f"tick {i}" for i in range(60)]
    assert [*seen, *rest.splitlines()] == again.stdout.splitlines()[: 5 + len(rest.splitlines())]
    assert home_cli.result()["state"] == "done"


def test_a_second_ctrl_c_stops_the_run_and_lets_the_program_save(home_cli: Cli) -> None:
    script = home_cli.program("ticks.py")
    job = home_cli.job("ticks", **process_job(nodes=["local"], run={"command": ["python3", script, "600"]}))
    up = home_cli.start("up", job)
    assert up.stdout is not None
    assert up.stderr is not None
    assert up.stdout.readline() == "tick 0\n"
    up.send_signal(signal.SIGINT)
    while "Ctrl-C again" not in up.stderr.readline():
        pass
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=60)
    assert up.returncode == 5
    log = next(Path(home_cli.env["HOME"], ".launcher").glob("*/logs/local.log")).read_text()
    assert "got SIGTERM, saving" in log
    assert left(home_cli) == []


def test_down_calls_stopped_what_it_stopped_and_gives_the_exit_code_of_what_had_ended(home_cli: Cli) -> None:
    script = home_cli.program("ticks.py")
    home_cli("up", "-d", home_cli.job("runs", **process_job(run={"command": ["python3", script, "600"]})))
    stopped = home_cli("down").stderr
    assert stopped.count("(stopped)") == 2, stopped
    assert "(exit" not in stopped
    home_cli("up", home_cli.job("ends", **process_job(nodes=["local"], run={"command": ["true"]})))
    ended = json.loads(home_cli("down", "--json").stdout)[0]["nodes"][0]["containers"][0]
    assert (ended["exit_code"], ended["stopped"]) == (0, False)
    assert "nothing left of it" in home_cli("down").stderr
    assert left(home_cli) == []


@pytest.mark.parametrize("delay", [0.15, 0.3, 0.45, 0.6, 0.8, 1.0])
def test_ctrl_c_during_start_leaves_a_complete_run_or_nothing(home_cli: Cli, delay: float) -> None:
    script = home_cli.program("ticks.py")
    job = home_cli.job("early", **process_job(run={"command": ["python3", script, "600"]}))
    up = home_cli.start("up", job)
    time.sleep(delay)
    up.send_signal(signal.SIGINT)
    _, messages = up.communicate(timeout=60)
    if up.returncode == 0:  # it was running already: detached, with instructions
        assert "launcher logs early-" in messages
        nodes = json.loads(home_cli("status", "--json").stdout)["nodes"]
        assert [node["state"] for node in nodes] == ["running", "running"]
        home_cli("down")
    else:
        # by the signal, if Python's handler was not installed yet
        assert up.returncode in (5, -signal.SIGINT), messages
        assert "Traceback" not in messages or "launcher/run" not in messages
    assert left(home_cli) == []


def test_output_that_nothing_reads_takes_no_memory(home_cli: Cli) -> None:
    """As of a terminal that is slower than the job."""
    flood = "yes 'a line of some sixty characters, as a program may print them' | head -c 300000000"
    up = home_cli.start(
        "up", home_cli.job("flood", **process_job(nodes=["local"], run={"command": ["sh", "-c", flood]}))
    )
    try:
        for _ in range(5):
            time.sleep(1)
            used = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{up.pid}/status").read_text())
            assert used
            assert int(used[1]) < 150_000
    finally:
        up.kill()
        up.communicate()


def test_a_killed_launcher_loses_nothing(home_cli: Cli) -> None:
    script = home_cli.program("ticks.py")
    job = home_cli.job("ticks", **process_job(nodes=["local"], run={"command": ["python3", script, "40"]}))
    up = home_cli.start("up", job)
    assert up.stdout is not None
    assert up.stdout.readline() == "tick 0\n"
    up.kill()
    up.communicate()
    assert json.loads(home_cli("status", "--json").stdout)["state"] == "running"
    assert home_cli("logs").stdout.splitlines() == [f"tick {i}" for i in range(40)]


def test_a_run_goes_on_from_checkpoints_that_were_fetched(home_cli: Cli) -> None:
    """Its node is gone, or here its folder: what `fetch --checkpoints` brought is carried over."""
    count = "mkdir -p $LAUNCHER_OUTPUT/checkpoints; cd $LAUNCHER_OUTPUT/checkpoints; echo $(cat last) more >last"
    job = home_cli.job("counts", **process_job(nodes=["local"], run={"command": ["sh", "-c", count]}))
    home_cli("up", job)
    home_cli("fetch", "--checkpoints")
    first = home_cli.runs()[-1].name
    homes = Path(home_cli.env["HOME"], ".launcher")
    shutil.rmtree(homes / first)
    home_cli("up", job, "--resume", first)
    assert (homes / home_cli.runs()[-1].name / "checkpoints" / "last").read_text() == "more more\n"
    shutil.rmtree(home_cli.runs()[0] / "checkpoints")
    refused = home_cli("up", job, "--resume", first, code=3)
    assert "has left no checkpoints/ to go on from on local" in refused.stderr
    home_cli("down", "--all")
    assert left(home_cli) == []


def test_secrets_reach_the_program_and_nothing_else(home_cli: Cli) -> None:
    value = "s3cret-value-of-the-test"
    command = ["sh", "-c", f"test ${{#TOKEN}} -eq {len(value)} && echo token is $TOKEN"]
    job = home_cli.job("secret", **process_job(nodes=["local"], secrets=["TOKEN"], run={"command": command}))
    cli = Cli(home_cli.cwd, {**home_cli.env, "TOKEN": value})
    done = cli("up", job)
    assert "token is ***" in done.stdout
    assert value not in cli("plan", job).stdout + cli("status", "--json").stdout
    holders = [path.name for path in cli.cwd.rglob("*") if path.is_file() and value.encode() in path.read_bytes()]
    assert holders == [], "the program's own output is masked too"


def test_a_missing_secret_or_script_is_refused_before_anything_starts(home_cli: Cli) -> None:
    job = home_cli.job("broken", **process_job(secrets=["NOT_THERE"], run={"script": "nowhere.py"}))
    refused = home_cli("up", job, code=2)
    assert "NOT_THERE" in refused.stderr
    assert "nowhere.py" in refused.stderr
    assert "broken.yaml:" in refused.stderr
    assert not home_cli.runs()
    assert not Path(home_cli.env["HOME"], ".launcher").exists()


def test_a_rank_that_raises_is_named(home_cli: Cli) -> None:
    script = home_cli.program("raises.py")
    failed = home_cli("up", home_cli.job("raises", **process_job(run={"script": script})), code=1)
    assert "KeyError: 'dog'" in failed.stderr
    assert "rank 1 on local-1" in failed.stderr
    assert left(home_cli) == []


def test_the_time_limit_is_enforced(home_cli: Cli) -> None:
    script = home_cli.program("ticks.py")
    job = home_cli.job(
        "slow", **process_job(nodes=["local"], timeout="2s", run={"command": ["python3", script, "600"]})
    )
    start = time.monotonic()
    failed = home_cli("up", job, code=1)
    assert time.monotonic() - start < 30
    assert "time limit" in failed.stderr


def test_curves_arrive_while_it_runs(home_cli: Cli) -> None:
    program = home_cli.cwd / "grow.py"
    program.write_text(
        "import os, time, pathlib\n"
        "out = pathlib.Path(os.environ['LAUNCHER_OUTPUT'])\n"
        "with (out / 'events.out.tfevents.1.test').open('ab', buffering=0) as f:\n"
        "    while not (out / 'enough').exists():\n"
        "        f.write(b'x' * 10); time.sleep(0.1)\n"
        "    f.write(b'end')\n"
    )
    job = home_cli.job("grow", **process_job(nodes=["local"], run={"command": ["python3", "grow.py"]}))
    up = home_cli.start("up", job)

    def arrived() -> bytes:
        return b"".join(p.read_bytes() for p in home_cli.cwd.glob("runs/*/tensorboard/events.out.tfevents.1.test"))

    deadline = time.monotonic() + 60
    while not arrived():
        assert time.monotonic() < deadline, "no curves arrived before the end"
        time.sleep(0.1)
    assert not arrived().endswith(b"end")
    Path(home_cli.env["HOME"], ".launcher", home_cli.runs()[-1].name, "enough").touch()
    up.communicate(timeout=60)
    assert up.returncode == 0
    assert re.fullmatch(b"x+end", arrived())


def test_up_imports_neither_torch_nor_docker_for_plain_processes(home_cli: Cli) -> None:
    job = home_cli.job("quick", **process_job(nodes=["local"], run={"command": ["true"]}))
    code = (
        "import sys; from launcher.cli.main import app\n"
        f"sys.argv = ['launcher', 'up', {str(job)!r}]\n"
        "try:\n    app()\n"
        "finally:\n    print('IMPORTED', sorted({'torch', 'docker', 'train'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=home_cli.cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **home_cli.env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "IMPORTED []" in done.stdout, done.stdout + done.stderr
