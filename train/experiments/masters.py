"""--amp O2: fp16 weights with fp32 masters, as in apex, with which experiment 1 is published."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from train.config import Config
from train.distributed.ddp import DDPStep
from train.distributed.world import World
from train.foreach import add_, copy_, zero_
from train.precision import Precision
from train.step import Output, Plan, Step


class Masters:
    """fp32 copies of 16-bit weights: the optimiser updates the copies, the model gets rounded values.

    Gradients of micro-batches are also added in fp32: `set_aside` after all except the last, `add_back` before the
    last, after which the sum is reduced over the ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.parameters = [nn.Parameter(p.detach().float().clone()) for p in self._model]
        self._aside: list[Tensor] = []

    def _gradients(self) -> list[tuple[int, Tensor]]:
        return [(index, p.grad) for index, p in enumerate(self._model) if p.grad is not None]

    @torch.no_grad()
    def set_aside(self) -> None:
        """Move the model's gradients to the sums."""
        self._aside = self._aside or [torch.zeros_like(parameter) for parameter in self.parameters]
        gradients = self._gradients()
        add_([self._aside[index] for index, _ in gradients], [gradient.float() for _, gradient in gradients])
        zero_([gradient for _, gradient in gradients])

    @torch.no_grad()
    def add_back(self) -> None:
        """Move the rounded sums to the model's gradients."""
        if self._aside:
            gradients = self._gradients()
            copy_([gradient for _, gradient in gradients], [self._aside[index] for index, _ in gradients])
            zero_(self._aside)

    def take_gradients(self) -> None:
        """Copy the model's gradients, in fp32, to the masters; the masters of weights without one get None."""
        for master, parameter in zip(self.parameters, self._model, strict=True):
            if parameter.grad is None:
                master.grad = None
            elif master.grad is None:
                master.grad = torch.empty_like(master)
        own = [master.grad for master in self.parameters if master.grad is not None]
        copy_(own, [gradient for _, gradient in self._gradients()])

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the rounded masters to the model's weights."""
        copy_(list(self._model), list(self.parameters))


class MastersStep(Step):
    """A step whose optimiser updates the masters."""

    def __init__(
        self, config: Config, world: World, precision: Precision, model: nn.Module, wrapped: nn.Module
    ) -> None:
        self._masters, self._last = Masters(model), True
        super().__init__(config, world, precision, model, wrapped, self._masters.parameters)

    def sync(self, last: bool) -> None:
        super().sync(last)
        self._last = last
        if last:
            self._masters.add_back()

    def backward(self, output: Output) -> None:
        super().backward(output)
        if not self._last:
            self._masters.set_aside()

    def update(self, plan: Plan) -> bool:
        self._masters.take_gradients()
        applied = super().update(plan)
        if applied:
            self._masters.publish()
        return applied

    @property
    def masters(self) -> list[Tensor] | None:
        return [parameter.detach() for parameter in self._masters.parameters]


class DDPMastersStep(MastersStep, DDPStep):
    """The same with several ranks."""
