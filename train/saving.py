"""Checkpoints of a run: who writes them, and what all ranks do for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from train import replicas
from train.checkpoint import Saver
from train.setup import Run
from train.watch import Silent

if TYPE_CHECKING:
    from train.sharded import ShardedSaver

AnySaver: TypeAlias = "Saver | ShardedSaver"


def make_saver(run: Run) -> AnySaver | None:
    """This rank's writer; None where others write."""
    folder, keep = run.config.checkpoint_folder, run.config.keep
    if run.step.sharded:
        from train.sharded import ShardedSaver  # imports torch.distributed.checkpoint, which takes a second

        return ShardedSaver(folder, keep, run.world, run.model)
    return Saver(folder, keep, run.world.device) if replicas.writes(run.config, run.world) else None


def save(run: Run, watch: Silent, saver: AnySaver | None, best: bool = False, epoch: int | None = None) -> None:
    """Starts writing a checkpoint of this moment; every rank calls it."""
    watch.flush()
    run.step.gather_to_rank0()
    if run.config.replicated and run.world.size > 1:
        replicas.share_statistics(run.model, run.step.ema)
    if saver:
        saver.save(run.state(), best, epoch)


def supersede(run: Run, watch: Silent, saver: AnySaver | None) -> None:
    """Before the first step of a new generation: whatever an older one still writes is never loaded from now on."""
    if run.world.generation:
        save(run, watch, saver)
        if saver:
            saver.wait()
        run.world.sum(torch.zeros(1))  # on the disks of all nodes
