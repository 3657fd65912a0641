"""--parallel fsdp: weights, gradients and optimiser state divided over all ranks (torch's fully_shard, FSDP2).

For models that do not fit on one device. A block's weights are gathered while it computes; its gradients are averaged
and divided again. The result is DDP's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh

from train.config import Config
from train.data.batch import Batch
from train.errors import TrainError
from train.models import has_batch_norm
from train.parallel.abilities import Abilities
from train.parallel.world import World
from train.precision import Precision
from train.step import Plan, Step


def problems(_config: Config, processes: int) -> Iterator[str]:
    """Why these options are refused on so many processes."""
    if processes == 1:
        yield "--parallel fsdp divides the weights over processes; start two or more (processes: 2)"


ABILITIES = Abilities(
    # an overflow in one part would have to be known to all; averages, LARS's and Muon's updates are of whole tensors
    frozenset({"amp", "ema_decay", "optimizer", "compile", "static_graph", "replicate"}),
    problems,
    divides_weights=True,
)
SMALL = 1e-3  # share of all weights below which a block is not worth collectives of its own


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that are gathered one at a time: elements of containers, at any depth; not those with few weights."""
    least = SMALL * sum(parameter.numel() for parameter in model.parameters())
    return [block for block in _elements(model) if sum(p.numel() for p in block.parameters()) >= least]


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from _elements(child)
        elif isinstance(module, nn.Sequential | nn.ModuleList):
            yield child
        else:
            yield from _elements(child)  # a part of the model that has containers, such as a transformer's encoder


def make_step(config: Config, world: World, precision: Precision, model: nn.Module) -> Step:
    """A step with divided weights."""
    return ShardedStep(config, world, precision, model)


class ShardedStep(Step):
    """A step of a model whose weights are DTensors."""

    sharded = True

    def __init__(self, config: Config, world: World, precision: Precision, model: nn.Module) -> None:
        """`model` may still be on the CPU: its blocks are moved to the device and divided one by one.

        Raises:
            TrainError: this torch has no fully_shard.
        """
        try:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        except ImportError:
            raise TrainError(
                f"--parallel fsdp needs torch.distributed.fsdp.fully_shard, which torch {torch.__version__} lacks; "
                f"use an image with torch 2.6 or newer, or --parallel ddp"
            ) from None
        mesh = init_device_mesh(world.device.type, (world.size,))
        for block in (*blocks(model), model):
            # 16-bit weights are gathered where autocast would round them anyway; batch norm needs them in fp32
            wire = None if has_batch_norm(block) else precision.autocast
            policy = MixedPrecisionPolicy(param_dtype=wire, reduce_dtype=torch.float32 if wire else None)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        self._sharded: Any = model  # fully_shard adds methods to the model's class
        super().__init__(config, world, precision, model, model)

    def accumulate(self, batch: Batch, plan: Plan) -> Tensor:
        """Adds a micro-batch's gradients; they are reduced and divided with the last one."""
        self._sharded.set_requires_gradient_sync(batch.last)
        return super().accumulate(batch, plan)

    def before_checkpoint(self) -> None:
        """No rank lacks anything; but a forward pass without a backward leaves some weights gathered, in 16 bits."""
        self._sharded.reshard()

    def _model_state(self) -> dict[str, Any]:
        return self.model.state_dict(keep_vars=True)  # to detach divided tensors takes as long as to copy them

    def _optimizer_state(self) -> dict[str, Any]:
        """This rank's part, by the weights' names, as torch's get_optimizer_state_dict gives it, but soon.

        Before the first update there is none yet; torch's function makes it.
        """
        state: dict[str, Any]
        if not self.optimizer.state:
            state = get_optimizer_state_dict(self.model, self.optimizer)
            return state
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        state = {names[parameter]: values for parameter, values in self.optimizer.state.items()}
        groups = [group | {"params": [names[p] for p in group["params"]]} for group in self.optimizer.param_groups]
        return {"state": state, "param_groups": groups}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Reads this rank's part of the weights and of the optimiser's state, saved by any number of ranks.

        Raises:
            TrainError: the checkpoint lacks something that this run has.
        """
        model, optimizer = get_state_dict(self.model, self.optimizer)
        parts = {"model": model, "optimizer": {"state": optimizer["state"]}}
        try:
            load(parts, checkpoint_id=state["optimizer"]["shards"])
        except CheckpointException as error:
            why = str(next(iter(error.failures.values()))[0]).splitlines()[0]
            raise TrainError(f"the checkpoint does not fit this run: {why}") from error
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
