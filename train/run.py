"""All parts of a run, its position, and the content of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from train import checkpoint
from train.config import Config
from train.data.contents import Digest
from train.data.loader import Loader
from train.data.repeat import Repeated
from train.data.source import Dataset
from train.distributed.world import World
from train.infiniband import Ports
from train.models import has_batch_norm, has_own_sync_batch_norm
from train.precision import Precision
from train.schedule import Schedule
from train.step import Step
from train.store import Store
from train.stragglers import Stragglers


@dataclass
class Progress:
    """The position of a run, which together with the options determines the rest of the run."""

    epoch: int = 0  # training epochs done
    step: int = 0  # steps done in the current epoch
    updates: int = 0  # steps applied: the schedule's position
    skipped: int = 0  # steps not applied because fp16 overflowed
    validated: int = 0  # epochs validated
    best: float = -1.0  # highest top-1 so far, percent
    # `counts` of all ranks: of this epoch's intervals, and of the steps since the last interval
    sums: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))
    interval: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))


@dataclass
class Run:
    """All parts of a run on this rank."""

    config: Config
    world: World
    dataset: Dataset
    model: nn.Module
    step: Step
    store: Store
    precision: Precision
    schedule: Schedule
    progress: Progress
    epoch_steps: int
    resumed: checkpoint.Loaded | None
    train_loader: Loader | Repeated
    val_loader: Loader
    decoder: str
    ideal_seconds: dict[int, float | None]  # by image side, see `hardware.ideal_seconds`
    images: Digest  # of the training set
    nodes: list[str]  # node name by rank
    stragglers: Stragglers
    ports: Ports

    @property
    def global_batch(self) -> int:
        """Images per step on all ranks together."""
        return global_batch(self.config, self.world)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.epochs * self.epoch_steps

    @property
    def global_step(self) -> int:
        """Steps done so far in the whole run."""
        return self.progress.epoch * self.epoch_steps + self.progress.step

    @property
    def min_samples(self) -> int:
        """The size to which a rank's batch is padded with samples of weight 0.

        Batch norm rejects a single value per channel. Our synchronised layers accept an empty batch and must not see
        fillers; torch's accept a single value, but no empty batch with autocast.
        """
        if has_own_sync_batch_norm(self.model):
            return 0
        return 2 if has_batch_norm(self.model) and self.config.syncbn == "none" else 1

    def identity(self) -> dict[str, Any]:
        """Return the values that determine the sample order, to be compared when resuming within an epoch."""
        names = ("seed", "last_batch", "repeats")
        order = {name: getattr(self.config, name) for name in names}
        data = {"data": self.images.names, "sizes": self.images.sizes}
        return order | {"global_batch": self.global_batch, "images": len(self.dataset.train.labels)} | data

    def state(self) -> checkpoint.State:
        """Return the content of a checkpoint."""
        return {
            "format": checkpoint.FORMAT,
            "run": checkpoint.run_id(),
            "generation": self.world.generation,
            "arch": self.config.arch,
            "classes": list(self.dataset.classes),
            "identity": self.identity(),
            "config": self.config.to_dict(),
            "progress": vars(self.progress),
            **self.step.state(),
        }


def global_batch(config: Config, world: World) -> int:
    """Return the global batch size of the full world; a smaller world uses more micro-batches of the same size."""
    return config.batch_size * config.accumulate * max(world.data_shards, world.full_size)
