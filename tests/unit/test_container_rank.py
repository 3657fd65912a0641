"""The rank script: the worker keeps its pid, exit code and signals, and has its own log."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher import container_scripts

SHELLS = [name for name in ("dash", "bash", "busybox") if shutil.which(name)]


class Worker:
    def __init__(self, root: Path, shell: str) -> None:
        self.root = root
        self.log = root / "out" / "logs" / "rank-3.log"
        self.log.parent.mkdir(parents=True)
        self.attempts = root / "out" / "state" / "gpu-a.attempts"
        self.attempts.parent.mkdir()
        (root / "kit" / "home").mkdir(parents=True)
        for name, text in container_scripts.scripts().items():
            (root / "kit" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "kit" / name).write_bytes(text)
        self.env = {"PATH": os.environ["PATH"], "RANK": "3", "LAUNCHER_OUTPUT": str(root / "out")}
        self.env["LAUNCHER_NODE"] = "gpu-a"
        self.shell = [shutil.which(shell) or ""]
        if shell == "busybox":
            tools = root / "applets"
            tools.mkdir()
            subprocess.run(["busybox", "--install", "-s", tools], check=True)
            self.env["PATH"] = str(tools)
            self.shell.append("sh")

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        command = [*self.shell, str(self.root / "kit" / "rank.sh"), *argv]
        return subprocess.Popen(
            command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )

    def run(self, *argv: str) -> tuple[int, bytes]:
        process = self.start(*argv)
        out, _ = process.communicate(timeout=30)
        return process.returncode, out


@pytest.fixture(params=SHELLS)
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Worker:
    return Worker(tmp_path, request.param)


def test_the_worker_keeps_the_pid_that_was_started(worker: Worker) -> None:
    process = worker.start(sys.executable, "-c", "import os; print(os.getpid())")
    out, _ = process.communicate(timeout=30)
    assert int(out) == process.pid


def test_both_streams_go_in_order_to_the_log_and_to_stdout(worker: Worker) -> None:
    code, out = worker.run("/bin/sh", "-c", "echo a; echo b >&2; echo c; printf d; exit 5")
    assert (code, out, worker.log.read_bytes()) == (5, b"a\nb\nc\nd", b"a\nb\nc\nd")


def test_each_worker_sees_its_own_instance_of_a_gpu(worker: Worker) -> None:
    worker.env |= {"LAUNCHER_MIG": "MIG-a,MIG-GPU-b/1/0,MIG-c", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "all"}
    assert worker.run("/bin/sh", "-c", "echo $CUDA_VISIBLE_DEVICES")[1] == b"MIG-GPU-b/1/0\n"


def test_a_burst_of_any_bytes_arrives_in_both_outputs(worker: Worker) -> None:
    out = worker.run(sys.executable, "-c", "import os; [os.write(1, bytes(range(256)) * 4096) for _ in range(4)]")[1]
    assert out == worker.log.read_bytes() == bytes(range(256)) * 4096 * 4


def test_a_second_attempt_appends_and_notes_where(worker: Worker) -> None:
    worker.attempts.touch()
    worker.run("echo", "one")
    worker.run("echo", "two")
    assert worker.log.read_bytes() == b"one\ntwo\n"
    assert worker.attempts.read_text() == "begins 0 3\nbegins 4 3\n"


def test_a_generations_log_is_its_own(worker: Worker) -> None:
    worker.attempts.touch()
    worker.env["LAUNCHER_GENERATION_OUTPUT"] = str(worker.root)
    worker.run("echo", "one")
    assert ((worker.root / "rank-3.log").read_bytes(), worker.attempts.read_bytes()) == (b"one\n", b"")


def test_notes_that_are_a_pipe_of_the_program_do_not_block(worker: Worker) -> None:
    os.mkfifo(worker.attempts)
    assert worker.run("echo", "one") == (0, b"one\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_output_before_the_process_group_was_killed_is_kept(worker: Worker, number: signal.Signals) -> None:
    """torchrun signals the worker's whole process group: the log copier must not be in it, or ignore the signal."""
    if worker.shell[-1] == "sh":
        program = ["/bin/sh", "-c", "echo last line; sleep 30"]
    else:
        program = [sys.executable, "-c", "import time; print('last line', flush=True); time.sleep(30)"]
    process = worker.start(*program)
    deadline = time.monotonic() + 60
    while not worker.log.exists() or not worker.log.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode in (-number, 128 + number, 1)
    assert out.startswith(b"last line\n")
    assert worker.log.read_bytes() == out


def test_the_stack_of_an_aborted_rank_is_kept(worker: Worker) -> None:
    """After a hang, entry.sh aborts every process that has the rank's number: the log copier, too."""
    go = worker.root / "go"
    waits = f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)"
    program = f"import pathlib, time\nprint('first', flush=True)\n{waits}\nprint('stack')"
    process = worker.start(sys.executable, "-c", program)
    deadline = time.monotonic() + 60
    while not worker.log.exists() or not worker.log.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            of_rank = f"LAUNCHER_OUTPUT={worker.env['LAUNCHER_OUTPUT']}".encode() in (entry / "environ").read_bytes()
            if of_rank and int(entry.name) != process.pid:
                os.kill(int(entry.name), signal.SIGABRT)
    go.touch()
    out, _ = process.communicate(timeout=60)
    assert out == worker.log.read_bytes() == b"first\nstack\n"


def test_the_worker_has_no_children_that_it_did_not_start(worker: Worker) -> None:
    """A worker that waits for any child must not wait for the log copier."""
    program = "import os\ntry: print(os.waitpid(-1, os.WNOHANG))\nexcept ChildProcessError: print('none')"
    assert worker.run(sys.executable, "-c", program) == (0, b"none\n")


def test_the_worker_inherits_no_extra_descriptors(worker: Worker) -> None:
    program = "import os\nfor fd in range(3, 12):\n    try: print(fd, os.fstat(fd))\n    except OSError: pass\n"
    assert worker.run(sys.executable, "-c", program) == (0, b"")


def test_the_worker_runs_even_if_the_pipe_cannot_be_created(worker: Worker) -> None:
    (worker.root / "kit" / "home").rmdir()
    code, out = worker.run("/bin/sh", "-c", "echo works; exit 4")
    assert code == 4
    assert out.endswith(b"works\n")
    assert b"rank 3" in out


def test_an_unwritable_log_does_not_stop_the_worker(worker: Worker) -> None:
    worker.log.mkdir()
    code, out = worker.run("/bin/sh", "-c", "echo works; exit 4")
    assert code == 4
    assert b"works\n" in out


def test_no_files_are_left(worker: Worker) -> None:
    worker.run("true")
    assert list((worker.root / "kit" / "home").iterdir()) == []
