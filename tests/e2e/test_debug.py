"""breakpoint() and `launcher debug`: ranks that are plain processes, a person at a terminal."""

from __future__ import annotations

import os
import re
import time

import pytest

from tests.e2e.cli import Cli, bed_job
from tests.e2e.terminal import Person

PROGRAM = """
import os

def double(x):
    y = 2 * x
    breakpoint()
    print("double is", y, flush=True)

double(21 + int(os.environ["RANK"]))
"""


LOCKS = """import ctypes, threading
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
def unlock():
    open("{fifo}").close()
    libc.pthread_mutex_unlock(mutex)
threading.Thread(target=unlock).start()
breakpoint()
libc.pthread_mutex_lock(mutex)  # which no signal ends
"""


@pytest.fixture
def watched(home_cli: Cli) -> Cli:
    """A launcher that is not in CI."""
    (home_cli.cwd / "double.py").write_text(PROGRAM)
    return Cli(home_cli.cwd, {**home_cli.env, "CI": ""})


def start(cli: Cli, nodes: int = 1, program: str = "double.py", **keys: object) -> None:
    job = cli.job("stop", runtime="process", nodes=["local"] * nodes, run={"command": ["python3", program]}, **keys)
    cli("up", "-d", job)


def until_waiting(cli: Cli, *ranks: int) -> None:
    while not all(f"rank {rank} on local-{rank}" in (seen := cli("status").stdout) for rank in ranks):
        assert "running" in seen, seen


def test_ranks_wait_for_a_terminal_one_after_another(watched: Cli) -> None:
    start(watched, nodes=2, hang_timeout="5m")
    until_waiting(watched, 0, 1)
    seen = re.sub(r"\s+", " ", watched("status").stdout)
    assert "rank 0 on local-0 waits in double.py:6, breakpoint(): launcher debug" in seen
    waits = "rank 1 on local-1 waits in double.py:6, breakpoint()"
    assert f"{waits} (hang_timeout goes on unless somebody follows the run): launcher debug" in seen
    person = Person(watched, "debug", "--rank", "1")
    person.sees(r"\(Pdb rank 1\) ")
    person.type("p y\r")
    person.sees(r"\b44\b")
    person.sees(r"\(Pdb rank 1\) ")
    person.type("\x03\r")  # readline may notice the signal only with the next key
    person.sees("rank 1 is stopped. c: it goes on")
    person.kill()  # the connection is lost: it waits again
    while watched("logs", "-F", "--node", "local-1").stdout.count("waits in double.py:6") < 2:
        assert "running" in watched("status").stdout
    again = Person(watched, "debug")
    for _ in range(2):
        rank = again.sees(r"rank (\d) on local-\d stopped in double.py:6")[1]
        again.sees(rf"\(Pdb rank {rank}\) ")
        again.type(f"y = 'seen {rank}'\r")
        again.sees(rf"\(Pdb rank {rank}\) ")
        again.type("c\r")
        again.sees(f"rank {rank} goes on")
    assert again.end() == 0
    watched("logs")
    assert watched.result()["state"] == "done"
    for rank in (0, 1):
        assert f"double is seen {rank}" in watched("logs", "--node", f"local-{rank}").stdout
    assert "has ended (done): no rank waits in breakpoint()" in watched("debug", code=2).stderr
    watched("down")
    assert "has ended (done): no rank waits in breakpoint()" in watched("debug", code=2).stderr
    assert "are 0 to 1" in watched("debug", "--rank", "7", code=2).stderr


def until_waiting_alone(cli: Cli, does: str = "waits in") -> None:
    while f"rank 0 on local {does}" not in (seen := re.sub(r"\s+", " ", cli("status").stdout)):
        assert "running" in seen, seen


def test_ctrl_c_ends_a_statement(watched: Cli) -> None:
    start(watched)
    until_waiting_alone(watched)
    person = Person(watched, "debug")
    person.sees(r"\(Pdb rank 0\) ")
    person.type("print('it ' 'runs'); import time; time.sleep(1000)\r")
    person.sees("it runs")
    person.type("\x03")
    person.sees("interrupting rank 0")
    person.sees("KeyboardInterrupt")
    person.sees(r"\(Pdb rank 0\) ")
    person.type("c\r")
    person.sees("rank 0 goes on")
    assert person.end() == 0
    assert "double is 42" in watched("logs").stdout


def test_ctrl_c_stops_a_program_where_it_is(watched: Cli) -> None:
    (watched.cwd / "sleeps.py").write_text(
        "import time\nbreakpoint()\nfor second in [500, 0]:\n    time.sleep(second)\nprint('end')\n"
    )
    start(watched, program="sleeps.py")
    until_waiting_alone(watched)
    person = Person(watched, "debug")
    for command in ("n", "b 5", "c"):
        person.sees(r"\(Pdb rank 0\) ")
        person.type(f"{command}\r")
    until_waiting_alone(watched, "runs a command")
    person.type("\x03")
    person.sees(r"sleeps.py\(4\)")
    person.sees(r"\(Pdb rank 0\) ")
    person.type("p 'second', second\r")
    person.sees("'second', 500")
    person.type("q\r")
    person.sees("rank 0 ends")
    person.end()


def test_a_call_that_cannot_be_interrupted_is_left_and_named(watched: Cli) -> None:
    os.mkfifo(watched.cwd / "fifo")
    (watched.cwd / "locks.py").write_text(LOCKS.format(fifo=watched.cwd / "fifo"))
    start(watched, program="locks.py")
    until_waiting_alone(watched)
    person = Person(watched, "debug")
    person.sees(r"\(Pdb rank 0\) ")
    person.type("n\r")
    until_waiting_alone(watched, "runs a command of `launcher debug` since")
    person.type("\x03")
    person.sees("interrupting rank 0")
    person.type("\x03")
    person.sees("left: rank 0 still runs the command")
    assert person.end() == 0
    until_waiting_alone(watched, "runs a command of `launcher debug` since")
    seen = re.sub(r"\s+", " ", watched("debug", code=3).stderr)
    assert "rank 0 on local runs a command of `launcher debug` since" in seen
    (watched.cwd / "fifo").write_text("")  # the call ends
    until_waiting_alone(watched)
    again = Person(watched, "debug")
    again.sees(r"locks.py\(9\)")
    again.sees(r"\(Pdb rank 0\) ")
    until_waiting_alone(watched, "has the terminal of a `launcher debug` since")
    seen = re.sub(r"\s+", " ", watched("debug", code=3).stderr)
    assert "rank 0 on local has the terminal of a `launcher debug` since" in seen
    again.type("c\r")
    assert again.end() == 0


@pytest.mark.slow
def test_a_rank_that_waits_does_not_hang(watched: Cli) -> None:
    start(watched, hang_timeout="5s")
    until_waiting_alone(watched)
    time.sleep(15)
    assert "rank 0 on local waits in" in watched("status").stdout
    watched("down")


def test_q_ends_the_rank_and_is_named(watched: Cli) -> None:
    start(watched)
    until_waiting_alone(watched)
    person = Person(watched, "debug")
    person.sees(r"\(Pdb rank 0\) ")
    person.type("q\r")
    person.sees("rank 0 ends")
    person.end()
    seen = watched("logs", code=1)
    assert "rank 0 was ended by `q` in launcher debug" in seen.stdout + seen.stderr
    assert "BdbQuit" not in seen.stdout


def test_a_run_that_nobody_watches_goes_on_and_says_so(watched: Cli) -> None:
    in_ci = Cli(watched.cwd, {**watched.env, "CI": "true"})
    (watched.cwd / "twice.py").write_text(PROGRAM + "double(0)\n")
    job = in_ci.job("skip", runtime="process", nodes=["local"], run={"command": ["python3", "twice.py"]})
    done = in_ci("up", job)
    assert len(re.findall(r"rank 0 on local skips breakpoint\(\) in twice.py:6: nobody watches", done.stdout)) == 1
    assert "double is 42\ndouble is 0\n" in done.stdout


def test_a_job_has_its_own_breakpoint(watched: Cli) -> None:
    job = watched.job(
        "own",
        runtime="process",
        nodes=["local"],
        run={"command": ["python3", "double.py"]},
        env={"PYTHONBREAKPOINT": "os.getpid"},
    )
    assert watched("up", job).stdout.endswith("double is 42\n")


@pytest.mark.ci
def test_torch_distributed_breakpoint_waits_too(watched: Cli) -> None:
    (watched.cwd / "dist.py").write_text(
        "import datetime, torch.distributed as dist\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=1234))\n"
        "rank = dist.get_rank()\n"
        "dist.breakpoint(rank=1)\n"
        "print('rank', rank, 'went on', flush=True)\n"
        "if rank == 0: breakpoint()\n"
    )
    job = watched.job("dist", runtime="process", nodes=["local"], processes=2, run={"script": "dist.py"}, gpus="none")
    watched("up", "-d", job)
    watched.until_logged("rank 1 on local waits in dist.py:4, torch.distributed.breakpoint(): launcher debug", 300)
    person = Person(watched, "debug", "--rank", "1")
    person.sees("u: up to your own frame, c: go on")
    person.sees(r"\(Pdb rank 1\) ")
    person.type("u\r")
    person.sees(r"dist.py\(4\)")
    person.sees(r"\(Pdb rank 1\) ")
    person.type("p rank\r")
    person.sees(r"\b1\b")
    person.type("c\r")
    assert person.end() == 0
    watched.until_logged("rank 0 on local waits in dist.py:6, breakpoint()")
    last = Person(watched, "debug")
    last.sees(r"\(Pdb rank 0\) ")
    last.type("c\r")
    assert last.end() == 0
    watched("logs")
    assert watched.result()["state"] == "done"


@pytest.mark.bed
@pytest.mark.timeout(300)
def test_a_rank_in_a_container_waits_and_who_follows_the_run_is_told(bed_cli: Cli) -> None:
    cli = Cli(bed_cli.cwd, {**bed_cli.env, "CI": ""})
    (cli.cwd / "double.py").write_text(PROGRAM.replace("    breakpoint", "    if x == 22: breakpoint"))
    job = cli.job("stop", **bed_job(run={"command": ["python3", "double.py"]}, hang_timeout="5m"))
    up = cli.start("up", job)
    assert up.stderr is not None
    said = "rank 1 on node2 waits in double.py:6, breakpoint(): launcher debug stop-"
    while said not in (line := up.stderr.readline()):
        assert line, "launcher up ended before"
    person = Person(cli, "debug")
    person.sees(r"\(Pdb rank 1\) ")
    person.type("p y\r")
    person.sees(r"\b44\b")
    person.type("c\r")
    person.sees("rank 1 goes on")
    assert person.end() == 0
    up.communicate(timeout=120)
    assert cli.result()["state"] == "done"
