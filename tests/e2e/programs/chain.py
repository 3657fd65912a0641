"""A user program for a job with min_nodes, without torch (`run.command`). Its values identify how they were computed.

chain.py STEPS INTERVAL SECONDS: STEPS steps of SECONDS each, a checkpoint every INTERVAL steps on every node. The value
after a step is a digest of the previous value, the generation, its master and the step, so that resuming from a wrong
state is detected. A checkpoint lists the generations that led to it, each with its master and the step at which it
started. As in training, a step requires all nodes. FULL: a node with a full disk.
"""

import contextlib
import errno
import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, TextIO

steps, interval, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
generation, rank, world = (int(os.environ[f"LAUNCHER_{name}"]) for name in ("GENERATION", "RANK", "WORLD"))
master = os.environ["LAUNCHER_MASTER"]
host, _, port = master.rpartition(":")
file = Path(os.environ["LAUNCHER_OUTPUT"], "checkpoints", f"{os.environ['LAUNCHER_NODE']}.json")
curve = Path(os.environ["LAUNCHER_GENERATION_OUTPUT"], "metrics.jsonl")


def connect() -> list[TextIO]:
    """Connect the first node with all others."""
    if rank == 0:
        with socket.create_server(("", int(port))) as server:
            return [server.accept()[0].makefile("rw") for _ in range(world - 1)]
    while True:
        with contextlib.suppress(OSError):
            link = socket.create_connection((host, int(port)), 5)
            link.settimeout(None)
            return [link.makefile("rw")]
        time.sleep(0.1)


def gather(mine: Any) -> Any:
    """Return the values of all ranks. Fails if a rank has exited, and waits if one is suspended."""
    if rank != 0:
        print(json.dumps(mine), file=links[0], flush=True)
        return json.loads(links[0].readline())
    given = [mine, *(json.loads(link.readline()) for link in links)]
    for link in links:
        print(json.dumps(given), file=link, flush=True)
    return given


def save(step: int) -> None:
    if os.environ["LAUNCHER_NODE"] == os.environ.get("FULL"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    file.parent.mkdir(exist_ok=True)
    file.with_suffix(".part").write_text(json.dumps([generation, step, value, line]))
    file.with_suffix(".part").replace(file)


def write(**fields: Any) -> None:
    with curve.open("a") as lines:
        print(json.dumps({"generation": generation, **fields}), file=lines)


links = connect()
kept = json.loads(file.read_text()) if file.exists() else [0, 0, "", []]
_, start, value, line = max(gather(kept), key=lambda checkpoint: checkpoint[:2])
line.append([generation, start, master])
save(start)
write(kind="start", step=start, line=line, time=max(gather(time.time())))  # on all disks before the first step
for step in range(start + 1, steps + 1):
    time.sleep(seconds)
    when = max(gather(time.time()))
    value = hashlib.sha256(f"{value} {generation} {master} {step}".encode()).hexdigest()[:16]
    if rank == 0:
        print(f"generation {generation} step {step} {value}", flush=True)
    write(step=step, value=value, time=when)
    if step % interval == 0:
        save(step)
gather(None)
