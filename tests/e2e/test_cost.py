"""What the launcher itself costs while it does nothing but wait: processor time of a followed run and of a sweep."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cli import ROOT, Cli, bed_job
from tests.e2e.scene import Scene

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SETTLE, SECONDS = 10.0, 60.0  # from the start to the measurement; its duration


@contextlib.contextmanager
def following(cli: Cli, job: Path, terminal: bool) -> Iterator[subprocess.Popen[bytes]]:
    """An attached `up` whose output is read and discarded; Ctrl-C detaches it at the end."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    if terminal:
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        [*cli.launcher, "up", str(job)],
        cwd=cli.cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **cli.env},
        stdin=writer if terminal else subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        start_new_session=True,
    )
    os.close(writer)

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: the last process with the terminal has exited
            while os.read(reader, 1 << 16):
                pass

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        reading.join(5)
        os.close(reader)


def processor_seconds(session: int) -> float:
    """Return those of all processes of a session, and of their children that have exited (proc_pid_stat(5))."""
    used = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just exited
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                used += sum(map(int, fields[11:15]))
    return used / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("scene", [4], indirect=True)
def test_following_a_quiet_run_takes_less_than_a_second_of_processor_time_per_minute(
    scene: Scene, terminal: bool
) -> None:
    nodes = [node.alias for node in scene.nodes]
    job = scene.cli.job("quiet", **bed_job(nodes=nodes, gpus="none", run={"command": ["sleep", "300"]}))
    with following(scene.cli, job, terminal) as up:
        deadline = time.monotonic() + 60
        while not any('"started"' in events.read_text() for events in scene.cli.cwd.glob("runs/*/events.jsonl")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(SETTLE)
        before = processor_seconds(up.pid)
        time.sleep(SECONDS)
        used = processor_seconds(up.pid) - before
        assert up.poll() is None
    scene.cli("down")
    print(f"{used * 60 / SECONDS:.2f} s of processor time per minute, {len(nodes)} nodes")
    assert used * 60 / SECONDS <= 1.0


def test_fifty_variants_on_a_pool(home_cli: Cli) -> None:
    """At most 2 s of the launcher's own processor time per variant, and 3 s from the end of one to the next start."""
    variants, nodes, log = 50, 8, home_cli.cwd / "log"
    script = f"date +%s.%N >>{log}; sleep 4; date +%s.%N >>{log}.ends"
    job = home_cli.job(
        "pool",
        runtime="process",
        nodes={"pool": ["local"] * nodes},
        run={"command": ["sh", "-c", script, "sh"]},
        sweep={"grid": {"x": list(range(variants))}},
    )
    up = home_cli.start("up", job, stdout=subprocess.DEVNULL)
    drain = threading.Thread(target=up.stderr.read if up.stderr else int, daemon=True)
    drain.start()
    used = 0.0
    while up.poll() is None:
        with contextlib.suppress(OSError):  # it has just exited
            fields = Path(f"/proc/{up.pid}/stat").read_text().rpartition(")")[2].split()
            used = max(used, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
        time.sleep(0.1)
    assert up.returncode == 0
    begins, ends = (sorted(map(float, path.read_text().split())) for path in (log, Path(f"{log}.ends")))
    # the n-th variant to end frees a node for the n-th that waits
    idle = [begin - end for begin, end in zip(begins[nodes:], ends, strict=False)]
    print(f"{used / variants:.2f} s of processor time per variant, at most {max(idle):.2f} s between two")
    assert len(begins) == variants
    assert used / variants <= 2
    assert max(idle) <= 3
