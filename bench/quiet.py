"""What it costs to follow a run that says nothing: processor time of the launcher's machine, a minute.

    python -m tests.bed up -n 8 && python -m bench.quiet [--nodes 8] [--seconds 120] [--json FILE]

A job that sleeps runs on real nodes of the test bed while an attached `launcher up` follows it, once with its output
in a pipe and once in a terminal, where it shows live progress. Counted are the launcher's own process and all that it
started, from `--settle` seconds after the start on. The nodes share this machine, but what they do is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import report
from bench.environment import LIMIT, Caller, bed_of

TARGET = 1.0  # processor seconds a minute
COLUMNS, LINES = 120, 40
STARTED = 60.0  # seconds until every container surely runs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.quiet", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long each way is watched")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds from the start until counting begins")
    parser.add_argument("--json", type=Path, metavar="FILE")
    call = parser.parse_args()
    found: dict[str, Any] = {"machine": report.machine(), "nodes": call.nodes, "seconds": call.seconds, "results": {}}
    with bed_of(call.nodes) as bed, Caller.at(bed.ssh_config) as caller:
        asleep = int(call.settle + call.seconds + STARTED)
        job = caller.job(
            "bench-quiet", [node.alias for node in bed.nodes[: call.nodes]], {"command": ["sleep", str(asleep)]}
        )
        for way, following in (("pipe", in_pipe), ("terminal", in_terminal)):
            with following(caller, job) as process:
                _wait_until_started(caller, process)
                time.sleep(call.settle)
                found["results"][way] = watch(process, call.seconds)
            caller.down()
    rows = [("output goes to a", "processor s a minute", "user", "system", "target")]
    for way, value in found["results"].items():
        figures = (f"{value[key]:.2f}" for key in ("total", "user", "system"))
        rows.append((way, *figures, report.judged(value["total"], TARGET, "s a minute")))
    print(report.table(rows))
    if call.json:
        report.write(call.json, found)
    return 0


def watch(process: subprocess.Popen[bytes], seconds: float) -> dict[str, float]:
    """Processor seconds a minute that the process and all of its session take. Raises RuntimeError if it ends."""
    before, began = _processor_time(process.pid), time.monotonic()
    time.sleep(seconds)
    after, took = _processor_time(process.pid), time.monotonic() - began
    if process.poll() is not None:
        raise RuntimeError(f"launcher up ended while it was watched: exit {process.returncode}")
    user, system = ((b - a) * 60 / took for a, b in zip(before, after, strict=True))
    return {"total": user + system, "user": user, "system": system}


def _processor_time(session: int) -> tuple[float, float]:
    """User and system seconds of every process of a session, those included that have ended and were waited for."""
    user = system = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            words = stat.read_text().rpartition(")")[2].split()  # from the third field of proc(5) on
            if int(words[3]) == session:
                user += int(words[11]) + int(words[13])
                system += int(words[12]) + int(words[14])
    tick = os.sysconf("SC_CLK_TCK")
    return user / tick, system / tick


def _wait_until_started(caller: Caller, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTED
    while not any('"started"' in events.read_text() for events in caller.folder.glob("runs/*/events.jsonl")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run has not started in {STARTED:.0f} s (exit code {process.poll()})")
        time.sleep(0.1)


@contextlib.contextmanager
def in_pipe(caller: Caller, job: str) -> Iterator[subprocess.Popen[bytes]]:
    """An attached `up` whose output nobody sees."""
    process = caller.start(
        *("up", job), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        _leave(process)


@contextlib.contextmanager
def in_terminal(caller: Caller, job: str) -> Iterator[subprocess.Popen[bytes]]:
    """An attached `up` before a terminal of the usual size, which is read as a terminal's program does."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    process = caller.start("up", job, stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: the last one who had it open has ended
            while os.read(ours, 1 << 16):
                pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield process
    finally:
        _leave(process)
        reader.join(5)
        os.close(ours)


def _leave(process: subprocess.Popen[bytes]) -> None:
    """One Ctrl-C: the run goes on, `down` ends it."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
