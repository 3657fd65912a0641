"""python torchrun.py OPTIONS...: torchrun, with the exit code of the rank that failed first. agent.py calls main().

torchrun itself always exits with 1, after its own traceback and a copy of the rank's. Instead, a line names each failed
rank in the log, and `failed RANK CODE EPOCH` (CODE: negative for a signal) in state/NODE.attempts, for launchers. If it
is stopped, its ranks have SAVING seconds for a checkpoint; those that it kills are named too, with `killed RANK EPOCH`.
Ranks that still run LINGER seconds after another one has exited with code 0 are named in a line, and go on.

Runs in the image's own Python, 3.7 or newer, with its torch, 1.9 or newer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

SAVING = "40"  # seconds, unless the variable says otherwise; `launcher down` kills the container after 45 s


LINGER = 60.0  # seconds


def main() -> None:
    """Call torchrun with the options of this process. Raises SystemExit if a rank failed or a signal stopped it."""
    _replace_close(PContext, int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SAVING)))
    replace_wait(PContext, LINGER)
    try:
        torch.distributed.run.main()
    except ChildFailedError as error:
        sys.exit(_report(error))
    except SignalException as error:
        sys.exit(128 + int(error.sigval))


def _replace_close(context: Any, limit: int) -> None:
    """Replace `close` of torchrun's processes: stopped by a signal, it then waits `limit` seconds for its ranks, and
    those that it kills are reported.
    """
    own_close = context.close

    def close(self: Any, *args: Any, **options: Any) -> None:
        if not isinstance(sys.exc_info()[1], SignalException):  # a rank has failed, or all have ended
            own_close(self, *args, **options)
            return
        handlers = getattr(self, "subprocess_handlers", {})
        running = {local: each.proc for local, each in handlers.items() if each.proc.poll() is None}
        own_close(self, *args[:1], **{**options, "timeout": limit})  # the signal
        killed = [local for local, process in running.items() if process.poll() == -signal.SIGKILL]
        ranks = [int(self.envs[local]["RANK"]) for local in killed]
        for rank in ranks:
            what = f"rank {rank} did not exit within {limit} s after it was asked to stop, and was killed"
            print(f"launcher: {what}: what it was saving may be incomplete", file=sys.stderr, flush=True)
        _note(f"killed {rank} {int(time.time())}" for rank in ranks)

    context.close = close


def replace_wait(context: Any, limit: float) -> None:
    """Replace `wait` of torchrun's processes, by which it looks at its ranks: those are named that run `limit` seconds
    after one has exited with code 0.
    """
    own_wait = context.wait
    since: dict[Any, float] = {}  # when one had exited; inf: named

    def wait(self: Any, *args: Any, **options: Any) -> Any:
        handlers = getattr(self, "subprocess_handlers", {})
        codes = {int(self.envs[local]["RANK"]): each.proc.poll() for local, each in handlers.items()}
        done = sorted(rank for rank, code in codes.items() if code == 0)
        running = sorted(rank for rank, code in codes.items() if code is None)
        if done and running and time.monotonic() - since.setdefault(self, time.monotonic()) >= limit:
            since[self] = float("inf")
            runs = f"{_ranks(running)} still {'runs' if len(running) == 1 else 'run'}"
            print(
                f"launcher: {runs}, {limit:.0f} s after {_ranks(done)} exited with code 0", file=sys.stderr, flush=True
            )
        return own_wait(self, *args, **options)

    context.wait = wait


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def _note(lines: Iterable[str]) -> None:
    """Append lines for launchers."""
    with contextlib.suppress(OSError):  # a full disk
        attempts = Path(os.environ["LAUNCHER_OUTPUT"], "state", f"{os.environ['LAUNCHER_NODE']}.attempts")
        with attempts.open("a", encoding="ascii") as file:
            file.writelines(f"{line}\n" for line in lines)


def _report(error: ChildFailedError) -> int:
    """Report every failed rank, the first one first; return its exit code, 1 if a signal killed it."""
    first, failure = error.get_first_failure()
    stopped = -signal.SIGTERM  # by torchrun, after the first failure
    ranks = [first, *(rank for rank, each in error.failures.items() if rank != first and each.exitcode != stopped)]
    for rank in ranks:
        code = error.failures[rank].exitcode
        how = f"exited with code {code}" if code >= 0 else f"was killed by {_name(-code)}"
        print(f"launcher: rank {rank} {how}", file=sys.stderr, flush=True)
    failures = [(rank, error.failures[rank]) for rank in ranks]
    _note(f"failed {rank} {each.exitcode} {each.timestamp}" for rank, each in failures)
    return int(failure.exitcode) if failure.exitcode > 0 else 1


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


if __name__ == "__main__":
    main()
