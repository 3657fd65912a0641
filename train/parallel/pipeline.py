"""Pipeline parallelism with torch.distributed.pipelining: stages as in `model`, several micro-batches in flight."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from train.config import Config
from train.data.batch import Batch
from train.errors import TrainError
from train.metrics import counts
from train.parallel.model import StageStep
from train.parallel.world import World
from train.precision import Precision
from train.step import Plan

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class PipelineStep(StageStep):
    """A step of one stage over --micro-batches pieces; batch norm sees single pieces, as with accumulation.

    GPipe: Huang et al., arXiv 1811.06965. 1F1B: Narayanan et al., arXiv 1806.03377 (flushed every step).
    """

    def __init__(self, config: Config, world: World, precision: Precision, model: nn.Module) -> None:
        pieces = config.micro_batches or world.size
        _check(config, world, pieces)
        super().__init__(config, world, precision, model)
        stage = PipelineStage(self.model.layers, world.rank, world.size, world.device)  # type: ignore[arg-type]
        self._total = 1
        # gradients are already sums over the pieces: no division by their number
        self._schedule = SCHEDULES[config.pipeline_schedule](stage, pieces, loss_fn=self._loss, scale_grads=False)

    def accumulate(self, batch: Batch, plan: Plan) -> Tensor:
        """Runs one batch through the pipeline."""
        del plan  # its mix is None: mixup and cutmix are not supported
        self._total = batch.total
        if self.world.first:
            self._schedule.step(self.forward.normalise(batch.images))
        elif not self.has_logits:
            self._schedule.step()
        if not self.has_logits:
            return self._no_counts()
        target = torch.stack([batch.labels.double(), batch.weights.double()], 1)
        # counted from all logits, not in the loss function: the schedule calls that once more to learn the shapes
        logits = self._schedule.step(target=target).detach()
        loss = self._losses(logits, target)
        return counts(logits, target[:, 0].long(), loss, target[:, 1])

    def _loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """A piece's share of the batch's mean loss. `target`: (n, 2), label and weight."""
        return (self._losses(logits, target) * target[:, 1].to(logits.dtype)).sum() * (1 / self._total)

    def _losses(self, logits: Tensor, target: Tensor) -> Tensor:
        smoothing = self.config.label_smoothing
        return functional.cross_entropy(logits, target[:, 0].long(), reduction="none", label_smoothing=smoothing)


def _check(config: Config, world: World, pieces: int) -> None:
    if config.batch_size % pieces:
        raise TrainError(f"--batch-size {config.batch_size}: not a multiple of the {pieces} micro-batches of a step")
    if pieces < world.size:
        raise TrainError(
            f"--micro-batches {pieces}: must be at least the number of stages ({world.size}), to keep them all busy"
        )
    if config.last_batch != "drop":
        raise TrainError("--parallel pipeline needs --last-batch drop: its schedules have a fixed batch size")
    if config.amp not in ("auto", "none", "O0"):
        raise TrainError(f"--parallel pipeline does not support --amp {config.amp}; leave it out, or use ddp")
    if config.mixup or config.cutmix:
        raise TrainError(
            "--parallel pipeline does not support --mixup or --cutmix: they would mix only within a micro-batch"
        )
