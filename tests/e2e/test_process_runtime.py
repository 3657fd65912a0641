"""`runtime: process` through the CLI: no Docker, two nodes on this machine, the real digits."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

import pytest

from tests.e2e.cli import ROOT, Cli, small_disk
from tests.ports import free_port

pytestmark = pytest.mark.timeout(400)


def process_job(**keys: Any) -> dict[str, Any]:
    return {"runtime": "process", "nodes": ["local", "local"], "env": {"OMP_NUM_THREADS": "1"}, **keys}


def own_port() -> tuple[str, str]:
    return "--set", f"port={free_port()}"


def left(cli: Cli) -> list[Path]:
    """Return the content of ~/.launcher except output folders."""
    return list(Path(cli.env["HOME"], ".launcher").glob("*/.node"))


@pytest.mark.ci
def test_quickstart_learns_the_digits_and_collects_its_curves(home_cli: Cli) -> None:
    for name in ("train", "jobs"):
        shutil.copytree(ROOT / name, home_cli.cwd / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = home_cli("up", "jobs/quickstart.yaml", *own_port(), timeout=300)
    accuracy = re.search(r"validation top-1 ([\d.]+) %", done.stderr)
    assert accuracy, done.stderr
    assert float(accuracy[1]) >= 95
    run = home_cli.runs()[-1]
    assert home_cli.result()["state"] == "done"
    assert home_cli.result()["last"]["val"]["images"] == 397
    assert home_cli.result()["apart"] == ""
    assert [p.stat().st_size for p in (run / "tensorboard").rglob("*.tfevents.*")]
    down = home_cli("down").stderr
    assert "local-1" in down
    assert left(home_cli) == []


def test_the_error_of_an_attempt_is_not_told_of_a_later_one_that_says_nothing(home_cli: Cli) -> None:
    program = f"if mkdir again 2>/dev/null; then {quote(sys.executable)} -c 'raise KeyError(7)'; fi; exit 3"
    job = home_cli.job(**process_job(nodes=["local"], restarts=1, run={"command": ["sh", "-c", program]}))
    ended = home_cli("up", job, code=1)
    assert "KeyError: 7" in ended.stdout + ended.stderr
    failure = home_cli.result()["failure"]
    assert (failure["what"], failure["exit_code"]) == ("exited with code 3", 3)
    assert failure["words"] == ""


def test_why_a_program_was_not_started_again_is_told_instead_of_its_earlier_error(home_cli: Cli) -> None:
    """It has replaced a file of the launcher: such a start leaves nothing but a line in the engine's log."""
    pipe = 'cd "$LAUNCHER_OUTPUT/logs"; rm local.clock; mkfifo local.clock'
    program = f"{pipe}; exec {quote(sys.executable)} -c 'raise KeyError(7)'"
    job = home_cli.job(**process_job(nodes=["local"], restarts=1, run={"command": ["sh", "-c", program]}))
    home_cli("up", job, code=1)
    failure, (node,) = home_cli.result()["failure"], home_cli.result()["nodes"]
    assert re.fullmatch(r"exited with code 73: \S.*/logs/local.clock is not a regular file: remove it", failure["what"])
    assert (failure["exit_code"], node["restarts"]) == (73, 1)


CURVES = """
import os, pathlib, sys, time
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter(os.environ["LAUNCHER_OUTPUT"] + "/tensorboard") as curves:
    curves.add_scalar("loss", 1.0, 1)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
"""


@pytest.mark.ci
def test_ranks_that_never_join_a_process_group_are_told_apart(home_cli: Cli) -> None:
    (home_cli.cwd / "one.py").write_text(CURVES)
    enough = home_cli.cwd / "enough"
    job = home_cli.job(**process_job(run={"script": "one.py", "args": [str(enough)]}))
    up = home_cli.start("up", job, *own_port())
    assert up.stderr is not None
    early = "2 ranks write curves, but no process group has all 2 ranks"
    assert any(early in line for line in up.stderr), "said while they train"
    enough.touch()
    _, rest = up.communicate(timeout=300)
    assert up.returncode == 0
    apart = "no rank joined a process group: each of the 2 ranks worked alone"
    said = f"{apart}\n  -> if they are to train together: torch.distributed.init_process_group()"
    assert said in rest
    assert early not in rest
    assert home_cli.result()["apart"] == apart
    assert apart in home_cli("status").stdout


@pytest.mark.ci
def test_a_sharded_training_resumes_with_another_number_of_processes(home_cli: Cli) -> None:
    for name in ("train", "jobs"):
        shutil.copytree(ROOT / name, home_cli.cwd / name, ignore=shutil.ignore_patterns("__pycache__"))
    small = [word for key in ("image_size", "val_resize") for word in ("--set", f"run.args.{key}=8")]
    small += ["--set", "run.args.batch_size=64"]
    one = ("--set", "run.args.epochs=1")
    home_cli("up", "jobs/quickstart_fsdp.yaml", *own_port(), *small, *one, timeout=300)
    first = home_cli.runs()[-1]
    home_cli("fetch", first.name, "--checkpoints")
    assert len(list((first / "checkpoints" / "last.sharded").glob("*.distcp"))) == 2
    sets = ("--set", "run.args.epochs=2", "--set", "processes=3")
    again = home_cli("up", "jobs/quickstart_fsdp.yaml", *own_port(), "--resume", first.name, *small, *sets, timeout=300)
    assert "last.sharded at epoch 2, step 0" in again.stdout
    assert home_cli.result()["state"] == "done"


def test_detaching_and_reattaching_loses_no_line(home_cli: Cli) -> None:
    script = home_cli.program("ticks.py")
    rest = home_cli.cwd / "rest"
    command = ["python3", script, "600", str(rest)]
    job = home_cli.job("ticks", **process_job(nodes=["local"], run={"command": command}))
    first = home_cli.start("up", job)
    assert first.stdout is not None
    seen = [first.stdout.readline().strip() for _ in range(5)]
    first.send_signal(signal.SIGINT)
    more, messages = first.communicate(timeout=30)
    assert first.returncode == 0, messages
    assert "launcher logs ticks-" in messages
    assert "launcher down ticks-" in messages
    again = home_cli.start("logs")
    assert again.stdout is not None
    first_lines = [again.stdout.readline().strip() for _ in range(20)]
    rest.touch()
    lines = [*first_lines, *again.communicate(timeout=60)[0].splitlines()]
    assert lines == [f"tick {i}" for i in range(600)]
    assert [*seen, *more.splitlines()] == lines[: 5 + len(more.splitlines())]
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


@pytest.mark.ci
def test_down_calls_stopped_what_it_stopped_and_gives_the_exit_code_of_what_had_ended(home_cli: Cli) -> None:
    script = home_cli.program("ticks.py")
    home_cli("up", "-d", home_cli.job("runs", **process_job(run={"command": ["python3", script, "600"]})))
    stopped = home_cli("down").stderr
    assert stopped.count("(stopped)") == 2, stopped
    assert "(exit" not in stopped
    home_cli("up", home_cli.job("ends", **process_job(nodes=["local"], run={"command": ["true"]})))
    ended = json.loads(home_cli("down", "--json").stdout)[0]["nodes"][0]["containers"][0]
    assert (ended["exit_code"], ended["stopped"]) == (0, False)
    assert "nothing to remove" in home_cli("down").stderr
    assert left(home_cli) == []


@pytest.mark.ci
@pytest.mark.parametrize("delay", [0.15, 0.3, 0.45, 0.6, 0.8, 1.0])
def test_ctrl_c_during_start_leaves_a_complete_run_or_nothing(home_cli: Cli, delay: float) -> None:
    script = home_cli.program("ticks.py")
    job = home_cli.job("early", **process_job(run={"command": ["python3", script, "600"]}))
    up = home_cli.start("up", job)
    time.sleep(delay)
    up.send_signal(signal.SIGINT)
    _, messages = up.communicate(timeout=60)
    if up.returncode == 0:  # already running: detached, with instructions
        assert "launcher logs early-" in messages
        nodes = json.loads(home_cli("status", "--json").stdout)["nodes"]
        assert [node["state"] for node in nodes] == ["running", "running"]
        home_cli("down")
    else:
        # by the signal, or by Python's startup if the launcher had not started
        by_python = "init_import_site" in messages
        assert up.returncode in (5, -signal.SIGINT) or by_python, messages
        if up.returncode == 5:
            assert "launcher: stopped; nothing was started" in messages
        if home_cli.runs():
            assert home_cli.result()["state"] == "stopped"
        assert "Traceback" not in messages or "launcher/run" not in messages
    assert left(home_cli) == []


CTRL_C_IN = """
import sys
from launcher.__main__ import main

def press(frame, event, _):
    if event == "call" and frame.f_code.co_name == {name!r}:
        sys.setprofile(None)
        raise KeyboardInterrupt

sys.setprofile(press)
sys.argv = ["launcher", "up", {job!r}]
main()
"""


@pytest.mark.parametrize(
    ("function", "result"), [("_make_folders", ""), ("write_left_out", "stopped"), ("is_of_file", "stopped")]
)
def test_ctrl_c_while_the_run_is_recorded_leaves_a_stopped_run_or_nothing(
    home_cli: Cli, function: str, result: str
) -> None:
    job = home_cli.job("early", **process_job(nodes=["local"], run={"command": ["sleep", "600"]}))
    code = CTRL_C_IN.format(name=function, job=str(job))
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=home_cli.cwd, env=home_cli.env, capture_output=True, text=True, check=False)
    assert (done.returncode, "nothing was started" in done.stderr) == (5, True), done.stderr
    assert [home_cli.result()["state"] for _ in home_cli.runs()] == [result] * bool(result)
    assert left(home_cli) == []


def test_logs_of_a_rank_of_a_command_say_why_there_are_none(home_cli: Cli) -> None:
    """Also with --nodes, by the record that is there."""
    run = {"command": ["sh", "-c", "echo I am $RANK"]}
    home_cli("up", home_cli.job("command", runtime="process", nodes=["local"] * 2, run=run))
    for nodes in ([], ["--nodes", "local"]):
        refused = home_cli("logs", "--rank", 1, "--no-follow", *nodes, code=2)
        assert (
            "--rank: 1: run.command starts its own processes, so their output is known by node only" in refused.stderr
        )
        assert f"launcher logs {home_cli.runs()[-1].name} --node NODE" in refused.stderr
    assert home_cli("logs", "--node", "local-1", "--no-follow").stdout == "I am 1\n"


def test_output_that_nothing_reads_takes_no_memory(home_cli: Cli) -> None:
    """As with a terminal that is slower than the job."""
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
    rest = home_cli.cwd / "rest"
    command = ["python3", script, "600", str(rest)]
    job = home_cli.job("ticks", **process_job(nodes=["local"], run={"command": command}))
    up = home_cli.start("up", job)
    assert up.stdout is not None
    assert up.stdout.readline() == "tick 0\n"
    up.kill()
    up.communicate()
    assert json.loads(home_cli("status", "--json").stdout)["state"] == "running"
    rest.touch()
    assert home_cli("logs").stdout.splitlines() == [f"tick {i}" for i in range(600)]


def test_a_run_resumes_from_fetched_checkpoints(home_cli: Cli) -> None:
    """The node, here its folder, was removed: checkpoints of `fetch --checkpoints` are used."""
    count = "mkdir -p $LAUNCHER_OUTPUT/checkpoints; cd $LAUNCHER_OUTPUT/checkpoints; echo $(cat last) more >last"
    job = home_cli.job("counts", **process_job(nodes=["local"], run={"command": ["sh", "-c", count]}))
    home_cli("up", job)
    home_cli("fetch", "--checkpoints")
    first = home_cli.runs()[-1].name
    home_cli("fetch", first, "copies", "--checkpoints")
    homes = Path(home_cli.env["HOME"], ".launcher")
    shutil.rmtree(homes / first)
    home_cli("up", job, "--resume", first)
    assert (homes / home_cli.runs()[-1].name / "checkpoints" / "last").read_text() == "more more\n"
    shutil.rmtree(home_cli.runs()[0] / "checkpoints")
    refused = home_cli("up", job, "--resume", first, code=3)
    assert "has no files to resume from on local" in refused.stderr
    assert "has copied files of it to copies" in " ".join(refused.stderr.split())
    assert "its output folders on the nodes are deleted" in home_cli("down", first, "--purge").stderr
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
    cli("down", "--purge")
    assert cli("logs", "--no-follow").stdout == "token is ***\n", "the copy, in which the mask is as long as the secret"


def test_a_missing_secret_or_script_is_refused_before_anything_starts(home_cli: Cli) -> None:
    job = home_cli.job("broken", **process_job(secrets=["NOT_THERE"], run={"script": "nowhere.py"}))
    refused = home_cli("up", job, code=2)
    assert "NOT_THERE" in refused.stderr
    assert "nowhere.py" in refused.stderr
    assert "broken.yaml:" in refused.stderr
    assert not home_cli.runs()
    assert not Path(home_cli.env["HOME"], ".launcher").exists()


@pytest.mark.ci
def test_a_rank_that_raises_is_named(home_cli: Cli) -> None:
    script = home_cli.program("raises.py")
    keys = process_job(nodes=["local"], processes=2, run={"script": script})
    failed = home_cli("up", home_cli.job("raises", **keys), code=1)
    assert "KeyError: 'dog'" in failed.stderr
    assert "rank 1 on local exited" in failed.stderr
    assert left(home_cli) == []


@pytest.mark.ci
def test_a_users_error_is_one_line_and_the_last_one_of_a_redirected_log(home_cli: Cli) -> None:
    args = {"data": "/no/such/folder", "batch_size": 16}
    job = home_cli.job("typo", **process_job(nodes=["local"], processes=2, run={"module": "train", "args": args}))
    with (home_cli.cwd / "log").open("wb") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **home_cli.env}
        command = [*home_cli.launcher, "up", str(job)]
        ended = subprocess.run(command, cwd=home_cli.cwd, env=environment, stdout=log, stderr=log, check=False)
    lines = (home_cli.cwd / "log").read_text().splitlines()
    message = "train: error: --data /no/such/folder: no such file or folder on this machine"
    assert ended.returncode == 1
    assert re.fullmatch(rf"failed rank \d on local exited with code 2: {re.escape(message)}", lines[-1]), lines
    assert [line for line in lines[:-1] if message in line] == [message], lines
    assert not [line for line in lines if "Traceback" in line or "usage:" in line], lines


def test_the_programs_exit_code_is_the_same_everywhere(home_cli: Cli) -> None:
    (home_cli.cwd / "ends.py").write_text("import sys; sys.exit(75)")
    ends = {"run": {"script": "ends.py"}}, {"run": {"command": ["python3", "ends.py"]}}
    for keys in ends:
        failed = home_cli("up", home_cli.job("ends", **process_job(nodes=["local"], **keys)), code=1)
        assert "launcher: local exited with code 75\n" in failed.stderr
        assert "exited with code 75\n" in failed.stderr.splitlines(keepends=True)[-1]
        assert (home_cli.result()["failure"]["exit_code"], home_cli.result()["nodes"][0]["exit_code"]) == (75, 75)
        assert [node["exit_code"] for node in json.loads(home_cli("status", "--json").stdout)["nodes"]] == [75]


def test_a_request_that_was_refused_is_the_programs_own_failure(home_cli: Cli) -> None:
    """The other node has exited with code 0, and did not wait for it."""
    (home_cli.cwd / "fetches.py").write_text(
        "import os, urllib.request\n"
        "if os.environ['LAUNCHER_NODE'] == 'local-1': urllib.request.urlopen('http://127.0.0.1:9/')\n"
    )
    job = home_cli.job("fetches", **process_job(run={"command": ["python3", "fetches.py"]}))
    failed = home_cli("up", job, code=1).stderr
    assert "failed local-1 exited with code 1" in failed
    assert "<urlopen error [Errno 111] Connection refused>" in failed
    assert "collectives" not in failed


def test_a_script_that_is_not_executable_is_told_how_to_start(home_cli: Cli) -> None:
    (home_cli.cwd / "train.sh").write_text("#!/bin/sh\necho trained\n")
    job = home_cli.job(**process_job(nodes=["local"], run={"command": ["./train.sh"]}))
    failed = home_cli("up", job, code=1).stderr
    assert "failed local exited with code 126: ./train.sh is not executable" in failed
    assert "-> chmod +x ./train.sh, or start it with its interpreter: command: [bash, train.sh]" in failed


def test_what_a_program_puts_in_place_of_its_files_is_named_and_not_read(home_cli: Cli) -> None:
    """In a container these links lead nowhere; the launcher would follow them outside, as the ssh user."""
    private = Path(home_cli.env["HOME"], "private")
    private.mkdir()
    for name in ("text", "events.out.tfevents.1.x", "last.pt"):
        (private / name).write_text("private text\n")
    attack = f"""
        cd $LAUNCHER_OUTPUT
        ln -s {private}/text metrics.jsonl
        ln -s /dev/zero logs/rank-0.log
        ln -s {private} tensorboard
        ln -s {private} checkpoints
        rm state/local.attempts; mkfifo state/local.attempts
        echo done by $LAUNCHER_NODE
    """
    job = home_cli.job("attack", **process_job(nodes=["local"], run={"command": ["sh", "-c", attack]}))
    began = time.monotonic()
    up = home_cli("up", job)
    assert time.monotonic() - began < 40  # a FIFO or a device would block for at least a minute
    assert up.stderr.count("metrics.jsonl is a link: ignored") == 1
    assert "state/local.attempts is a named pipe: ignored" in up.stderr
    assert "checkpoints is a link: ignored" in home_cli("fetch", "--checkpoints", code=None).stderr
    assert "done by local" in home_cli("logs").stdout
    assert '"done"' in home_cli("status", "--json").stdout
    files = [path for path in home_cli.runs()[-1].rglob("*") if path.is_file()]
    assert not [path for path in files if b"private text" in path.read_bytes()]
    home_cli("down", "--purge")
    assert sorted(path.name for path in private.iterdir()) == ["events.out.tfevents.1.x", "last.pt", "text"]


def test_a_full_disk_of_the_output_folder_is_named_in_every_phase(home_cli: Cli, tmp_path: Path) -> None:
    (home_cli.cwd / "fills.py").write_text(
        "import os\nwith open(os.environ['LAUNCHER_OUTPUT'] + '/big', 'wb') as file: file.write(bytes(1 << 20))\n"
    )
    job = home_cli.job("fills", **process_job(nodes=["local"], run={"command": ["python3", "fills.py"]}))
    with small_disk(tmp_path / "small", "900k"):
        cli = Cli(home_cli.cwd, {**home_cli.env, "HOME": str(tmp_path / "small")})
        failed = cli("up", job, code=1)
        assert failed.stderr.splitlines()[-2].endswith("the output folder's disk is full")
        refused = cli("up", job, code=3)
        assert "error local: the output folder's disk is full: could not " in refused.stderr
        for each in (failed, refused):
            assert (
                each.stderr.splitlines()[-1]
                == "  -> free some space there, or inodes (`df -i`); `launcher clean` removes old runs"
            )


def test_a_home_without_inodes_or_mounted_noexec_is_told_from_a_full_disk_and_a_missing_x(
    home_cli: Cli, tmp_path: Path
) -> None:
    (home_cli.cwd / "go.sh").write_text("#!/bin/sh\necho went\n")
    (home_cli.cwd / "go.sh").chmod(0o755)
    job = home_cli.job("goes", **process_job(nodes=["local"], run={"command": ["./go.sh"]}))
    with small_disk(tmp_path / "noexec", "9m", "noexec"):
        cli = Cli(home_cli.cwd, {**home_cli.env, "HOME": str(tmp_path / "noexec")})
        assert "/noexec/.launcher, with the code, is on a disk that is mounted noexec" in cli("up", job, code=3).stderr
        failed = cli("up", job, "--set", "run.command=[sh, -c, ./go.sh; exit $?]", code=1).stderr
        assert "./go.sh cannot be executed: the output folder's disk is mounted noexec" in failed
        assert "chmod" not in failed
        assert "went" in cli("up", job, "--set", "run.command=[sh, go.sh]").stdout
    with small_disk(tmp_path / "few", "9m", "nr_inodes=1"):
        cli = Cli(home_cli.cwd, {**home_cli.env, "HOME": str(tmp_path / "few")})
        assert "/few/.launcher has no inodes left (`df -i`)" in cli("up", job, code=3).stderr


def test_the_time_limit_is_enforced(home_cli: Cli) -> None:
    script = home_cli.program("ticks.py")
    job = home_cli.job(
        "slow", **process_job(nodes=["local"], timeout="2s", run={"command": ["python3", script, "6000"]})
    )
    failed = home_cli("up", job, code=1)
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


def test_a_command_imports_only_what_it_uses(home_cli: Cli) -> None:
    job = home_cli.job("quick", **process_job(nodes=["local"], run={"command": ["true"]}))
    engines = {"torch", "train", "docker", "paramiko"}
    plans = {
        f"launcher.{name}"
        for name in ("api.jobs", "api.up", "image", "planning.build", "run.begin.prepare", "run.shell")
    }
    waits = {
        "urllib.request",
        *(f"launcher.run.{name}" for name in ("notify", "end.outcome", "end.stop", "watch.supervise")),
    }
    assert not imported(home_cli, "up", str(job)) & {*engines, "launcher.features.sweeps.pool", "launcher.run.doctor"}
    for command in (["status"], ["runs"], ["logs", "--no-follow"]):
        found = imported(home_cli, *command)
        assert not found & {*engines, *plans, *waits, "pathspec", "launcher.features.sweeps"}, command
    assert not imported(home_cli, "runs") & {"launcher.api.run", "launcher.run.printed"}
    assert not imported(home_cli, "up", "--help") & {
        *engines,
        *waits,
        "launcher.api.jobs",
        "launcher.run.begin.prepare",
    }


LOADED_AFTERWARDS = """
import sys
import launcher

before = set()

def show(message):
    if not before and type(message).__name__ == "Output":
        before.update(sys.modules)

with launcher.up({job!r}, log=None) as run:
    run.wait(show=show)
    run.written()
print(*sorted(name for name in {{*sys.modules}} - before if name.startswith("launcher")))
"""


def test_what_the_end_of_a_run_needs_is_loaded_before_the_run_is_followed(home_cli: Cli) -> None:
    """Until it ends, another version of the launcher may be installed."""
    ends = {"command": ["sh", "-c", "echo begins; exit 3"]}
    job = home_cli.job("ends", **process_job(nodes=["local"], run=ends))
    argv = [sys.executable, "-c", LOADED_AFTERWARDS.format(job=str(job))]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **home_cli.env}
    done = subprocess.run(argv, cwd=home_cli.cwd, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
    assert home_cli.result()["exit_code"] == 1


def imported(cli: Cli, *command: str) -> set[str]:
    """Calls the launcher, in a process of its own; returns the modules that are loaded at its end."""
    code = (
        "import sys; from launcher.__main__ import main\n"
        "try:\n    main()\n"
        "finally:\n    print('IMPORTED', *(name for name, module in sys.modules.items() if module))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        cwd=cli.cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **cli.env},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    word, *names = done.stdout.splitlines()[-1].split()
    assert word == "IMPORTED"
    return {*names}


@contextlib.contextmanager
def in_background() -> Iterator[None]:
    """Ignore SIGINT and SIGQUIT, as for `command &` in a shell without job control."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_in_the_background_of_a_script_the_run_gets_its_signals_and_the_launcher_ignores_ctrl_c(home_cli: Cli) -> None:
    """The stacks of hanging ranks are requested with `kill -QUIT` of the entry script."""
    program = home_cli.cwd / "signals.py"
    program.write_text(
        "import os, re, signal, time\n"
        "for pid in (os.environ['LAUNCHER_ENTRY'], 'self'):\n"
        "    ignored = int(re.search(r'SigIgn:\\s+(\\w+)', open(f'/proc/{pid}/status').read())[1], 16)\n"
        "    print([name for name in ('INT', 'QUIT') if ignored >> signal.Signals[f'SIG{name}'] - 1 & 1], flush=True)\n"
        "while True:\n    time.sleep(0.1); print('tick', flush=True)\n"
    )
    job = home_cli.job("nohup", **process_job(nodes=["local"], run={"command": ["python3", "signals.py"]}))
    with in_background():
        up = home_cli.start("up", job)
    assert up.stdout is not None
    assert [up.stdout.readline() for _ in range(3)] == ["[]\n", "[]\n", "tick\n"]
    up.send_signal(signal.SIGINT)
    assert [up.stdout.readline() for _ in range(20)] == ["tick\n"] * 20
    up.send_signal(signal.SIGTERM)
    _, messages = up.communicate(timeout=30)
    assert up.returncode == -signal.SIGTERM
    assert "Ctrl-C is ignored because the launcher was started in the background. To stop the run: " in messages
    assert json.loads(home_cli("status", "--json").stdout)["state"] == "running"
    assert "(stopped)" in home_cli("down").stderr
    assert left(home_cli) == []


@pytest.mark.ci
@pytest.mark.parametrize("name", [pytest.param("SIGKILL", marks=pytest.mark.slow), "SIGSEGV"])
def test_a_rank_that_a_signal_killed_is_named_with_the_signal(home_cli: Cli, name: str) -> None:
    (home_cli.cwd / "dies.py").write_text(
        "import os, signal, time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        f"if dist.get_rank() == 1: os.kill(os.getpid(), signal.{name})\n"
        "dist.barrier()\n"
    )
    job = home_cli.job("dies", **process_job(processes=2, nodes=["local"], run={"script": "dies.py"}))
    failed = home_cli("up", job, code=1).stderr
    assert f"failed rank 1 on local was killed by {name}" in failed
    assert "exited with code" not in failed.partition("failed rank 1")[2]


def test_a_command_that_a_signal_killed_is_named_with_the_signal(home_cli: Cli) -> None:
    job = home_cli.job("dies", **process_job(nodes=["local"], run={"command": ["sh", "-c", "kill -ABRT $$"]}))
    failed = home_cli("up", job, code=1).stderr
    assert "failed local was killed by SIGABRT (exit code 134)" in failed


@pytest.mark.ci
@pytest.mark.parametrize("redirected", ["", "2>&1"])
def test_output_that_is_not_read_to_its_end_detaches(home_cli: Cli, redirected: str) -> None:
    script = home_cli.program("ticks.py")
    command = ["python3", script, "600"]
    job = home_cli.job("ticks", **process_job(nodes=["local"], gpus="none", run={"command": command}))
    pipeline = f'"$@" {redirected} | head -1; echo "exit ${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", pipeline, "bash", sys.executable, "-m", "launcher", "up", str(job)],
        cwd=home_cli.cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **home_cli.env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    run = home_cli.runs()[-1].name
    first = "launcher: code: " if redirected else "tick 0"
    assert done.stdout.startswith(first)
    assert done.stdout.splitlines()[1:] == ["exit 0"]
    if redirected:
        assert done.stderr == ""
    else:
        assert f"stdout was closed; detached from {run}, which is still running. " in done.stderr
    assert "Broken" not in done.stderr
    assert json.loads(home_cli("status", "--json").stdout)["state"] == "running"
    logs = home_cli.start("logs")
    assert logs.stdout is not None
    assert logs.stdout.readline() == "tick 0\n"
    logs.stdout.close()
    assert logs.stderr is not None
    assert f"detached from {run}" in logs.stderr.read()
    assert logs.wait(30) == 0
    home_cli("down")
    assert left(home_cli) == []


def test_logs_that_are_not_read_to_their_end_are_no_error(home_cli: Cli) -> None:
    run = {"command": ["seq", "200000"]}
    home_cli("up", home_cli.job("counts", **process_job(nodes=["local"], run=run)))
    logs = home_cli.start("logs", "--no-follow")
    assert logs.stdout is not None
    assert logs.stdout.readline() == "1\n"
    logs.stdout.close()
    assert logs.stderr is not None
    assert logs.stderr.read() == f"launcher: the latest run is {home_cli.runs()[-1].name}\n"
    assert logs.wait(30) == 0


def test_a_run_that_ends_while_its_output_is_not_read_has_its_exit_code(home_cli: Cli) -> None:
    """The traceback is buffered and printed when the run has ended."""
    program = "import time; print('begun', flush=True); time.sleep(2); raise KeyError('x')"
    (home_cli.cwd / "raises.py").write_text(program)
    up = home_cli.start(
        "up", home_cli.job("ends", **process_job(nodes=["local"], run={"command": ["python3", "raises.py"]}))
    )
    assert up.stdout is not None
    assert up.stderr is not None
    assert up.stdout.readline() == "begun\n"
    up.stdout.close()
    assert "KeyError: 'x'" in up.stderr.read()
    assert up.wait(30) == 1


@pytest.mark.slow
def test_a_program_that_prints_nothing_is_reported_without_a_guess(home_cli: Cli) -> None:
    command = ["sh", "-c", "sleep 35; echo imported"]
    done = home_cli("up", home_cli.job(**process_job(nodes=["local"], gpus="none", run={"command": command})))
    assert re.search(r"no output for 3\d s$", done.stderr, re.MULTILINE)
    assert done.stdout == "imported\n"


def test_doctor_and_up_agree_on_a_python_without_torch(home_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "without" / "torch").mkdir(parents=True)
    (tmp_path / "without" / "torch" / "__init__.py").touch()
    (home_cli.cwd / "train.py").touch()
    keys = process_job(gpus="none", env={"PYTHONPATH": str(tmp_path / "without")})
    job = home_cli.job("job", run={"script": "train.py"}, **keys)
    missing = "has no torch.distributed, which run.module and run.script require"
    assert missing in home_cli("up", job, code=2).stderr
    assert f"FAIL all          torch              {sys.executable} {missing}" in home_cli("doctor", job, code=3).stdout
    assert "torch" not in home_cli("doctor", home_cli.job("command", run={"command": ["true"]}, **keys)).stdout


def test_doctor_and_up_agree_on_what_is_missing_here(home_cli: Cli) -> None:
    job = home_cli.job("job", **process_job(gpus="none", run={"command": ["true"]}, secrets=["NOT_SET", "NOR_THIS"]))
    assert "secrets.0: NOT_SET is not set in your environment" in home_cli("up", job, code=2).stderr
    checks = json.loads(home_cli("doctor", job, "--json", code=3).stdout)["checks"]
    failed = [check["what"] for check in checks if check["level"] == "fail"]
    assert [("NOT_SET" in what, "NOR_THIS" in what) for what in failed] == [(True, False), (False, True)]
    assert " ok, 0 warnings, 2 failures\n" in home_cli("doctor", job, code=3).stdout


@pytest.mark.parametrize("targets", [("job.yaml", "node1"), ("node1", "job.yaml"), ("job.yaml", "other.yml")])
def test_doctor_takes_a_job_or_nodes(home_cli: Cli, targets: tuple[str, str]) -> None:
    refused = home_cli("doctor", *targets, code=2).stderr
    assert "doctor: expected one job file or nodes, got " + " ".join(targets) in refused
    nodes = " --nodes node1" if "node1" in targets else ""
    assert f"launcher doctor job.yaml{nodes}\n" in refused


def test_exec_says_that_the_run_has_ended_meanwhile(home_cli: Cli) -> None:
    script = "echo waits; while [ ! -e go ]; do sleep 0.05; done; exit 3"
    home_cli("up", "-d", home_cli.job("job", **process_job(gpus="none", run={"command": ["sh", "-c", script]})))
    home_cli.until_logged("waits")
    ends = "touch go; while :; do sleep 0.1; done"  # it is killed with the container
    done = home_cli("exec", "--", "sh", "-c", ends, code=None)
    assert done.returncode > 0
    assert "local-0: the run's container has ended (exited, exit code 3), so the command could not start" in done.stderr
    home_cli("exec", "--", "true", code=3)


def test_up_says_once_whose_output_it_shows(home_cli: Cli) -> None:
    several = home_cli("up", home_cli.job("two", **process_job(gpus="none", run={"command": ["hostname"]}))).stderr
    assert several.count("output of local-0; that of all nodes: launcher logs --all\n") == 1
    alone = home_cli.job("one", **process_job(gpus="none", nodes=["local"], run={"command": ["hostname"]}))
    assert "output of" not in home_cli("up", alone).stderr
    assert "output of" not in home_cli("up", "-d", alone).stderr


def test_a_node_that_had_failed_before_a_down_is_named(home_cli: Cli) -> None:
    """Detached, so that nobody stops its peer."""
    raised = f"{quote(sys.executable)} -c 'raise ValueError(7)'"
    command = ["sh", "-c", f'if [ "$RANK" = 1 ]; then {raised}; exit 3; fi; echo here; exec sleep 600']
    home_cli("up", "-d", home_cli.job(**process_job(run={"command": command})))
    while [node["state"] for node in json.loads(home_cli("status", "--json").stdout)["nodes"]] != ["running", "exited"]:
        time.sleep(0.1)
    said = "local-1 had failed before the run was stopped: exited with code 3: ValueError: 7"
    assert f"warning: {said}" in home_cli("down").stderr.replace("rank 1 on ", "")
    result = home_cli.result()
    assert (result["state"], result["exit_code"], result["failure"]["node"]) == ("stopped", 5, "local-1")
    logs = home_cli("logs", code=5).stderr
    assert "had failed before: exited with code 3: ValueError: 7" in logs
    home_cli("down")


def test_a_run_that_is_stopped_before_any_node_has_failed_has_no_failure(home_cli: Cli) -> None:
    command = ["sh", "-c", 'if [ "$RANK" = 1 ]; then exit 0; fi; exec sleep 600']
    home_cli("up", "-d", home_cli.job(**process_job(run={"command": command})))
    while [node["state"] for node in json.loads(home_cli("status", "--json").stdout)["nodes"]] != ["running", "exited"]:
        time.sleep(0.1)
    assert "failed" not in home_cli("down").stderr
    assert home_cli.result()["failure"] is None
