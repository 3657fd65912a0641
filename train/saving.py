"""Save checkpoints of a run; collective over all ranks."""

from __future__ import annotations

import torch

from train.run import Run
from train.watch import Silent


def save(run: Run, watch: Silent, best: bool = False, epoch: int | None = None) -> None:
    """Start writing a checkpoint of the current state; every rank must call it."""
    watch.flush()
    run.step.before_checkpoint()
    run.store.save(run.state, best, epoch)


def supersede(run: Run, watch: Silent) -> None:
    """Save before the first step of a new generation, so that checkpoints of older generations are never loaded."""
    if run.world.generation:
        save(run, watch)
        run.store.wait()
        run.world.sum(torch.zeros(1))  # wait until all nodes have written it
