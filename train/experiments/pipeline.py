"""Pipeline parallelism with torch.distributed.pipelining: stages as in `model`, several micro-batches in flight."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from train.config import Config
from train.data.batch import Batch
from train.distributed.world import World
from train.experiments import model
from train.loss import losses
from train.metrics import counts
from train.precision import InContext, Precision
from train.step import Output, Plan, Step


def lacking(_config: Config) -> Iterator[str]:
    """Yield what this torch lacks for these options."""
    if inspect.signature(PipelineStage).parameters["input_args"].default is inspect.Parameter.empty:
        yield (
            "--parallel pipeline needs stages that find out the shapes of their inputs, which torch "
            f"{torch.__version__} lacks; use an image with torch 2.6 or newer, or --parallel model"
        )


SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def make_step(config: Config, world: World, precision: Precision, whole: nn.Module) -> Step:
    """Return the step of this rank's stage."""
    return PipelineStep(config, world, precision, whole)


class PipelineStep(model.StageStep):
    """A step of one stage over --micro-batches pieces; batch norm uses single pieces, as with accumulation.

    GPipe: Huang et al., arXiv 1811.06965. 1F1B: Narayanan et al., arXiv 1806.03377 (flushed every step).
    """

    def __init__(self, config: Config, world: World, precision: Precision, whole: nn.Module) -> None:
        pieces = config.micro_batches or world.size
        super().__init__(config, world, precision, whole)
        layers = InContext(self.wrapped.layers, precision, world.device)  # type: ignore[arg-type]  # a Stage
        stage = PipelineStage(layers, world.rank, world.size, world.device)
        self._total = 1
        # gradients are already sums over the pieces: do not divide by their number
        self._schedule = SCHEDULES[config.pipeline_schedule](stage, pieces, loss_fn=self._loss, scale_grads=False)

    def forward(self, batch: Batch, plan: Plan) -> Output:
        """Compute all pieces' forward and backward passes, in the order of the schedule."""
        del plan  # the mix is None: mixup and cutmix are not supported
        self._total, device = batch.total, self.objective.world.device
        done = torch.zeros((), device=device)
        if self.objective.world.first:
            self._schedule.step(self.objective.normalise(batch.images))
        elif not self.objective.has_logits:
            self._schedule.step()
        if not self.objective.has_logits:
            return Output(done, torch.zeros(4, dtype=torch.float64, device=device), None)
        target = torch.stack([batch.labels.double(), batch.weights.double()], 1)
        # not computed in the loss function, which the schedule calls once more to determine shapes
        logits = self._schedule.step(target=target).detach()
        loss = self._losses(logits, target)
        return Output(done, counts(logits, target[:, 0].long(), loss, target[:, 1]), logits)

    def backward(self, output: Output) -> None:
        """Nothing: `forward` has added the gradients."""

    def _loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return a piece's share of the batch's mean loss. `target`: (n, 2), label and weight."""
        return (self._losses(logits, target) * target[:, 1].to(logits.dtype)).sum() * (1 / self._total)

    def _losses(self, logits: Tensor, target: Tensor) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return losses(self.objective.loss, wide, target[:, 0].long())
