"""A worker under guard: the process that torchrun started waits, and a child of it works.

torchrun ends all of a node's processes when one of them dies. A worker that is killed (the kernel takes the largest
process where memory ends, which is the child) must not take its node's other workers along: its guard tells the server
and ends well. No torch is loaded here until something is to be told.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from train.errors import TrainError

GUARDED = "TRAIN_GUARDED_BY"  # the guard's pid, in the working process's environment
_PR_SET_PDEATHSIG = 1  # prctl(2)


def needed(parallel: str) -> bool:
    """Whether this process is to guard a worker instead of being one."""
    return parallel == "dual_batch" and int(os.environ.get("RANK", "0")) > 0 and GUARDED not in os.environ


def guard(argv: Sequence[str]) -> int:
    """Starts `python -m train ARGV` and waits for it; the exit code.

    A death by signal after all have met is told to the server and is 0: the run goes on without this worker.
    """
    env = os.environ | {GUARDED: str(os.getpid())}
    worker = subprocess.Popen([sys.executable, "-m", "train", *argv], env=env)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: worker.send_signal(number))
    code = worker.wait()
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    why = f"killed by {name} on {socket.gethostname()}"
    if -code == signal.SIGKILL:
        why += "; out of memory? the kernel's log tells (dmesg)"
    rank = int(os.environ["RANK"])
    print(f"train: worker {rank - 1} (rank {rank}) was {why}", file=sys.stderr, flush=True)
    from train.dual_batch.network import tell_lost

    try:
        return 0 if tell_lost(rank, why) else 128 - code
    except TrainError as error:  # then no rank is left to go on
        print(f"train: error: {error}", file=sys.stderr, flush=True)
        return 128 - code


def under_guard() -> None:
    """In the working process: it ends with its guard, whatever ends that one."""
    if guard_pid := os.environ.get(GUARDED):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(guard_pid):  # it died before we asked
            os.kill(os.getpid(), signal.SIGKILL)
