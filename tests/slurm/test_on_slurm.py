"""Runs on a real Slurm through the CLI: `up --on`, and every command that finds such a run."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e import names
from tests.e2e.cli import ROOT, Cli
from tests.e2e.programs.lists import tree
from tests.ports import free_port
from tests.repositories import commit, git
from tests.slurm.bed import SlurmBed
from tests.slurm.conftest import user

pytestmark = pytest.mark.timeout(240)
TICKS = "for i in $(seq 1 300); do echo tick $i; sleep 1; done"


def job(cli: Cli, script: str, nodes: int = 2, **keys: Any) -> Path:
    """A job whose nodes run a shell script: it needs no torch, so it starts quickly."""
    keys = {"run": {"command": ["sh", "-c", script]}, **keys}
    return cli.job(runtime="process", nodes=["local"] * nodes, gpus="none", **keys)


def until(true: Callable[[], object], what: str, timeout: float = 90) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def until_printed(slurm: SlurmBed, cli: Cli, text: str) -> None:
    """Wait until the first node of the latest run has printed it, reading the file, as a launcher takes a second."""

    until(lambda: text in text_of(folder(slurm, cli) / "logs" / "node-0.log"), f"{text!r} is not printed")


def text_of(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def is_running(slurm: SlurmBed) -> bool:
    return any(" RUNNING " in line for line in slurm.jobs())


def status(cli: Cli) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cli("status", "--json").stdout)
    return found


def folder(slurm: SlurmBed, cli: Cli) -> Path:
    """The run's folder on the shared file system."""
    return slurm.shared / ".launcher" / ([run.name for run in cli.runs()] or ["none yet"])[-1]


def test_four_nodes_run_what_export_prints(slurm: SlurmBed, cli: Cli) -> None:
    file = job(cli, 'echo "rank $RANK of $WORLD_SIZE on $LAUNCHER_NODE: $GREETING"', nodes=4, env={"GREETING": "it's"})
    done = cli("up", file, "--on", "hpc")
    assert "rank 0 of 4 on node-0: it's" in done.stdout
    assert "was submitted to slurm:hpc, job " in done.stderr
    assert [node["exit_code"] for node in cli.result()["nodes"]] == [0, 0, 0, 0]
    logs = {log.name: log.read_text() for log in (cli.runs()[-1] / "logs").glob("node-*.log")}
    assert logs == {f"node-{rank}.log": f"rank {rank} of 4 on node-{rank}: it's\n" for rank in range(4)}
    submitted = (folder(slurm, cli) / ".node" / "job.sh").read_text()
    assert submitted == cli("export", file, "--to", "slurm", "--on", "hpc").stdout
    cli("down", "--purge")
    assert not folder(slurm, cli).exists()


def test_files_of_any_name_arrive(cli: Cli) -> None:
    program = names.project(cli)
    run = {"command": ["python3", program]}
    file = cli.job("names", runtime="process", nodes=1, gpus="none", run=run, env={"PYTHONUTF8": "1"})
    assert json.loads(cli("up", file, "--on", "hpc").stdout) == tree(cli.cwd)


def test_a_rank_that_raises_is_named_with_its_own_traceback(cli: Cli) -> None:
    script = cli.program("raises.py")
    file = cli.job(runtime="process", nodes=2, gpus="none", run={"script": script})
    done = cli("up", file, "--on", "hpc", code=1, timeout=200)
    assert "KeyError: 'dog'" in done.stderr.split("Traceback")[1], done.stderr  # the first one in the output
    there = cli.result()
    failure = {name: there["failure"][name] for name in ("node", "rank", "what")}
    assert (there["state"], there["exit_code"]) == ("failed", 1)
    assert failure == {"node": "node-1", "rank": 1, "what": "exited with code 1: KeyError: 'dog'"}
    cli("up", job(cli, "exit 1"), code=1)  # on this machine
    assert cli.result().keys() == there.keys()


def test_a_busy_controller_is_asked_again_for_the_address(slurm: SlurmBed, cli: Cli, tmp_path: Path) -> None:
    """It does not answer twice, in the middle of which there is no job without an address."""
    busy, path = tmp_path / "bin" / "scontrol", slurm.env["PATH"]
    busy.parent.mkdir()
    refuses = f"echo x >>{tmp_path}/asked; [ $(wc -l <{tmp_path}/asked) -gt 2 ] || exit 1"
    busy.write_text(
        f'#!/bin/bash\ncase "$*" in "show node"*) {refuses} ;; esac\nexec {shutil.which("scontrol", path=path)} "$@"\n'
    )
    busy.chmod(0o755)
    here = Cli(cli.cwd, {**cli.env, "PATH": f"{busy.parent}:{path}"})
    assert here("up", job(here, "echo at $MASTER_ADDR", nodes=1), "--on", "hpc").stdout == "at 127.0.0.1\n"
    assert len(text_of(tmp_path / "asked").split()) == 3


def test_a_time_limit(cli: Cli) -> None:
    done = cli("up", job(cli, "sleep 600", timeout="2s"), "--on", "hpc", code=1)
    assert "time limit" in done.stdout + done.stderr


def test_down_stops_it_and_the_following_launcher_names_the_user(slurm: SlurmBed, cli: Cli) -> None:
    following = cli.start("up", job(cli, TICKS), "--on", "hpc")
    until_printed(slurm, cli, "tick")
    cli("down")
    _, err = following.communicate(timeout=60)
    assert following.returncode == 5, err
    assert cli.result()["state"] == "stopped"
    assert not slurm.jobs()
    cli("down")  # may be repeated


# A slow trainer: after SIGTERM both nodes write a checkpoint, the first node after the other has exited.
SAVES = (
    "trap 'sleep $((3 - 3 * RANK)); echo saved >$LAUNCHER_OUTPUT/saved-$RANK; exit 143' TERM\n"
    "echo ready; while :; do sleep 0.1; done"
)


def saved(slurm: SlurmBed, cli: Cli) -> list[str]:
    return sorted(file.name for file in folder(slurm, cli).glob("saved-*"))


def until_both_are_ready(slurm: SlurmBed, cli: Cli) -> None:
    logs = [Path("logs", f"node-{rank}.log") for rank in range(2)]
    until(lambda: all("ready" in text_of(folder(slurm, cli) / log) for log in logs), "they are not ready")


def test_down_gives_every_node_the_time_for_a_checkpoint(slurm: SlurmBed, cli: Cli) -> None:
    cli("up", job(cli, SAVES), "--on", "hpc", "-d")
    until_both_are_ready(slurm, cli)
    cli("down")
    assert saved(slurm, cli) == ["saved-0", "saved-1"]


def test_a_second_ctrl_c_gives_every_node_the_time_for_a_checkpoint(slurm: SlurmBed, cli: Cli) -> None:
    stop_by_two_ctrl_c(slurm, cli)
    assert saved(slurm, cli) == ["saved-0", "saved-1"]


def stop_by_two_ctrl_c(slurm: SlurmBed, cli: Cli) -> None:
    up = cli.start("up", job(cli, SAVES), "--on", "hpc")
    assert up.stderr
    read_until(up, "was submitted to")  # from then on the first Ctrl-C detaches
    until_both_are_ready(slurm, cli)
    up.send_signal(signal.SIGINT)
    read_until(up, "Ctrl-C again")
    up.send_signal(signal.SIGINT)
    _, err = up.communicate(timeout=120)
    assert up.returncode == 5, err


def read_until(up: subprocess.Popen[str], text: str) -> None:
    """Read lines of its stderr."""
    assert up.stderr
    seen = []
    for line in up.stderr:
        seen.append(line)
        if text in line:
            return
    raise AssertionError(f"{text!r} is not in {''.join(seen)}")


@pytest.mark.slow
def test_before_slurms_time_limit_every_node_has_the_time_for_a_checkpoint(slurm: SlurmBed, cli: Cli) -> None:
    """Slurm checks time limits every 30 s, and counts in minutes."""
    done = cli("up", job(cli, SAVES, cluster={"time": "2m"}), "--on", "hpc", code=1)
    assert saved(slurm, cli) == ["saved-0", "saved-1"]
    assert re.search(r"failed node-0 was ended by Slurm: job \d+: TIMEOUT, at its time limit", done.stderr)


@pytest.mark.parametrize(
    ("ends", "what"),
    [
        (("scancel", "JOB"), "CANCELLED, by scancel"),
        (("scontrol", "update", "nodename=n1", "state=down", "reason=test"), "NODE_FAIL, Slurm lost one"),
    ],
)
def test_how_slurm_ended_it_comes_first(ends: tuple[str, ...], what: str, slurm: SlurmBed, cli: Cli) -> None:
    following = cli.start("up", job(cli, "trap 'exit 0' TERM; echo on; while :; do sleep 0.1; done"), "--on", "hpc")
    until_printed(slurm, cli, "on")
    slurm(*(argument.replace("JOB", slurm.jobs()[0].split()[0]) for argument in ends))
    try:
        _, err = following.communicate(timeout=90)
    finally:
        slurm("scontrol", "update", "nodename=n1", "state=resume", check=False)
    assert following.returncode == 1
    assert re.search(rf"failed node-0 was ended by Slurm: job \d+: {what}", err), err


def test_a_cluster_behind_ssh(slurm: SlurmBed, cli: Cli) -> None:
    """Followed by a launcher whose own environment does not know Slurm."""
    far = Cli(cli.cwd, {name: value for name, value in cli.env.items() if name != "SLURM_CONF"})
    following = far.start("up", job(far, TICKS), "--on", "far")
    until_printed(slurm, far, "tick")
    assert [node["state"] for node in status(far)["nodes"]] == ["running", "running"]
    assert far.runs()[-1].name in far("runs", "--on", "far").stdout
    far("down")
    _, err = following.communicate(timeout=60)
    assert following.returncode == 5, err


def test_a_pending_job_shows_its_reason_and_ctrl_c_detaches(slurm: SlurmBed, cli: Cli) -> None:
    slurm("scontrol", "update", "partitionname=all", "State=DOWN")
    try:
        waiting = cli.start("up", job(cli, "echo at last"), "--on", "hpc")
        until(slurm.jobs, "it was not submitted")
        until(lambda: "PENDING (PartitionDown)" in status(cli)["nodes"][0]["waits"], "no reason is shown")
        waiting.send_signal(signal.SIGINT)
        _, err = waiting.communicate(timeout=30)
        assert waiting.returncode == 0, err
        assert re.search(r"job \d+: PENDING \(PartitionDown\)", err), err
        assert "which is still in the queue. Reattach: launcher logs" in err
        again = cli.start("logs")
        assert again.stderr
        assert "the latest run is" in again.stderr.readline()
        assert "PENDING (PartitionDown)" in again.stderr.readline()
        (number,) = [line.split()[0] for line in slurm.jobs()]
        slurm("scontrol", "hold", number)
        assert "PENDING (JobHeld" in again.stderr.readline()
        slurm("scontrol", "release", number)
    finally:
        slurm("scontrol", "update", "partitionname=all", "State=UP")
    out, err = again.communicate(timeout=60)
    assert "at last" in out, err


@pytest.mark.parametrize(
    ("key", "reason", "advice"),
    [
        ("nodes=9", "PartitionConfig", "the partition has no machines, or too few"),
        ("cluster.options=[--hold]", "JobHeldUser", "release it: scontrol release"),
    ],
)
def test_a_reason_that_does_not_pass_has_an_advice(
    key: str, reason: str, advice: str, slurm: SlurmBed, cli: Cli
) -> None:
    """In `up`, `logs` and `status`. Such a job does not run, and nobody says so."""
    done = cli("up", job(cli, "echo"), "--on", "hpc", "-d", "--set", key)
    assert "is running" not in done.stderr
    assert re.search(r"To follow it: launcher logs job-\S+$", done.stderr)
    until(lambda: reason in status(cli)["nodes"][0]["waits"], "no reason is shown")
    assert f"PENDING ({reason}): {advice}" in cli("status").stdout
    following = cli.start("logs")
    read_until(following, f"PENDING ({reason}): {advice}")
    following.send_signal(signal.SIGINT)
    following.communicate(timeout=30)
    cli("down")


def test_down_removes_a_pending_job_from_the_queue(slurm: SlurmBed, cli: Cli) -> None:
    slurm("scontrol", "update", "partitionname=all", "State=DOWN")
    try:
        following = cli.start("up", job(cli, TICKS), "--on", "hpc")
        until(slurm.jobs, "it was not submitted")
        cli("down")
        assert not slurm.jobs()
        _, err = following.communicate(timeout=60)
        assert following.returncode == 5, err
    finally:
        slurm("scontrol", "update", "partitionname=all", "State=UP")


def test_down_right_after_the_submission(slurm: SlurmBed, cli: Cli) -> None:
    cli("up", job(cli, TICKS, nodes=4), "--on", "hpc", "-d")
    cli("down")
    assert not slurm.jobs()
    assert cli.result()["state"] == "stopped"


def test_down_during_the_submission_leaves_an_empty_queue(slurm: SlurmBed, cli: Cli, tmp_path: Path) -> None:
    """A slow sbatch, which has read the script: the run is removed while it waits."""
    slow, gate = tmp_path / "bin" / "sbatch", tmp_path / "gate"
    slow.parent.mkdir()
    path = slurm.env["PATH"]
    wait = f'cp "${{@: -3:1}}" {tmp_path}/script && : >{gate}\nwhile [ -e {gate} ]; do sleep 0.1; done\n'
    submit = f'exec {shutil.which("sbatch", path=path)} "${{@:1:$#-3}}" {tmp_path}/script "${{@: -2}}"\n'
    slow.write_text(f"#!/bin/bash\n{wait}{submit}")
    slow.chmod(0o755)
    up = Cli(cli.cwd, {**cli.env, "PATH": f"{slow.parent}:{path}"}).start("up", job(cli, TICKS), "--on", "hpc")
    until(gate.exists, "sbatch is not called")
    cli("down")
    gate.unlink()
    _, err = up.communicate(timeout=60)
    assert up.returncode == 3, err
    assert "the run was removed while it was submitted" in err
    until(lambda: not slurm.jobs(), "it is left in the queue", 20)


def test_down_while_a_restart_is_pending(slurm: SlurmBed, cli: Cli) -> None:
    following = cli.start("up", job(cli, "exit 7", nodes=1, restarts=1), "--on", "hpc")
    attempts = Path("state", "node-0.attempts")
    until(lambda: "exit 7" in text_of(folder(slurm, cli) / attempts), "it does not fail")
    until(lambda: any(" PENDING " in line for line in slurm.jobs()), "it is not requeued")
    cli("down")
    _, err = following.communicate(timeout=60)
    assert following.returncode == 5, err
    assert not slurm.jobs()


def test_a_killed_launcher_is_followed_by_another_one_that_has_no_record(
    slurm: SlurmBed, cli: Cli, tmp_path: Path
) -> None:
    first = cli.start("up", job(cli, "for i in $(seq 1 50); do echo tick $i; sleep 0.1; done"), "--on", "hpc")
    until_printed(slurm, cli, "tick 3\n")
    first.kill()
    first.communicate()
    other = user(slurm, tmp_path / "other")
    assert cli.runs()[-1].name in other("runs", "--on", "hpc").stdout
    seen = other("logs", "job", "--on", "hpc").stdout
    assert re.findall(r"tick (\d+)", seen) == [str(i) for i in range(1, 51)]
    assert other.result()["state"] == "done"


def test_a_sweep_is_a_job_array_and_every_command_finds_its_runs(slurm: SlurmBed, cli: Cli, tmp_path: Path) -> None:
    """At the same time, with what a training writes: the table of results; others see it without a record."""
    end = tmp_path / "end"
    run = {"command": [sys.executable, cli.program("measured.py"), str(end)]}
    file = cli.job(runtime="process", nodes=1, gpus="none", run=run, sweep=[["0.1"], ["0.2"]])
    up = cli.start("up", file, "--on", "hpc")
    until(
        lambda: [line.split()[:2] for line in slurm.jobs() if re.match(r"\d+_[01] RUNNING", line)][1:], "not both run"
    )
    end.touch()
    _, err = up.communicate(timeout=200)
    assert up.returncode == 0, err
    rows = json.loads(cli("compare", "job", "--json").stdout)
    assert [row["label"] for row in rows] == ["0.1", "0.2"]

    name, other, on = cli.runs()[0].name, user(slurm, tmp_path / "other"), ("--on", "hpc")
    assert "2 done" in other("runs", *on).stdout
    assert name in other("runs", *on, "--all").stdout
    assert json.loads(other("status", name, *on, "--json").stdout)["state"] == "done"
    other("fetch", name, *on, "--checkpoints")
    fetched = other.cwd / "runs" / name
    assert (fetched / "logs" / "node-0.log").read_text() == (cli.runs()[0] / "logs" / "node-0.log").read_text()
    assert list(fetched.glob("checkpoints/*.pt"))
    assert json.loads(other("compare", name, "--json").stdout)[0]["images_per_s"] > 0
    board = other.start("tensorboard", name, *on, "--port", 0)
    try:
        assert board.stdout is not None
        found = re.search(r"http://\S+/", board.stdout.readline())
        assert found, board.communicate(timeout=30)
        until(lambda: "Loss/train" in tags(found.group()), "TensorBoard does not show the curve")
    finally:
        board.terminate()
        board.communicate(timeout=30)
    other("down", name, *on)
    assert not (slurm.shared / ".launcher" / name / ".node").exists()


def test_a_resumed_sweep_submits_only_variants_without_a_result(slurm: SlurmBed, cli: Cli, tmp_path: Path) -> None:
    """By the job's name; none was followed to its end. Each program counts its starts."""
    log, mended = tmp_path / "log", tmp_path / "mended"
    script = f'echo "$0" >>{log}; [ "$0" = good ] || [ -e {mended} ]'
    keys = {"run": {"command": ["sh", "-c", script]}, "sweep": [["good"], ["bad"], ["worse"]]}
    file = cli.job(runtime="process", nodes=1, gpus="none", **keys)
    cli("up", file, "--on", "hpc", "-d")
    until(lambda: not slurm.jobs(), "the array does not end")
    mended.touch()
    ended = [run.name for run in cli.runs()]
    done = cli("up", file, "--on", "hpc", "--resume", "job").stderr
    for name, run in zip(("bad", "worse"), ended[1:], strict=True):
        assert f"{name}: {run} ended while no launcher followed it (failed, " in done
    assert "3 done" in done
    assert sorted(log.read_text().split()) == ["bad", "bad", "good", "worse", "worse"]
    assert "3 done" in cli("runs").stdout
    assert "3 done" in cli("up", file, "--on", "hpc", "--resume", "job").stderr  # and runs nothing
    assert len(cli.runs()) == 5


def test_each_task_of_an_array_has_the_code_of_its_variant(slurm: SlurmBed, cli: Cli, tmp_path: Path) -> None:
    """Also when it is submitted again after its branch has moved."""
    del slurm
    said, mended = tmp_path / "said", tmp_path / "mended"
    git(cli.cwd, "init", "--quiet", "--initial-branch", "main")
    commit(cli.cwd, {"word": "one\n"})
    commit(cli.cwd, {"word": "two\n"})
    run = {"command": ["sh", "-c", f"cat word >>{said}; grep -q one word || [ -e {mended} ]", "sh"]}
    file = cli.job(runtime="process", nodes=1, gpus="none", run=run, sweep={"code": ["main~1", "main"]})
    assert "1 done, 1 failed" in cli("up", file, "--on", "hpc", code=1).stderr
    commit(cli.cwd, {"word": "three\n"})
    mended.touch()
    assert "2 done" in cli("up", file, "--on", "hpc", "--resume", "job").stderr
    assert sorted(said.read_text().split()) == ["one", "two", "two"]


def test_a_budget_ends_every_node_and_a_variant_is_added(slurm: SlurmBed, cli: Cli) -> None:
    """The node of rank 0 tells the other one, which fails at once for lack of it, or waits."""
    del slurm
    told = 'until [ -s "$LAUNCHER_OUTPUT/state/budget" ]; do sleep 0.1; done; exit 1'
    script = f'[ $LAUNCHER_NODE_RANK = 0 ] || [ "$2" = waits ] || {{ {told}; }}; exec sleep 600'
    sweep = {"budget": "1s", "grid": {"peer": ["waits"]}}
    file = job(cli, script, run={"command": ["sh", "-c", script, "sh"]}, sweep=sweep)
    assert "waits  done by budget" in cli("up", file, "--on", "hpc").stderr
    added = cli("up", file, "--into", "job", "--on", "hpc", "--set", "run.args.peer=fails").stderr
    assert "ended by its budget" in added
    for row in json.loads(cli("compare", "job", "--json").stdout):
        assert (row["state"], row["ended_by"]) == ("done", "budget")
        found = json.loads((cli.cwd / "runs" / row["run"] / "result.json").read_text())
        assert [node["exit_code"] for node in found["nodes"]] == [0, 0]


def tags(address: str) -> str:
    with urllib.request.urlopen(f"{address}data/plugin/scalars/tags", timeout=20) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize(("presses", "code", "state"), [(1, 0, "running"), (2, 5, "stopped")], ids=["left", "stopped"])
def test_ctrl_c_detaches_from_a_sweep_and_a_second_one_stops_it(
    presses: int, code: int, state: str, slurm: SlurmBed, cli: Cli
) -> None:
    run = {"command": ["sh", "-c", 'echo here; exec sleep "$0"']}
    file = cli.job(runtime="process", nodes=1, gpus="none", run=run, sweep=[["600"], ["601"]])
    up = cli.start("up", file, "--on", "hpc")
    assert up.stdout
    assert up.stderr
    assert "here" in up.stdout.readline()
    until(lambda: sum(" RUNNING " in line for line in slurm.jobs()) == 2, "not both run")
    up.send_signal(signal.SIGINT)
    for line in up.stderr:
        if "Ctrl-C again" in line:
            break
    if presses == 2:
        up.send_signal(signal.SIGINT)
    _, err = up.communicate(timeout=120)
    assert up.returncode == code, err
    assert len(slurm.jobs()) == (2 if state == "running" else 0)
    for one in cli.runs():
        assert json.loads(cli("status", one.name, "--json").stdout)["state"] == state
    cli("down", "--all")


def test_a_sweep_that_slurm_rejects_leaves_nothing(slurm: SlurmBed, cli: Cli) -> None:
    run = {"command": ["echo"]}
    file = cli.job(runtime="process", nodes=1, gpus="none", run=run, sweep=[["1"], ["2"]])
    done = cli("up", file, "--on", "wrong", code=3)
    assert "sbatch rejected the job" in done.stderr
    assert "partition" in done.stderr
    assert len(cli.runs()) == 2
    assert not [run for run in cli.runs() if (slurm.shared / ".launcher" / run.name).exists()]


def test_exec_runs_on_a_node_of_a_variant(slurm: SlurmBed, cli: Cli, tmp_path: Path) -> None:
    """By another user, without a record."""
    cli("up", job(cli, TICKS, env={"GREETING": "hello"}, sweep=[["x"]]), "--on", "hpc", "-d")
    until_printed(slurm, cli, "tick 1")
    other, command = user(slurm, tmp_path / "other"), 'echo "$GREETING from $LAUNCHER_NODE"; exit 3'
    done = other("exec", "--on", "hpc", "--node", "node-1", "--", "sh", "-c", command, code=3)
    assert "hello from node-1" in done.stdout
    cli("down")


def test_a_job_has_all_processors_of_its_nodes(cli: Cli) -> None:
    """As many as the bed's slurmd has; Slurm's default is one."""
    assert cli("up", job(cli, "nproc", nodes=1), "--on", "hpc").stdout.split() == ["2"]
    part = job(cli, "nproc", nodes=1, cluster={"options": ["--cpus-per-task=1"]})
    assert cli("up", part, "--on", "hpc").stdout.split() == ["1"]


def test_a_job_has_all_the_memory_of_its_nodes(slurm: SlurmBed, cli: Cli) -> None:
    """Not only the cluster's default."""
    slurm("scontrol", "update", "partitionname=all", "DefMemPerNode=500")
    shows = "scontrol show job $SLURM_JOB_ID | grep -o ',mem=[0-9.]*[MG]' | tail -n 1"
    try:
        assert cli("up", job(cli, shows), "--on", "hpc").stdout.split() == [",mem=4000M"]
        part = ("--on", "hpc", "--set", "nodes=2", "--set", "resources.memory=300m")
        assert cli("up", job(cli, shows), *part).stdout.split() == [",mem=600M"]
    finally:
        slurm("scontrol", "update", "partitionname=all", "DefMemPerNode=0")


def test_secrets_of_the_callers_environment_do_not_reach_slurm(slurm: SlurmBed, cli: Cli) -> None:
    """Slurm stores the environment of a job; the program gets the secret anyway."""
    here = Cli(cli.cwd, {**cli.env, "TOKEN": "sesame"})
    script = (
        "tr '\\0' '\\n' </proc/$(pgrep -o -f slurm_script)/environ | grep -c sesame; [ $TOKEN = sesame ] && echo opened"
    )
    assert here("up", job(cli, script, nodes=1, secrets=["TOKEN"]), "--on", "hpc").stdout.split() == ["0", "opened"]


def test_a_script_over_128_kib_is_submitted_and_checked(cli: Cli) -> None:
    """128 KiB is Linux's limit for an argument."""
    file = job(cli, "echo ${#LONG0} ${#LONG1}", nodes=1, env={"LONG0": "x" * 90_000, "LONG1": "y" * 90_000})
    assert cli("up", file, "--on", "far").stdout.split() == ["90000", "90000"]
    assert "to start at" in cli("doctor", file, "--on", "hpc").stdout


def test_a_settings_file_that_becomes_invalid_does_not_end_up(slurm: SlurmBed, cli: Cli) -> None:
    following = cli.start("up", job(cli, "echo on; while [ ! -e go ]; do sleep 0.1; done", nodes=1), "--on", "hpc")
    until_printed(slurm, cli, "on")
    Path(cli.env["XDG_CONFIG_HOME"], "launcher", "settings.yaml").write_text("clusters: {hpc: {kind: slum")
    time.sleep(6)  # it collects files every five seconds
    (folder(slurm, cli) / "workdir" / "node-0" / "go").touch()
    _, err = following.communicate(timeout=60)
    assert following.returncode == 0, err


@pytest.mark.slow
def test_quickstart_runs_unchanged_on_a_cluster(cli: Cli) -> None:
    """Even if the settings file does not contain the number of GPUs per node."""
    smaller = ("--set", f"code={ROOT}", "--set", "run.args.epochs=1")
    done = cli("up", ROOT / "jobs" / "quickstart.yaml", *smaller, "--on", "plain")
    assert "no GPUs are requested" in done.stderr
    assert cli.result()["state"] == "done"


def test_doctor_tries_the_clusters_python(cli: Cli) -> None:
    file = cli.job(runtime="process", nodes=2, gpus="none", run={"script": cli.program("raises.py")})
    rows = json.loads(cli("doctor", file, "--on", "hpc", "--json").stdout)["checks"]
    assert (rows[-1]["name"], rows[-1]["level"]) == ("python", "ok")
    assert "torch" in rows[-1]["what"]
    settings = Path(cli.env["XDG_CONFIG_HOME"], "launcher", "settings.yaml")
    settings.write_text(settings.read_text().replace(sys.executable, "/nowhere/python"))
    assert "/nowhere/python" in cli("doctor", file, "--on", "hpc", code=3).stdout


def test_doctor_asks_slurm_whether_it_would_accept_the_job(slurm: SlurmBed, cli: Cli) -> None:
    file = job(cli, "echo", nodes=4)
    rows = json.loads(cli("doctor", file, "--on", "hpc", "--json").stdout)["checks"]
    assert [(row["name"], row["level"]) for row in rows] == [
        (n, "ok") for n in ("slurm", "time to save", "workdir", "sbatch", "node")
    ]
    said = {row["name"]: row["what"] for row in rows}
    assert "n[1-4]" in said["sbatch"]
    assert f"n1 writes to {slurm.shared}" in said["node"]
    assert not [*(slurm.shared / ".launcher").glob(".doctor*")]
    options = "cluster.options=[--requeue, --signal=B:USR2@60, --exclude=n1]"  # not all of them are srun's, too
    assert "n2 writes to" in cli("doctor", file, "--on", "hpc", "--set", "nodes=1", "--set", options).stdout
    assert "invalid partition" in cli("doctor", file, "--on", "wrong", code=3).stdout.lower()


ON_N4 = ("--set", "nodes=1", "--set", "cluster.options=[--nodelist=n4]")


def test_a_node_that_does_not_see_the_shared_folder_is_found_and_blamed(slurm: SlurmBed, cli: Cli) -> None:
    """Before a job by doctor, on a machine for such jobs; after it, even if the others have started and were ended."""
    here, file = cli, job(cli, "echo here; sleep 60", nodes=4)
    with slurm.blind("n4"):
        shown = here("doctor", file, "--on", "hpc", *ON_N4, code=3).stdout
        assert f"n4 does not see {slurm.shared}" in shown
        assert "--exclude=n4" in shown
        assert "n1 writes to" in here("doctor", file, "--on", "hpc").stdout
        failed = here("up", file, "--on", "hpc", code=1).stderr
        assert "failed node-3 could not be started: its task on n4 exited with code 2 before its program" in failed
        assert "--set 'cluster.options=[--nodelist=n4]'" in failed
        assert "cannot open" in failed
        first = here("up", file, "--on", "hpc", *ON_N4, code=1).stderr
        what = (
            r"(job \d+: FAILED \(JobLaunchFailure\)|its batch script could not write to \S+) on n4"  # newer: the latter
        )
        assert re.search(f"could not be started: {what}", first), first
        assert "check whether n4 sees the cluster's workdir" in first
        assert "dmesg" not in first
        one = here.job("one", runtime="process", nodes=1, gpus="none", run={"command": ["echo"]}, sweep=[["a"], ["b"]])
        task = here("up", one, "--on", "hpc", *ON_N4, code=1).stderr
        assert re.search(f"could not be started: {what}", task), task
        assert "check whether n4 sees the cluster's workdir" in task


def test_doctor_finds_a_shared_folder_without_free_space(slurm: SlurmBed, cli: Cli, tmp_path: Path) -> None:
    shared = small_disk(slurm, cli, tmp_path)
    try:
        (shared / ".launcher").mkdir()
        subprocess.run(["dd", "if=/dev/zero", f"of={shared}/fill", "bs=4k"], check=False, stderr=subprocess.DEVNULL)
        shown = cli("doctor", job(cli, "echo"), "--on", "small", code=3).stdout
        assert re.search("FAIL.* workdir .*No space left on device", shown), shown
    finally:
        subprocess.run(["umount", "-l", str(shared)], check=True)


@pytest.mark.parametrize("command", [("shell",), ("image", "ship")])
def test_commands_without_cluster_support_suggest_a_fix(command: tuple[str, ...], cli: Cli) -> None:
    refused = cli(*command, job(cli, "echo"), "--on", "hpc", code=2).stderr
    assert "--on hpc" in refused
    assert "launcher exec" in refused or "image build JOB --push" in refused


def small_disk(slurm: SlurmBed, cli: Cli, tmp_path: Path) -> Path:
    """Mount a small disk and add a cluster `small`, whose shared folder is on it."""
    shared = tmp_path / "small"
    shared.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(shared)], check=True)
    settings = Path(cli.env["XDG_CONFIG_HOME"], "launcher", "settings.yaml")
    known = yaml.safe_load(settings.read_text())["clusters"]
    settings.write_text(yaml.safe_dump({"clusters": {**known, "small": {**known["hpc"], "workdir": str(shared)}}}))
    return shared


def test_a_full_shared_disk_is_no_success(slurm: SlurmBed, cli: Cli, tmp_path: Path) -> None:
    """It fills up while the job waits: no program runs."""
    shared = small_disk(slurm, cli, tmp_path)
    try:
        slurm("scontrol", "update", "partitionname=all", "State=DOWN")
        waiting = cli.start("up", job(cli, "echo trained"), "--on", "small")
        until(slurm.jobs, "it was not submitted")
        subprocess.run(["dd", "if=/dev/zero", f"of={shared}/fill", "bs=4k"], check=False, stderr=subprocess.DEVNULL)
        slurm("scontrol", "update", "partitionname=all", "State=UP")
        _, err = waiting.communicate(timeout=60)
        assert waiting.returncode == 1, err
        assert f"could not be started: its batch script could not write to {shared}" in err
        assert cli.result()["state"] == "failed"
    finally:
        slurm("scontrol", "update", "partitionname=all", "State=UP")
        subprocess.run(["umount", "-l", str(shared)], check=True)


def test_a_job_whose_comment_was_changed_is_found_and_stopped(slurm: SlurmBed, cli: Cli) -> None:
    cli("up", job(cli, TICKS), "--on", "hpc", "-d")
    until_printed(slurm, cli, "tick")
    slurm("scontrol", "update", f"jobid={slurm.jobs()[0].split()[0]}", "comment=project 17")
    assert status(cli)["state"] == "running"
    (folder(slurm, cli) / ".node" / "submitted").unlink()  # then Slurm knows it by its script
    cli("down")
    assert not slurm.jobs()
    assert cli.result()["state"] == "stopped"


def test_a_job_that_a_program_submits_is_a_run_of_its_own(slurm: SlurmBed, cli: Cli) -> None:
    """By sbatch and by the launcher. The first run's time limit, options and number of restarts do not apply to it."""
    shows = 'echo "$LAUNCHER_RUN rank $RANK of $WORLD_SIZE, limit ${LAUNCHER_TIMEOUT-none}, ${SLURM_MEM_PER_CPU-none}"'
    run = {"command": ["sh", "-c", shows]}
    inner = cli.job("inner", runtime="process", nodes=2, gpus="none", run=run, restarts=1)
    by_hand = cli.cwd / "inner.sbatch"
    by_hand.write_text(cli("export", inner, "--to", "slurm", "--on", "hpc").stdout)
    there = cli.cwd / "there"
    there.mkdir()
    submits = (
        f"cd {there} && SLURM_RESTART_COUNT=9 sbatch {by_hand}\n"
        f"cd {cli.cwd} && {sys.executable} -m launcher up {inner} --on hpc -d\n"
        "echo submitted from rank $RANK of $WORLD_SIZE"
    )
    options = {"cluster": {"options": ["--mem-per-cpu=100M"]}, "timeout": "10m", "resources": {"cpus": 1}}
    outer = cli("up", job(cli, submits, nodes=1, **options), "--on", "hpc", "--set", "nodes=1", timeout=120)
    assert "submitted from rank 0 of 1" in outer.stdout
    until(lambda: not slurm.jobs(), "they do not end")
    (output,), (by_sbatch,) = (there / "output").iterdir(), there.glob("slurm-*.out")
    said = sorted(by_sbatch.read_text().splitlines())
    assert said == [f"{output.name} rank {rank} of 2, limit none, none" for rank in (0, 1)]
    runs = {run.name.split("-")[0]: run.name for run in cli.runs()}
    theirs = slurm.shared / ".launcher" / runs["inner"] / "logs"
    for rank in (0, 1):
        own = (theirs / f"node-{rank}.log").read_text()
        assert own == f"{runs['inner']} rank {rank} of 2, limit none, none\n"
    assert "submitted from rank" in (slurm.shared / ".launcher" / runs["job"] / "state" / "node.sh").read_text()


def test_the_jobs_options_override_variables_of_the_callers_shell(slurm: SlurmBed, cli: Cli) -> None:
    """What neither the job nor the cluster sets may come from some of them; the rest is not used."""
    shell = {"SBATCH_PARTITION": "missing", "SBATCH_TIMELIMIT": "7", "SBATCH_JOB_NAME": "other"}
    shell |= {"SBATCH_ARRAY_INX": "0-3", "SBATCH_WAIT": "1", "SBATCH_EXPORT": "NONE", "SQUEUE_PARTITION": "missing"}
    shell |= {"SQUEUE_STATES": "PENDING", "SCANCEL_PARTITION": "missing", "SLURM_CLUSTERS": "missing"}
    here = Cli(cli.cwd, {**cli.env, **shell})
    file = job(here, f"scontrol show job $SLURM_JOB_ID\n{TICKS}", nodes=1, cluster={"partition": "all"})
    assert "to start at" in here("doctor", file, "--on", "hpc").stdout
    here("up", file, "--on", "hpc", "-d")
    until_printed(slurm, here, "tick")
    shown = text_of(folder(slurm, here) / "logs" / "node-0.log")
    for text in ("JobName=job", "Partition=all", "TimeLimit=00:07:00"):
        assert text in shown
    here("down")
    assert not slurm.jobs()


def until_ended(slurm: SlurmBed, following: subprocess.Popen[str], timeout: float = 120) -> str:
    """Wait for the end of `up`, and start requeued jobs, which Slurm otherwise delays for two minutes."""
    deadline = time.monotonic() + timeout
    while following.poll() is None:
        assert time.monotonic() < deadline, f"it does not finish: {slurm.jobs()}"
        for line in slurm.jobs():
            number, state, _ = line.split()
            if state == "PENDING":
                slurm("scontrol", "update", f"jobid={number}", "starttime=now", check=False)
        time.sleep(0.5)
    return "".join(following.communicate())


def test_a_failed_run_is_requeued_as_often_as_it_may_restart(slurm: SlurmBed, cli: Cli) -> None:
    script = 'n=$(cat "$LAUNCHER_OUTPUT/n" 2>/dev/null || echo 0); echo attempt $n; [ $n -ge 1 ] && exit 0; '
    script += 'sleep 1; echo 1 >"$LAUNCHER_OUTPUT/n"; exit 7'
    shown = until_ended(slurm, cli.start("up", job(cli, script, nodes=1, restarts=1), "--on", "hpc"))
    assert "attempt 1" in shown
    (node,) = cli.result()["nodes"]
    assert cli.result()["state"] == "done"
    assert node["restarts"] == 1
    assert node["restarted"][0].startswith("exit code 7")


def test_a_node_that_is_lost_requeues_the_job_on_another_one(slurm: SlurmBed, cli: Cli) -> None:
    script = "echo on $SLURMD_NODENAME; [ -e $LAUNCHER_OUTPUT/again ] && exit 0; : >$LAUNCHER_OUTPUT/again; sleep 600"
    following = cli.start("up", job(cli, script, nodes=1, restarts=1), "--on", "hpc")
    until_printed(slurm, cli, "on n1")
    slurm("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    try:
        shown = until_ended(slurm, following)
    finally:
        slurm("scontrol", "update", "nodename=n1", "state=resume")
    assert "on n2" in shown
    assert cli.result()["state"] == "done"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", ["quickstart", "bed_2node"])
@pytest.mark.parametrize("nodes", [2, 4])
def test_the_weights_are_the_same_as_on_plain_process_nodes(nodes: int, file: str, cli: Cli, tmp_path: Path) -> None:
    here = Cli(cli.cwd, {**cli.env, "HOME": str(tmp_path)})
    sets = [f"code={ROOT}", "gpus=none", "run.args.epochs=1", "run.args.print_digest=true", "runtime=process"]
    sets.append(f"port={free_port()}")
    sets += ["image=null", "mounts={}"] if file == "bed_2node" else []
    options = [option for each in sets for option in ("--set", each)]
    digests = []
    for where in (("--nodes", ",".join(["local"] * nodes)), ("--set", f"nodes={nodes}", "--on", "hpc")):
        here("up", ROOT / "jobs" / f"{file}.yaml", *options, *where, timeout=800)
        log = (here.runs()[-1] / "logs" / "rank-0.log").read_text()
        digests.append(re.findall(r"\b[0-9a-f]{64}\b", log)[-1])
    assert digests[0] == digests[1]
