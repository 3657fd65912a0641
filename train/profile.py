"""Optional profiler trace of a few training steps, for Perfetto or Chrome."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from train.config import Config
from train.distributed.world import World

SKIPPED, RECORDED = 5, 5  # steps: the first ones allocate, compile and choose algorithms


class NoTrace:
    """Records nothing."""

    def step(self) -> None:
        """Called after each step."""

    def close(self) -> None:
        """Called after the epoch."""


class Trace(NoTrace):
    """Records RECORDED steps after SKIPPED ones into `path`."""

    def __init__(self, path: Path) -> None:
        from torch import profiler

        def write(done: Any) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            done.export_chrome_trace(str(path))

        plan = profiler.schedule(wait=SKIPPED - 1, warmup=1, active=RECORDED, repeat=1)
        self._stack = ExitStack()
        self._profiler = self._stack.enter_context(profiler.profile(schedule=plan, on_trace_ready=write))

    def step(self) -> None:
        self._profiler.step()

    def close(self) -> None:
        self._stack.close()


def tracing(config: Config, world: World, epoch: int) -> NoTrace:
    """Return a Trace for rank 0's first epoch if --profile is set, else NoTrace."""
    if config.profile and world.first and epoch == 0:
        return Trace(Path(config.output) / "profile" / "trace.json")
    return NoTrace()
