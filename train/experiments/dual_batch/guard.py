"""A guard process for a worker: the process started by torchrun waits for a child process that does the work.

torchrun stops all processes of a node when one of them dies. If a worker is killed (when memory runs out, the kernel
kills the largest process, which is the child), the node's other workers must continue: its guard reports the loss and
exits with 0. torch is imported only to report a loss.
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

GUARDED = "TRAIN_GUARDED_BY"  # PID of the guard, in the worker's environment
_PR_SET_PDEATHSIG = 1  # prctl(2)


def needed() -> bool:
    """Whether this process should guard a worker instead of being one."""
    return int(os.environ.get("RANK", "0")) > 0 and GUARDED not in os.environ


def guard(argv: Sequence[str]) -> int:
    """Start `python -m train ARGV`, wait for it and return the exit code.

    If it is killed by a signal after all ranks have joined, the loss is reported and the exit code is 0: the run
    continues without this worker.
    """
    env = os.environ | {GUARDED: str(os.getpid())}
    worker = subprocess.Popen([sys.executable, "-m", "train", *argv], env=env)
    for number in (signal.SIGTERM, signal.SIGINT):
        # Ctrl-C reaches the worker too: by a second SIGINT it would end at once
        signal.signal(number, lambda *_: worker.send_signal(signal.SIGTERM))
    code = worker.wait()
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    why = f"killed by {name} on {socket.gethostname()}"
    if -code == signal.SIGKILL:
        why += "; possibly out of memory; check the kernel log (dmesg)"
    rank = int(os.environ["RANK"])
    print(f"train: worker {rank - 1} (rank {rank}) was {why}", file=sys.stderr, flush=True)
    from train.experiments.dual_batch.network import report_lost

    try:
        return 0 if report_lost(rank, why) else 128 - code
    except TrainError as error:  # the store, and so the run, is lost
        print(f"train: error: {error}", file=sys.stderr, flush=True)
        return 128 - code


def die_with_guard() -> None:
    """Make the kernel kill this guarded process when its guard dies."""
    if guard_pid := os.environ.get(GUARDED):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(guard_pid):  # the guard died before the call
            os.kill(os.getpid(), signal.SIGKILL)
