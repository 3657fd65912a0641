"""torch's flight recorder in every worker: when a run hangs, it records the collectives and the stacks of the rank.

torch calls start() at the end of its import (2.5 and newer: through the entry point launcher_flight_recorder of the
group torch.backends, which container_scripts installs next to this file on the worker's PYTHONPATH). It enables NCCL's
recorder, which writes automatically when a collective times out, and before torch 2.15 also when its own pipe is
written to. nccl2, the NCCL of torch 2.15, has no such pipe, and gloo's recorder does not write automatically: only
recording() uses the private function that reads both (torch 2.8 and newer).

A thread waits for a byte in the worker's named pipe: entry.sh writes it when the run hangs or before its container is
stopped, record() when a collective fails. Files in LAUNCHER_OUTPUT/flight_recorder/NODE: gloo_RANK and nccl_RANK,
pickles for torch's analyser, and stack_RANK, the stacks of the worker's threads.

Another thread notes in LAUNCHER_OUTPUT/state/NODE.groups, for run/membership.py, whether the worker joins a process
group: `watched RANK EPOCH`, then `group RANK SIZE EPOCH` with the size of its default group, or `inner RANK SIZE EPOCH`
for the group of another process that the worker has started, with SIZE 0 for one that nobody saw or another library's.

torch.distributed.breakpoint() opens the terminal of the process: instead, it waits as breakpoint() does
(launcher_breakpoint.py).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import os
import pickle
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

PIPES = "LAUNCHER_FLIGHT_RECORDER"  # the folder for the pipes of this node's workers: rank-RANK, nccl-RANK.pipe
LIMIT = 5.0  # seconds that record() waits for the other workers of this node
# Modules that connect ranks without a process group of torch.
OTHERS = frozenset(("bagua", "byteps", "horovod", "jax", "mpi4py", "mxnet", "paddle", "ray", "tensorflow", "torchft"))
LOOK, OFTEN = 0.05, 10.0  # seconds between two looks at the process group; for how long
BREAKPOINT = "launcher_breakpoint"  # the module
ENTRIES = "2000"  # number of collectives to keep: torch's own default, if it has one


def start() -> None:
    """Start listening in the worker itself, but not in its child processes, which may join a group instead of it."""
    if "LAUNCHER_WORKER" not in os.environ:
        return
    own = os.environ["LAUNCHER_WORKER"] == str(os.getpid())
    try:
        membership = OwnGroup(os.environ["RANK"], "group" if own else "inner")
        threading.Thread(target=membership.follow, name="process group", daemon=True).start()
        atexit.register(membership.end)
        if own:
            membership.note(f"watched {os.environ['RANK']}")
            _start(os.environ["RANK"])
        _cover_breakpoint()
    except Exception as error:  # noqa: BLE001 - it would end torch's import, and so the job
        print(f"launcher: could not start the flight recorder in this worker: {error!r}", file=sys.stderr, flush=True)


def _start(rank: str) -> None:
    folder = Path(os.environ["LAUNCHER_OUTPUT"], "flight_recorder", os.environ["LAUNCHER_NODE"])
    folder.mkdir(parents=True, exist_ok=True)
    pipes = Path(__file__).parents[1] / "home" / ".flight_recorder"
    pipes.mkdir(exist_ok=True)
    pipe = pipes / f"rank-{rank}"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe, 0o600)
    listen = os.open(
        pipe, os.O_RDWR
    )  # also for writing: then neither this call nor a read returns early without a writer
    torch_version = sys.modules["torch"].__version__
    os.environ.update(nccl_settings(torch_version, str(folder / "nccl_"), str(pipes / "nccl-"), os.environ))
    os.environ[PIPES] = str(pipes)
    threading.Thread(target=_listen, args=(listen, pipe, folder, rank), name="flight recorder", daemon=True).start()
    atexit.register(_at_exit, os.getpid())


def _cover_breakpoint() -> None:
    """Replace the debugger of torch.distributed.breakpoint(), unless the job has its own for breakpoint()."""
    distributed = sys.modules.get("torch.distributed")
    if os.environ.get("PYTHONBREAKPOINT", "").startswith(f"{BREAKPOINT}."):
        for name in ("_make_distributed_pdb", "_DistributedPdb"):  # of torch 2.15, and of earlier ones
            if hasattr(distributed, name):
                setattr(distributed, name, DistributedDebugger)


class DistributedDebugger:
    """In place of the debugger of torch.distributed.breakpoint()."""

    def message(self, text: str) -> None:
        """Say nothing: the terminal that comes shows where the rank is."""

    def set_trace(self) -> None:
        """Stop in torch's function, whose barrier is next: the other ranks wait there."""
        breakpoint(frame=sys._getframe(1), what="torch.distributed.breakpoint()")  # noqa: SLF001


class OwnGroup:
    """Whether this process has joined a process group of torch."""

    def __init__(self, rank: str, what: str) -> None:
        self._rank, self._what = rank, what
        self._file = Path(os.environ["LAUNCHER_OUTPUT"], "state", f"{os.environ['LAUNCHER_NODE']}.groups")
        self._seen = self._told = False

    def follow(self) -> None:
        """Look until it has joined: often in the first seconds, so that no group of a short program is missed."""
        looks = 0
        while not self.look():
            self._tell_of_others()
            looks += 1
            time.sleep(LOOK if looks * LOOK < OFTEN else 1.0)

    def look(self) -> bool:
        """Return whether it has joined one, and note its size at the first time."""
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        group: object = getattr(getattr(c10d, "GroupMember", None), "WORLD", None)
        size = getattr(group, "size", None)
        if not self._seen and callable(size):
            self._seen = True
            self.note(f"{self._what} {self._rank} {size()}")
        return self._seen

    def end(self) -> None:
        """Look for the last time: it may have joined just now, between two looks, or by another library."""
        if not self.look():
            self._tell_of_others(_had_joined())

    def _tell_of_others(self, connected: bool = False) -> None:
        """connected: by a group that nobody has seen."""
        if not self._told and (connected or not OTHERS.isdisjoint(sys.modules)):
            self._told = True
            self.note(f"inner {self._rank} 0")

    def note(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk must not stop the job
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("a", encoding="ascii") as file:
                file.write(f"{line} {int(time.time())}\n")


def _had_joined() -> bool:
    """Return whether this process was in a group that it has destroyed: init_process_group() leaves its excepthook."""
    return getattr(sys.excepthook, "__module__", "") == "torch.distributed.distributed_c10d"


def record() -> None:
    """Let all workers of this node record their pending collectives before the first of them exits.

    For programs that handle a failed collective themselves; called automatically after an uncaught exception.
    """
    pipes = [*Path(os.environ[PIPES]).glob("rank-*")] if PIPES in os.environ else []
    asked = [pipe for pipe in pipes if _ask(pipe)]
    deadline = time.monotonic() + LIMIT
    while any(pipe.exists() for pipe in asked) and time.monotonic() < deadline:
        time.sleep(0.01)


def nccl_settings(torch_version: str, recordings: str, pipes: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that enable NCCL's recorder, except those that the job sets under any of their names.

    recordings, pipes: prefixes of the file names.
    """
    major, minor = (int(number) for number in torch_version.split(".")[:2])
    settings = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": pipes}
    # (current name, old name, first torch version with the current name): newer versions warn about the old name
    for name, old_name, since, value in (
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", (2, 8), ENTRIES),
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", (2, 10), recordings),
    ):
        if name not in given and old_name not in given:
            settings[name] = value
            if (major, minor) < since:
                settings[old_name] = value
    return {name: value for name, value in settings.items() if name not in given}


def recording(*backend: str) -> bytes:
    """Return the pickled content of a flight recorder, of gloo's if none is named; b"" if this torch has no such."""
    c10d = importlib.import_module("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_fr_trace", None)
    if dump is None or (backend and "backend" not in (dump.__doc__ or "")):  # its parameters: one more since 2.15
        return b""
    # All collectives without stacks, for which torch would load its compiler for several seconds.
    content = bytes(dump(True, False, False, *backend))
    return content if not backend or pickle.loads(content)["entries"] else b""  # noqa: S301 - of this process


def _listen(listen: int, pipe: Path, folder: Path, rank: str) -> None:
    """Record once: later failures only follow from the first one. Removes the pipe when all files are written."""
    os.read(listen, 1)
    try:
        with (folder / f"stack_{rank}").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        for name, content in ((f"gloo_{rank}", recording()), (f"nccl_{rank}", recording("nccl2"))):
            if content:
                part = folder / f".{rank}.part"
                part.write_bytes(content)
                part.replace(folder / name)
    except (OSError, RuntimeError, ImportError) as error:
        print(f"launcher: could not write the flight recording of rank {rank}: {error}", file=sys.stderr, flush=True)
    pipe.unlink(missing_ok=True)


def _ask(pipe: Path) -> bool:
    """Return False if the worker has exited."""
    with contextlib.suppress(OSError):
        writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            return os.write(writer, b"\n") == 1
        finally:
            os.close(writer)
    return False


def _at_exit(worker: int) -> None:
    """Record if the program exits because of a RuntimeError, the exception of a failed collective."""
    if os.getpid() == worker and isinstance(getattr(sys, "last_value", None), RuntimeError):
        record()
