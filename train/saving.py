"""What all ranks do for a checkpoint of a run."""

from __future__ import annotations

import torch

from train.run import Run
from train.watch import Silent


def save(run: Run, watch: Silent, best: bool = False, epoch: int | None = None) -> None:
    """Starts writing a checkpoint of this moment; every rank calls it."""
    watch.flush()
    run.step.before_checkpoint()
    run.store.save(run.state, best, epoch)


def supersede(run: Run, watch: Silent) -> None:
    """Before the first step of a new generation: whatever an older one still writes is never loaded from now on."""
    if run.world.generation:
        save(run, watch)
        run.store.wait()
        run.world.sum(torch.zeros(1))  # on the disks of all nodes
