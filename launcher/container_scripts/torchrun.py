"""python torchrun.py OPTIONS...: torchrun, with the exit code of the rank that failed first.

torchrun itself always exits with 1, after its own traceback and a copy of the rank's. Instead, a line names each failed
rank in the log, and `failed RANK CODE EPOCH` (CODE: negative for a signal) in state/NODE.attempts, for launchers.

Runs in the image's own Python, 3.7 or newer, with its torch, 1.9 or newer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> None:
    """Call torchrun with the options of this process. Raises SystemExit if a rank failed or a signal stopped it."""
    try:
        torch.distributed.run.main()
    except ChildFailedError as error:
        sys.exit(_report(error))
    except SignalException as error:
        sys.exit(128 + int(error.sigval))


def _report(error: ChildFailedError) -> int:
    """Report every failed rank, the first one first; return its exit code, 1 if a signal killed it."""
    first, failure = error.get_first_failure()
    stopped = -signal.SIGTERM  # by torchrun, after the first failure
    ranks = [first, *(rank for rank, each in error.failures.items() if rank != first and each.exitcode != stopped)]
    for rank in ranks:
        code = error.failures[rank].exitcode
        how = f"exited with code {code}" if code >= 0 else f"was killed by {_name(-code)}"
        print(f"launcher: rank {rank} {how}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # a full disk
        attempts = Path(os.environ["LAUNCHER_OUTPUT"], "state", f"{os.environ['LAUNCHER_NODE']}.attempts")
        with attempts.open("a", encoding="ascii") as file:
            for rank in ranks:
                file.write(f"failed {rank} {error.failures[rank].exitcode} {error.failures[rank].timestamp}\n")
    return int(failure.exitcode) if failure.exitcode > 0 else 1


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


if __name__ == "__main__":
    main()
