"""Cost of following an idle run: CPU time per minute on the launcher's machine.

    python -m tests.bed up -n 8 && python -m bench.quiet [--nodes 8] [--seconds 120] [--json FILE]

A job that sleeps runs on real nodes of the test bed while an attached `launcher up` follows it, once with its output
in a pipe and once in a terminal, where it shows live progress. Measured are the launcher's process and all processes it
started, from `--settle` seconds after the start. The nodes run on this machine too, but are not measured.
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

TARGET = 1.0  # CPU seconds per minute
COLUMNS, LINES = 120, 40
STARTED = 60.0  # seconds within which every container must run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.quiet", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120.0, help="duration of the measurement per kind of output")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds from the start to the measurement")
    parser.add_argument("--json", type=Path, metavar="FILE")
    call = parser.parse_args()
    found: dict[str, Any] = {"machine": report.machine(), "nodes": call.nodes, "seconds": call.seconds, "results": {}}
    with bed_of(call.nodes) as bed, Caller.at(bed.ssh_config) as caller:
        asleep = int(call.settle + call.seconds + STARTED)
        job = caller.job(
            "bench-quiet", [node.alias for node in bed.nodes[: call.nodes]], {"command": ["sleep", str(asleep)]}
        )
        for output, following in (("pipe", in_pipe), ("terminal", in_terminal)):
            with following(caller, job) as process:
                _wait_until_started(caller, process)
                time.sleep(call.settle)
                found["results"][output] = measure(process, call.seconds)
            caller.down()
    rows = [("output goes to a", "CPU s per minute", "user", "system", "target")]
    for output, value in found["results"].items():
        figures = (f"{value[key]:.2f}" for key in ("total", "user", "system"))
        rows.append((output, *figures, report.compared(value["total"], TARGET, "s per minute")))
    print(report.table(rows))
    if call.json:
        report.write(call.json, found)
    return 0


def measure(process: subprocess.Popen[bytes], seconds: float) -> dict[str, float]:
    """CPU seconds per minute of the process and its whole session. Raises RuntimeError if it ends."""
    before, began = _processor_time(process.pid), time.monotonic()
    time.sleep(seconds)
    after, took = _processor_time(process.pid), time.monotonic() - began
    if process.poll() is not None:
        raise RuntimeError(f"launcher up ended during the measurement: exit {process.returncode}")
    user, system = ((b - a) * 60 / took for a, b in zip(before, after, strict=True))
    return {"total": user + system, "user": user, "system": system}


def _processor_time(session: int) -> tuple[float, float]:
    """User and system seconds of all processes of a session, including children that exited and were waited for."""
    user = system = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just exited
            fields = stat.read_text().rpartition(")")[2].split()  # from the third field of proc(5) on
            if int(fields[3]) == session:
                user += int(fields[11]) + int(fields[13])
                system += int(fields[12]) + int(fields[14])
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
    """An attached `up` whose output is discarded."""
    process = caller.start(
        *("up", job), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        _detach(process)


@contextlib.contextmanager
def in_terminal(caller: Caller, job: str) -> Iterator[subprocess.Popen[bytes]]:
    """An attached `up` in a pseudo-terminal of the usual size, whose output is read and discarded."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    process = caller.start("up", job, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: the last process with the open terminal has exited
            while os.read(master, 1 << 16):
                pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield process
    finally:
        _detach(process)
        reader.join(5)
        os.close(master)


def _detach(process: subprocess.Popen[bytes]) -> None:
    """Send one Ctrl-C to detach; `down` then stops the run."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
