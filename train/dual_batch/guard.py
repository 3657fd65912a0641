"""A guard process for a worker: the process that torchrun started waits, and a child process does the work.

torchrun ends all processes of a node when one of them dies. A worker that is killed (if memory runs out, the kernel
kills the largest process, which is the child) must not end the node's other workers: its guard reports the loss and
exits with 0. torch is imported only when there is a loss to report.
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
    """Whether this process should guard a worker instead of being one."""
    return parallel == "dual_batch" and int(os.environ.get("RANK", "0")) > 0 and GUARDED not in os.environ


def guard(argv: Sequence[str]) -> int:
    """Starts `python -m train ARGV`, waits for it and returns the exit code.

    If a signal kills it after all ranks have joined, the loss is reported and the exit code is 0: the run continues
    without this worker.
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
        why += "; out of memory? see the kernel's log (dmesg)"
    rank = int(os.environ["RANK"])
    print(f"train: worker {rank - 1} (rank {rank}) was {why}", file=sys.stderr, flush=True)
    from train.dual_batch.network import report_lost

    try:
        return 0 if report_lost(rank, why) else 128 - code
    except TrainError as error:  # the store is gone, and the run with it
        print(f"train: error: {error}", file=sys.stderr, flush=True)
        return 128 - code


def die_with_guard() -> None:
    """Called in the guarded process: it is killed when its guard dies."""
    if guard_pid := os.environ.get(GUARDED):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(guard_pid):  # the guard died before the call
            os.kill(os.getpid(), signal.SIGKILL)
