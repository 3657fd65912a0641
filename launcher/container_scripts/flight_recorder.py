"""In every worker: torch's flight recorder. When the run hangs, it writes down the collectives and where the rank is.

torch calls start() at the end of its import (2.5 and newer: the entry point of the group torch.backends that
container_scripts puts beside this file, under the name launcher_flight_recorder, on the worker's PYTHONPATH). It turns
NCCL's recorder on, which writes by itself when a collective's time limit strikes. gloo's recorder writes nothing by
itself and has no public call: gloo_recording() is the only place that uses the private one (torch 2.8 and newer).

A thread waits for a byte in the worker's named pipe: entry.sh writes it when the run hangs or its container is about to
be stopped, record() when a collective fails. Below LAUNCHER_OUTPUT, in flight_recorder/NODE: gloo_RANK and nccl_RANK,
pickles for torch's own analyser, and stack_RANK, the stacks of the worker's threads.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

PIPES = "LAUNCHER_FLIGHT_RECORDER"  # the folder of the pipes of this node's workers: rank-RANK, nccl-RANK.pipe
LIMIT = 5.0  # seconds that record() waits for the other workers of this node
ENTRIES = "2000"  # collectives that are kept: torch's own default, where it has one


def start() -> None:
    """Begin to listen, in the worker itself and in none of its children."""
    if os.environ.get("LAUNCHER_WORKER") != str(os.getpid()):
        return
    try:
        _start(os.environ["RANK"])
    except Exception as error:  # noqa: BLE001 - it would end torch's import, and so the job
        print(f"launcher: no flight recorder in this worker: {error!r}", file=sys.stderr, flush=True)


def _start(rank: str) -> None:
    folder = Path(os.environ["LAUNCHER_OUTPUT"], "flight_recorder", os.environ["LAUNCHER_NODE"])
    folder.mkdir(parents=True, exist_ok=True)
    pipes = Path(__file__).parents[1] / "home" / ".flight_recorder"
    pipes.mkdir(exist_ok=True)
    pipe = pipes / f"rank-{rank}"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe, 0o600)
    listen = os.open(pipe, os.O_RDWR)  # for writing too: then neither this nor a read finds an end
    torch_version = importlib.import_module("torch").__version__
    os.environ.update(nccl_settings(torch_version, str(folder / "nccl_"), str(pipes / "nccl-"), os.environ))
    os.environ[PIPES] = str(pipes)
    threading.Thread(target=_listen, args=(listen, pipe, folder, rank), name="flight recorder", daemon=True).start()
    atexit.register(_at_exit, os.getpid())


def record() -> None:
    """Have all workers of this node write down what they wait for, before the first of them ends. For a program that
    handles a failed collective itself; after an exception that ends the program it is called anyway.
    """
    pipes = [*Path(os.environ[PIPES]).glob("rank-*")] if PIPES in os.environ else []
    asked = [pipe for pipe in pipes if _ask(pipe)]
    deadline = time.monotonic() + LIMIT
    while any(pipe.exists() for pipe in asked) and time.monotonic() < deadline:
        time.sleep(0.01)


def nccl_settings(torch_version: str, recordings: str, pipes: str, given: Mapping[str, str]) -> dict[str, str]:
    """The variables that turn NCCL's recorder on, without those that the job itself gives by one of their names.

    recordings, pipes: what the files' names begin with.
    """
    major, minor = (int(number) for number in torch_version.split(".")[:2])
    settings = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": pipes}
    # (now, once, the first torch that surely knows the name of now): it warns about the other one
    for now, once, since, value in (
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", (2, 8), ENTRIES),
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", (2, 10), recordings),
    ):
        if now not in given and once not in given:
            settings[now] = value
            if (major, minor) < since:
                settings[once] = value
    return {name: value for name, value in settings.items() if name not in given}


def gloo_recording() -> bytes:
    """What gloo's flight recorder holds, a pickle; b"" where this torch has none."""
    c10d = importlib.import_module("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_fr_trace", None)
    # All collectives, without their stacks: for these torch would load its compiler, which takes seconds.
    return bytes(dump(True, False, False)) if dump is not None else b""


def _listen(listen: int, pipe: Path, folder: Path, rank: str) -> None:
    """Once: what comes later only follows from the first reason. The pipe goes when all is written."""
    os.read(listen, 1)
    try:
        with (folder / f"stack_{rank}").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        if recording := gloo_recording():
            part = folder / f".{rank}.part"
            part.write_bytes(recording)
            part.replace(folder / f"gloo_{rank}")
    except (OSError, RuntimeError, ImportError) as error:
        print(f"launcher: rank {rank} has no flight recording: {error}", file=sys.stderr, flush=True)
    pipe.unlink(missing_ok=True)


def _ask(pipe: Path) -> bool:
    """False where its worker has ended."""
    with contextlib.suppress(OSError):
        writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            return os.write(writer, b"\n") == 1
        finally:
            os.close(writer)
    return False


def _at_exit(worker: int) -> None:
    """The exception of a collective that failed is a RuntimeError."""
    if os.getpid() == worker and isinstance(getattr(sys, "last_value", None), RuntimeError):
        record()
