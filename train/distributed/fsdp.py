"""--parallel fsdp: weights, gradients and optimiser state sharded over all ranks (torch's fully_shard, FSDP2).

--parallel hsdp: sharded over the ranks of a node, replicated on every node, so that weights are gathered within a node
and only the gradients of a shard cross the network.

For models that do not fit on one device. A block's weights are gathered while it computes; its gradients are averaged
and sharded again. The result is the same as with DDP. Before it is sharded, every rank has the whole model on its CPU:
a model that is built without storage would not start from the weights that DDP starts from.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from train.compiled import compile_blocks
from train.config import Config
from train.distributed.world import World
from train.ema import EMA
from train.errors import TrainError
from train.models import elements
from train.precision import Precision
from train.step import Step, same_parts


def lacking(config: Config) -> Iterator[str]:
    """Yield what this torch lacks for these options."""
    shard = getattr(torch.distributed.fsdp, "fully_shard", None)
    if not shard:
        yield (
            f"--parallel {config.parallel} needs torch.distributed.fsdp.fully_shard, which torch {torch.__version__} "
            "lacks; use an image with torch 2.6 or newer, or --parallel ddp"
        )
    elif config.compile and "ignored_params" not in inspect.signature(shard).parameters:
        yield (
            f"--parallel {config.parallel} with --compile needs fully_shard's ignored_params, which torch "
            f"{torch.__version__} lacks; use an image with torch 2.7 or newer, or remove --compile"
        )


# layers whose weights autocast rounds to 16 bits
PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)
SMALL = 1e-3  # fraction of all weights below which a block gets no separate collectives


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules to shard separately: elements of containers, at any depth, except those with few weights."""
    minimum = SMALL * sum(parameter.numel() for parameter in model.parameters())
    found = dict.fromkeys(elements(model))
    return [block for block in found if sum(p.numel() for p in block.parameters()) >= minimum]


def unrounded(model: nn.Module) -> list[nn.Module]:
    """Return the layers, such as norms, whose weights autocast keeps in fp32: those without parts and products."""
    leaves = [part for part in model.modules() if not any(True for _ in part.children())]
    return [part for part in leaves if not isinstance(part, PRODUCTS) and any(True for _ in part.parameters())]


def only_products(block: nn.Module) -> bool:
    """Whether autocast rounds all weights of a block, apart from those of `unrounded`: 16 bits suffice."""
    holders = [part for part in block.modules() if any(True for _ in part.parameters(recurse=False))]
    return all(isinstance(part, PRODUCTS) or not any(True for _ in part.children()) for part in holders)


def check_mean(world: World) -> None:
    """Raise TrainError if gradients would be summed where fully_shard asks for a mean, as over gloo in torch 2.7."""
    mean = torch.empty(1, device=world.device)
    dist.reduce_scatter_tensor(mean, torch.ones(world.size, device=world.device), op=dist.ReduceOp.AVG)
    if mean.item() != 1:
        raise TrainError(
            f"--parallel fsdp and hsdp: torch {torch.__version__} sums gradients over processes in place of "
            f"averaging them on {world.device.type}; use a newer torch, or --parallel ddp"
        )


def weights(parts: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of all parts."""
    return {parameter for part in parts for parameter in part.parameters()}


def local(tensors: list[Tensor]) -> list[Tensor]:
    """Return this rank's shards of DTensors, and other tensors as they are."""
    from torch.distributed.tensor import DTensor  # not in torch 2.4, see `problems`

    return [each.to_local() if isinstance(each, DTensor) else each for each in tensors]


def nodes_and_ranks(world: World, timeout: float) -> DeviceMesh:
    """Return the mesh of nodes and their ranks; fully_shard replicates over the first dimension.

    With groups of our own: those of init_device_mesh have the backend's time limit instead of --timeout.
    """
    grid = torch.arange(world.size).view(-1, world.local_size)
    mine: list[Any] = []
    for lines in (grid.T.tolist(), grid.tolist()):
        groups = [dist.new_group(line, timeout=timedelta(seconds=timeout)) for line in lines]  # on every rank
        mine += [group for group, line in zip(groups, lines, strict=True) if world.rank in line]
    return DeviceMesh.from_group(mine, world.device.type, grid, mesh_dim_names=("nodes", "ranks"))


def make_step(config: Config, world: World, precision: Precision, model: nn.Module) -> Step:
    """Return a step with sharded weights."""
    return ShardedStep(config, world, precision, model)


class ShardedEMA(EMA):
    """The averages of this rank's shards: they are computed element by element, and so equal those of whole tensors."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self._decay = model, decay
        own: dict[str, Tensor] = model.state_dict(keep_vars=True)
        once = {id(value): (value.detach().clone(), value) for value in own.values()}  # tied weights have several names
        self.averages = {name: once[id(value)][0] for name, value in own.items()}
        self._floats, self._integers = (
            _columns([pair for pair in once.values() if pair[0].is_floating_point() == floats])
            for floats in (True, False)
        )
        self._rounded: tuple[list[Tensor], list[Tensor]] = [], []

    def _local(self, tensors: list[Tensor]) -> list[Tensor]:
        return local(tensors)  # now: the first forward pass may move a shard to other memory

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the averages and the model's values."""
        for averages, now in (self._floats, self._integers):
            for average, value in zip(self._local(averages), self._local(now), strict=True):
                kept = value.clone()
                value.copy_(average)
                average.copy_(kept)


def _columns(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


class ShardedStep(Step):
    """A step of a model with DTensor weights."""

    sharded = True

    def __init__(self, config: Config, world: World, precision: Precision, model: nn.Module) -> None:
        """`model` may be on the CPU: its blocks are moved to the device and sharded one by one."""
        if config.compile:
            self.compiled = compile_blocks(model, blocks(model), config)
        self._kept: Any = []  # layers with a group of their own, gathered until they are resharded
        self._sharded: Any = model  # fully_shard adds methods to the model's class
        self._shard(config, world, precision, model)
        super().__init__(config, world, precision, model, model)

    def _shard(self, config: Config, world: World, precision: Precision, model: nn.Module) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # not in torch before 2.6, see `problems`

        check_mean(world)
        if config.parallel == "hsdp":
            mesh = nodes_and_ranks(world, config.timeout)
        else:
            mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("ranks",))
        exact = MixedPrecisionPolicy(cast_forward_inputs=False)
        rounded = MixedPrecisionPolicy(precision.autocast, torch.float32, cast_forward_inputs=False)
        kept = unrounded(model) if precision.autocast else []  # small, so gathered once per step, together
        parts, apart = [block for block in blocks(model) if block not in kept], dict[str, Any]()
        if kept and config.compile:
            # with the root's weights, and so first: hooks of a group of theirs would break the graphs of the blocks
            fully_shard(model, mesh=mesh, mp_policy=exact, ignored_params=weights(parts) - weights(kept))
            apart = {"ignored_params": weights(kept)}  # which are other tensors now
        elif kept:
            fully_shard(kept, mesh=mesh, mp_policy=exact, reshard_after_forward=False)
            self._kept = kept
        for block in parts:
            policy = rounded if precision.autocast and only_products(block) else exact
            fully_shard(block, mesh=mesh, mp_policy=policy, **apart)
        if not apart:
            fully_shard(model, mesh=mesh, mp_policy=exact)

    def sync(self, last: bool) -> None:
        self._sharded.set_requires_gradient_sync(last)

    def _local(self, tensors: list[Tensor]) -> list[Tensor]:
        return local(tensors)

    def _everywhere(self, finite: Tensor) -> Tensor:
        least = finite.float()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return least.bool()

    def _averages(self, decay: float) -> EMA:
        return ShardedEMA(self.model, decay)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Yield the model; while it is validated, its shards are those of the averaged weights."""
        if not isinstance(self.ema, ShardedEMA):
            yield self.model
            return
        self._reshard()
        self.ema.swap()
        try:
            yield self.model
        finally:
            self._reshard()
            self.ema.swap()

    def _reshard(self) -> None:
        """A forward pass without a backward pass leaves some weights gathered, in 16 bits."""
        self._sharded.reshard()
        for layer in self._kept[:1]:  # they are gathered together
            layer.reshard()

    def before_checkpoint(self) -> None:
        """Reshard, and send rank 0's running statistics: any rank may write those that are not sharded."""
        self._reshard()
        self._send_statistics()

    def _model_state(self) -> dict[str, Any]:
        return self.model.state_dict(keep_vars=True)  # detaching sharded tensors takes as long as copying them

    def _optimizer_state(self) -> dict[str, Any]:
        """Return this rank's shard by parameter name, like torch's get_optimizer_state_dict, but faster.

        Before the first update the state is empty; torch's function creates it.
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
        """Read this rank's shard of weights and optimiser state, saved by any number of ranks.

        Raises:
            TrainError: the checkpoint does not match this run.
        """
        self.scale.load_state_dict(state["scale"])
        same_parts(("--ema-decay", self.ema, state["ema"]))
        model, optimizer = get_state_dict(self.model, self.optimizer)
        parts = {"model": model, "optimizer": {"state": optimizer["state"]}}
        if self.ema:
            parts["ema"] = self.ema.averages
        try:
            load(parts, checkpoint_id=state["optimizer"]["shards"])
        except CheckpointException as error:
            why = str(next(iter(error.failures.values()))[0]).splitlines()[0]
            raise TrainError(f"the checkpoint does not match this run: {why}") from error
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
