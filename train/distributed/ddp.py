"""DistributedDataParallel: gradients are averaged over ranks, on CPU over gloo."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from train.compiled import compiled
from train.config import Config
from train.data.batch import Batch
from train.distributed.world import World
from train.models import BATCH_NORMS, BlurredConv, has_own_sync_batch_norm
from train.precision import Precision
from train.step import Step


def make_step(config: Config, world: World, precision: Precision, model: nn.Module) -> Step:
    """Return the step of a single process, or of several that average their gradients."""
    module = compiled(model, config)
    kind = step_type(precision, world.size > 1)
    if config.powersgd_rank:
        from train.distributed.powersgd import CompressedStep  # imports numpy's random numbers and torch's hooks

        kind = CompressedStep
    step = kind(config, world, precision, model, wrap(module, world, config))
    if config.compile:
        step.evaluated = compiled(step.ema.model, config) if step.ema else module
    library = any(isinstance(part, nn.SyncBatchNorm) for part in model.modules())
    step.forward_waits = library or has_own_sync_batch_norm(model) or _needed_in_training(model)
    return step


def step_type(precision: Precision, several: bool) -> type[Step]:
    """Return the class of a step in which every rank has the whole model; `several`: ranks."""
    if precision.masters:
        from train.experiments.masters import DDPMastersStep, MastersStep

        return DDPMastersStep if several else MastersStep
    return DDPStep if several else Step


class DDPStep(Step):
    """A step of a model that is wrapped in DDP."""

    wrapped: DistributedDataParallel
    keeps_gradients = True  # they are views of the communication buckets

    def __init__(
        self,
        config: Config,
        world: World,
        precision: Precision,
        model: nn.Module,
        wrapped: DistributedDataParallel,
        parameters: list[nn.Parameter] | None = None,
    ) -> None:
        super().__init__(config, world, precision, model, wrapped, parameters)
        self.to_rehearse = world.size > 2  # two ranks are exact without: a + b = b + a, and x/2 = x * 0.5

    def sync(self, last: bool) -> None:
        self.wrapped.require_backward_grad_sync = last  # what its context manager no_sync sets

    def gradient_seconds(self) -> float | None:
        """Return for how long a step waited for its gradients after the backward pass had computed them.

        A mean of DDP's own measurements, which it makes in its first 10 steps and every 100th after that.
        """
        wrapped: Any = self.wrapped
        times = wrapped._get_ddp_logging_data()  # noqa: SLF001 - no public name has them
        summed, overlapped = times["avg_backward_comm_time"], times["avg_backward_compute_comm_overlap_time"]
        return float(max(summed - overlapped, 0) / 1e9)

    def rehearse(self, batch: Batch) -> None:
        """Compute the gradients of the process's first micro-batch once before the first step, and forget them.

        DDP's first reduction in a process rounds differently from all later ones: it has one bucket for all gradients,
        which DDP arranges anew before the next forward pass, so that the sum over ranks has another order; and it
        multiplies by 1/n where later ones divide by n. A resumed run would have it in the middle.

        Nothing of it remains: gradients are zero, as before each later step, buffers (also those that the average
        follows) have their values, and `Trainer.train_step` seeds torch. The batch is a real one because --compile
        would keep a graph for another size, and which parameters are used may depend on the images. With a static
        graph, DDP first counts the uses of each parameter, and arranges the buckets after the second backward pass.
        """
        self.to_rehearse = False
        buffers = [
            (module, name, buffer, buffer.clone())
            for module in self.model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        objective = self.objective
        for _ in range(2 if objective.config.static_graph else 1):
            output = objective.forward_loss(self.wrapped, batch, None, objective.loss)
            output.loss.backward()  # type: ignore[no-untyped-call]  # torch's stub
            self.wrapped.zero_grad(set_to_none=False)
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                setattr(module, name, buffer.copy_(value))  # a forward pass may also replace a buffer


def wrap(model: nn.Module, world: World, config: Config) -> nn.Module:
    """Wrap `model` in DDP if there are several ranks."""
    return model if world.size == 1 else distributed(model, world, config)


def distributed(model: nn.Module, world: World, config: Config) -> DistributedDataParallel:
    """Wrap `model` in DDP with the run's options; all ranks start from rank 0's weights.

    Gradients are views of the communication buckets (gradient_as_bucket_view), which saves a copy of all gradients.
    """
    devices = [world.device.index] if world.device.type == "cuda" else None
    # torch 2.14 renamed the argument and warns about the old name
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    buffers: dict[str, Any] = {name: _needed_in_training(model)}
    wrapped = DistributedDataParallel(
        model,
        device_ids=devices,
        gradient_as_bucket_view=True,
        bucket_cap_mb=config.bucket_mb,
        static_graph=config.static_graph,
        **buffers,
    )
    if config.gradient_compression == "bf16":
        wrapped.register_comm_hook(None, bf16_compress_hook)
    return wrapped


def _needed_in_training(model: nn.Module) -> bool:
    """Whether a training step reads buffers, such as spectral norm's, so that all ranks need rank 0's buffers.

    Batch norm does not read its running statistics; `evaluate` broadcasts those of rank 0, which are also saved. The
    filters of BlurPool never change.
    """
    same = (*BATCH_NORMS, BlurredConv)
    return any(list(module.buffers(recurse=False)) for module in model.modules() if not isinstance(module, same))
