"""--gradient-compression powersgd:RANK: ranks exchange two thin matrices for each matrix of gradients, by torch's hook.

Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, NeurIPS
2019 (arXiv 1905.13727). What the product of the two lacks is kept on its rank and added to the next step's gradients:
the errors, which are as large as the gradients, and part of a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from train.config import Config
from train.data.batch import Batch
from train.distributed.ddp import DDPStep
from train.distributed.world import World
from train.errors import TrainError
from train.precision import Precision

RATE = 2  # gradients are sent as they are if the two matrices are not at least so many times smaller
REHEARSAL = 3  # more backward passes than a rehearsal has, whose gradients are sent as they are


def check_model(compression: str, model: nn.Module) -> None:
    """Raise TrainError if the model has a parameter that torch's hook cannot take: it needs rows."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (parameter.dim() == 0 or parameter.numel() == 0):
            what = "has no elements" if parameter.dim() else "is a number without dimension"
            raise TrainError(
                f"--gradient-compression {compression}: the parameter {name} {what}, which torch's PowerSGD cannot "
                f"take; give it the shape (1,) in the model, or use --gradient-compression bf16"
            )


def sent(shapes: Iterable[Sequence[int]], rank: int, rate: float = RATE) -> int:
    """Return how many numbers a rank exchanges in a step, of gradients of these shapes."""
    total = 0
    for shape in shapes:
        rows, columns = shape[0], int(np.prod(shape[1:]))
        thin = (rows + columns) * min(rows, columns, rank)
        total += thin if thin * rate < rows * columns else rows * columns
    return total


class PowerSGD:
    """The compression of one rank's gradients: what to register with DDP, and what a checkpoint must keep."""

    def __init__(self, rank: int, seed: int, dtype: torch.dtype = torch.float32, rate: float = RATE) -> None:
        """`dtype`: of the gradients. `rate`: see RATE; 0: everything is compressed.

        A column of zeros is divided by epsilon where its norm would be 0, and the result nan; it is far below the
        last digit of any other norm.
        """
        self.rank = rank
        self.seconds, self.steps = 0.0, 0  # in `reduce`, since gradients are compressed
        epsilon = 1e-8 if dtype is torch.float32 else 1e-16
        self.state = PowerSGDState(None, rank, REHEARSAL, rate, orthogonalization_epsilon=epsilon, random_seed=seed)

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average a GradBucket over all ranks, and wait for it.

        Without that wait, torch's hook sends a bucket's matrices from the thread that has received the rest of the
        bucket: over gloo, ranks then take the sums of two buckets in different orders, and mix them up. On a GPU it
        waits for the device anyway.
        """
        began, compressed = time.perf_counter(), self.state.iter >= REHEARSAL
        future: torch.futures.Future[Tensor] = powerSGD_hook(self.state, bucket)
        future.wait()
        if compressed:
            self.seconds += time.perf_counter() - began
            self.steps += bucket.is_last()
        return future

    def register(self, wrapped: DistributedDataParallel) -> None:
        """Let DDP reduce its gradients so."""
        # no method, as torch compares annotations, which are text here
        wrapped.register_comm_hook(None, lambda _, bucket: self.reduce(bucket))

    def begin(self) -> None:
        """Compress from the next backward pass on: all buckets are now those of the run."""
        self.state.iter = REHEARSAL

    def kept(self, world: World, everywhere: bool) -> dict[str, Any]:
        """Collective: return what a checkpoint needs, on rank 0, or `everywhere`; elsewhere it lacks the errors.

        By rank and bucket: the errors. By bucket, the same on all ranks: the two matrices, with which the next step
        begins. The generator has been used once for each bucket.
        """
        state = self.state
        errors: list[list[Tensor]] = [[] for _ in range(world.size)]
        for index in sorted(state.error_dict):
            own = state.error_dict[index].cpu()  # gloo's, and host memory
            parts = [torch.empty_like(own) for _ in range(world.size)] if everywhere or world.first else []
            if everywhere:
                dist.all_gather(parts, own)
            else:
                dist.gather(own, parts or None)
            for rank, part in enumerate(parts):
                errors[rank].append(part)
        matrices = {
            name: [kept[index] for index in sorted(kept)]
            for name, kept in (("p", state.p_memory_dict), ("q", state.q_memory_dict))
        }
        random: Any = state.rng.get_state(legacy=False)["state"]
        numbers = torch.from_numpy(random["key"].astype(np.int64))
        return {"errors": errors, **matrices, "random": (numbers, int(random["pos"]))}

    def restore(self, kept: Mapping[str, Any], world: World) -> None:
        """Continue as `kept` says; with zero errors if it is of another number of ranks."""
        state, device = self.state, world.device
        if len(kept["errors"]) == world.size:
            state.error_dict = {index: error.to(device) for index, error in enumerate(kept["errors"][world.rank])}
        state.p_memory_dict = {index: value.to(device, copy=True) for index, value in enumerate(kept["p"])}
        state.q_memory_dict = {index: value.to(device, copy=True) for index, value in enumerate(kept["q"])}
        keys, position = kept["random"]
        state.rng.set_state(("MT19937", keys.numpy().astype(np.uint32), position, 0, 0.0))


class CompressedStep(DDPStep):
    """A step whose gradients are compressed.

    It is rehearsed on two ranks, too: the errors belong to the buckets that DDP arranges after its first pass.
    """

    def __init__(
        self, config: Config, world: World, precision: Precision, model: nn.Module, wrapped: DistributedDataParallel
    ) -> None:
        """Raises TrainError if the model has a parameter that cannot be compressed."""
        check_model(config.gradient_compression, model)
        super().__init__(config, world, precision, model, wrapped)
        self.power = PowerSGD(config.powersgd_rank, config.seed, precision.weights)
        self.power.register(wrapped)
        self.to_rehearse = True
        # on other buckets or numbers, what a checkpoint has would be added to the wrong ones
        layout = str(precision.layout).removeprefix("torch.")
        self._how = f"{config.gradient_compression}, buckets of {config.bucket_mb:g} MiB, {config.dtype}, {layout}"
        self._loaded: Mapping[str, Any] | None = None  # until it is rehearsed
        self._kept: Mapping[str, Any] | None = None  # for the checkpoint that is being saved

    def rehearse(self, batch: Batch) -> None:
        super().rehearse(batch)
        self.power.begin()
        if self._loaded is not None:
            self.power.restore(self._loaded, self.objective.world)
            self._loaded = None

    def gradient_seconds(self) -> float | None:
        if self.objective.world.device.type == "cuda":  # the hook begins before the device has computed the gradients
            return None
        return self.power.seconds / self.power.steps if self.power.steps else None

    @property
    def bytes_besides(self) -> int:
        return self.objective.world.size * sum(each.numel() * each.element_size() for each in self.parameters)

    def before_checkpoint(self) -> None:
        super().before_checkpoint()
        self._kept = self._loaded or self.power.kept(self.objective.world, self.objective.config.replicated)

    def state(self) -> dict[str, Any]:
        kept, self._kept = self._kept, None  # as large as the gradients of all ranks
        assert kept is not None
        return super().state() | {"compression": {**kept, "how": self._how}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        kept = state.get("compression")
        self._loaded = kept if kept and kept["how"] == self._how else None

    def unused(self, state: Mapping[str, Any]) -> str:
        kept = state.get("compression")
        if kept is None:
            return "its run did not compress the gradients; it starts from zero"
        if kept["how"] != self._how:
            return f"its gradients were compressed with {kept['how']}, not {self._how}; it starts from zero"
        if len(kept["errors"]) != self.objective.world.size:
            ranks = f"{len(kept['errors'])} ranks, not {self.objective.world.size}"
            return f"its gradients were compressed on {ranks}; what was still to be sent is dropped"
        return ""
