"""The Python interface, as used in a notebook: runs of plain processes on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import launcher
from launcher import Run, errors
from launcher.run.selection import Selection
from launcher.run.state import RunState
from launcher.run.watch import observed, supervise
from launcher.run.watch.messages import Message, Output
from tests.e2e.cli import ROOT
from tests.ports import free_port

SLOW = "i=0; while [ $i -lt 400 ]; do echo line $i; i=$((i+1)); sleep 0.05; done"


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "project").mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "project")


def job(script: str, nodes: int = 2, **keys: Any) -> launcher.api.jobs.Job:
    run = {"command": ["sh", "-c", script]}
    here = {"runtime": "process", "nodes": ["local"] * nodes, "port": free_port()}
    return launcher.load({"name": "notebook", "run": run, **here, **keys})


def quiet(_: str) -> None:
    """Discard the messages of a run."""


@pytest.fixture
def slow_run() -> Any:
    with launcher.up(job(SLOW), log=quiet) as run:
        yield run
        run.down(purge=True)


def followers() -> set[int]:
    """The `tail` processes that this process has started, through shells."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has exited
            name, _, rest = entry.read_text().partition("(")[2].rpartition(")")
            parents[int(entry.parent.name)] = (int(rest.split()[1]), name)
    found = set()
    for pid in [pid for pid, (_, name) in parents.items() if name == "tail"]:
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above][0]
        if above == os.getpid():
            found.add(pid)
    return found


def test_no_messages_are_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    launcher.plan(job("true", 1), offline=True, log=None)
    with launcher.up(job("true", 1), log=None, progress=None) as run:
        assert run.wait().state is RunState.DONE
        assert launcher.find(run.id, log=None).id == run.id
    assert capsys.readouterr().out == ""


def test_a_change_of_the_working_directory_does_not_split_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `%cd` in a notebook, and Hydra."""
    with launcher.up(job("echo hello", 1), log=quiet) as run:
        monkeypatch.chdir(tmp_path)
        assert run.wait().state is RunState.DONE
        assert [*run.logs()] == ["hello"]
        assert run.outcome
        run.fetch()
    assert run.folder == tmp_path / "project" / "runs" / run.id
    assert (run.folder / "logs" / "local.log").read_text() == "hello\n"
    assert (run.folder / "result.json").exists()
    assert not (tmp_path / "runs").exists()


def test_output_that_is_not_read_to_its_end_leaves_no_thread_and_no_process() -> None:
    """Broken off at a line, dropped, or in use when the run is closed; also if nothing reads what has arrived."""
    script = "i=0; while :; do echo line $((i += 1)); [ $((i % 5000)) -ne 0 ] || sleep 0.1; done"
    with launcher.up(job(script), log=quiet) as run, contextlib.ExitStack() as at_the_end:
        at_the_end.callback(run.down, purge=True)
        threads, tails = threading.active_count(), followers()  # a thread of something else may still be ending
        for number in range(10):
            lines = run.logs(all_nodes=True)
            for line in lines:
                if line.startswith("line 3") or number % 2:
                    break
            if number < 9:
                del lines
        assert followers() - tails
        run.close()
        until = time.monotonic() + 60
        with pytest.raises(RuntimeError, match="closed"):
            next(line for line in lines if time.monotonic() > until)
        while (threading.active_count() > threads or followers() - tails) and time.monotonic() < until:
            time.sleep(0.05)
        assert threading.active_count() <= threads
        assert not followers() - tails


def test_a_run_from_its_start_to_its_removal() -> None:
    with launcher.up(
        job('echo rank $RANK here; echo \'{"kind": "epoch", "epoch": 1}\' >>$LAUNCHER_OUTPUT/metrics.jsonl')
    ) as run:
        outcome = run.wait()
        assert (outcome.state, outcome.exit_code, outcome.failure) == (RunState.DONE, 0, None)
        assert [node.exit_code for node in outcome.nodes] == [0, 0]
        assert list(run.logs()) == ["rank 0 here"]
        assert sorted(run.logs(all_nodes=True)) == ["rank 0 here", "rank 1 here"]
        assert list(run.logs(node="local-1", tail=1, follow=False)) == ["rank 1 here"]
        assert run.metrics()[0]["epoch"] == 1
        assert run.status().state == "done"
        assert {removed.node for removed in run.down(purge=True)} == {"local-0", "local-1"}
    found = launcher.find("notebook")
    assert found.outcome == outcome  # the recorded outcome
    assert found.wait(timeout=0.1) == outcome


def test_a_failed_run_is_a_value_and_names_who_failed_first() -> None:
    with launcher.up(job("echo broken; exit $((3 * RANK))"), log=quiet) as run:
        outcome = run.wait()
    assert (outcome.state, outcome.exit_code) == (RunState.FAILED, 1)
    assert outcome.failure is not None
    assert (outcome.failure.node, outcome.failure.exit_code) == ("local-1", 3)
    assert launcher.find(run.id).outcome == outcome


def test_reading_the_log_does_not_change_the_run(slow_run: Run) -> None:
    for line in slow_run.logs():
        if line == "line 3":
            break
    assert slow_run.outcome is None
    assert slow_run.status().state == "running"
    assert list(slow_run.logs(follow=False))[:4] == [f"line {i}" for i in range(4)]


def test_a_wait_that_times_out_does_not_stop_the_run(slow_run: Run) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="it is still running"):
        slow_run.wait(timeout=1)
    assert time.monotonic() - began < 15  # the run takes 20
    assert slow_run.status().state == "running"
    assert slow_run.outcome is None


def test_while_the_caller_pauses_no_peer_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `show`, as between two calls of `wait`. Rank 1 fails; rank 0 ends long after it would have been stopped."""
    monkeypatch.setattr(observed, "PEER_TIMEOUT", 0.0)
    monkeypatch.setattr(supervise, "STACKS", 0.0)
    fail = tmp_path / "fail"
    script = f"echo ready; while [ ! -e '{fail}' ]; do sleep 0.1; done; [ $RANK = 0 ] || exit 3; sleep 2"

    def show(message: Message) -> None:
        if isinstance(message, Output) and not fail.exists():
            fail.touch()
            while not all(state.phase.ended for state in run.containers().values()):
                time.sleep(0.05)

    with launcher.up(job(script), log=quiet) as run:
        outcome = run.wait(show=show)
    assert outcome.state is RunState.FAILED
    assert [node.exit_code for node in outcome.nodes] == [0, 3]


def test_each_wait_shows_the_output_that_it_asks_for(slow_run: Run) -> None:
    def shown(**selection: Any) -> set[str]:
        seen: list[object] = []
        with pytest.raises(TimeoutError):
            slow_run.wait(timeout=1, show=seen.append, logs=Selection(**selection))
        return {message.node for message in seen if isinstance(message, Output)}

    assert shown() == {"local-0"}
    assert shown(node="local-1") == {"local-1"}
    assert shown(all_nodes=True) == {"local-0", "local-1"}


def test_concurrent_waits_share_one_supervisor() -> None:
    """One returns at its time limit, another one on an error; the third one sees the end, which is recorded once."""
    with launcher.up(job(SLOW.replace("400", "60")), log=quiet) as run:
        supervises = threading.Event()

        def broken(_: object) -> None:
            supervises.set()
            raise RuntimeError("the reader's own")

        with ThreadPoolExecutor(4) as pool:
            short = pool.submit(run.wait, 0.5)
            failing = pool.submit(run.wait, show=broken)
            with pytest.raises(TimeoutError):
                short.result(30)
            assert supervises.wait(30)
            rest = [pool.submit(run.wait) for _ in range(2)]
            with pytest.raises(RuntimeError, match="the reader's own"):
                failing.result(30)
            assert rest[0].result(60) == rest[1].result(60)
        assert run.wait().state is RunState.DONE
        events = (run.folder / "events.jsonl").read_text()
        assert events.count('"event": "ended"') == 1
        assert events.count('"event": "node ended", "node": "local-0"') == 1
        assert list(run.logs()) == [f"line {i}" for i in range(60)]
        run.down(purge=True)


def test_ctrl_c_in_wait_does_not_stop_the_run(tmp_path: Path) -> None:
    program = f"""
import launcher
from pathlib import Path
command = ["sh", "-c", "until [ -e {tmp_path}/end ]; do sleep 0.05; done"]
run = launcher.up({{"name": "left", "runtime": "process", "nodes": ["local"], "run": {{"command": command}}}})
try:
    print("started", flush=True)
    run.wait()
except KeyboardInterrupt:
    print(run.status().state)
    Path("{tmp_path}/end").touch()
    print(run.wait(timeout=60).state.value)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.stdout.readline() != "started\n":
        assert process.poll() is None
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=90)
    assert out.split() == ["running", "done"]


def test_runs_can_be_started_in_several_threads() -> None:
    here = threading.Barrier(4)

    def one(number: int) -> tuple[int, list[str]]:
        here.wait()
        with launcher.up(job(f"echo number {number}", 1), log=quiet) as run:
            code = run.wait().exit_code
            lines = list(run.logs())
            run.down(purge=True)
            return code, lines

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(4))) == [(0, [f"number {number}"]) for number in range(4)]


def test_errors_are_values_with_where_what_and_what_to_do() -> None:
    with pytest.raises(errors.RunUnknown) as unknown:
        launcher.find("nothing")
    assert unknown.value.exit_code == 2
    assert unknown.value.next_step
    with pytest.raises(errors.JobInvalid) as invalid:
        launcher.load({"name": "x", "nodes": ["local"], "runtime": "process", "run": {"modul": "train"}})
    assert invalid.value.where == "job"
    assert "did you mean 'module'?" in invalid.value.what
    with pytest.raises(errors.UsageError, match="sweep of 2 variants"):
        launcher.up(job("true", sweep=[["a"], ["b"]]))


def test_a_job_from_a_mapping_equals_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: a\nruntime: process\nnodes: [local]\nrun: {module: train, args: {lr: 0.1, epochs: 3}}\n")
    keys = {"name": "a", "runtime": "process", "nodes": ["local"], "run": {"module": "train", "args": {"lr": 0.1}}}
    assert launcher.load(file) == launcher.load(keys, set={"run.args.epochs": 3})
    assert launcher.load(file, set=["run.args.lr=0.2"]) == launcher.load(file, set={"run.args.lr": 0.2})


def test_closing_a_run_ends_a_wait_in_another_thread(slow_run: Run) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slow_run.wait)
        while not slow_run.status().nodes[0].last.startswith("line"):
            assert not waiting.done()
        slow_run.close()
        with pytest.raises(RuntimeError, match="closed while a thread waited"):
            waiting.result(30)
    assert slow_run.outcome is None
    assert slow_run.status().state == "running"  # the run is reconnected
