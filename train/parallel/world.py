"""The processes of a run: who this one is, its device, and the few collectives that the trainer needs.

Everything is a no-op for a single process, which then needs no process group at all.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Before any group: its functions take the group of the moment they are imported as a default argument. DDP would import
# them later, and the group, with its threads, would then live until the interpreter is torn down, and abort there.
import torch.distributed.nn
from torch import Tensor

from train.config import Config
from train.errors import TrainError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all; `size` 1 means alone."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str  # "none" when alone
    sharded: bool = True  # each rank has samples of its own; the stages of one model all read the same

    @property
    def first(self) -> bool:
        """Rank 0: the one that writes."""
        return self.rank == 0

    @property
    def shard(self) -> int:
        """Which of the `data_shards` is this rank's."""
        return self.rank if self.sharded else 0

    @property
    def data_shards(self) -> int:
        """Into how many pieces the samples are cut."""
        return self.size if self.sharded else 1

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks of a CPU tensor, on every rank."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def broadcast_object(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def all_ranks_or_exit(self, what: Callable[[], T]) -> T:
        """`what()` on every rank; if it fails on one, every rank ends now instead of waiting for that one for ever.

        Raises:
            TrainError: on the first rank that failed; it names rank and machine unless all failed alike.
            SystemExit: 2, on the others.
        """
        try:
            result, failure = what(), None
        except TrainError as error:
            failure = error
        if self.size == 1:
            if failure:
                raise failure
            return result
        reports: list[tuple[str, str] | None] = [None] * self.size
        dist.all_gather_object(reports, (str(failure), socket.gethostname()) if failure else None)
        failed = [(rank, *report) for rank, report in enumerate(reports) if report]
        if not failed:
            return result
        rank, message, host = failed[0]
        if self.rank != rank:
            raise SystemExit(2)
        alike = len(failed) == self.size and len({report[1] for report in failed}) == 1
        raise TrainError(message if alike else f"{message} (rank {rank} on {host})") from failure


def start(config: Config) -> World:
    """Joins the process group that torchrun's environment describes, or none when started alone.

    Raises:
        TrainError: the device asked for is not there.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = choose_device(config.device, local_rank, local_size)
    if config.threads:
        torch.set_num_threads(config.threads)
    backend = "none"
    if size > 1:
        # gloo beside NCCL: stop flags and metrics are CPU numbers and must not wait for the GPU's queue
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=config.timeout))
    sharded = config.parallel not in ("model", "pipeline")
    return World(rank, size, local_rank, local_size, device, backend, sharded)


def choose_device(wanted: str, local_rank: int, local_size: int) -> torch.device:
    """This process's device; on a GPU also the settings that make it fast.

    Raises:
        TrainError: the device asked for is not there.
    """
    found = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cuda" and found == 0:
        raise TrainError("--device cuda: torch sees no GPU; check the driver, CUDA_VISIBLE_DEVICES and torch's build")
    if found == 0:
        return torch.device("cpu")
    if local_size > found:
        raise TrainError(f"{local_size} processes here but {found} GPUs; start one process a GPU, or --device cpu")
    torch.cuda.set_device(local_rank)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    return torch.device("cuda", local_rank)


class StopSignal:
    """A SIGTERM on any rank, agreed on by all at the same step, without making any step wait.

    Each step starts an asynchronous all-reduce of the local flag and reads the result of the step before, which has
    long arrived by then; all ranks read the same sum at the same step.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._asked = False
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._work: Any = None

    def ask(self) -> None:
        """This rank wants to stop; called from a signal handler."""
        self._asked = True

    def agreed(self) -> bool:
        """Called once a step by every rank: whether all stop now."""
        if self._world.size == 1:
            return self._asked
        if self._work is not None:
            self._work.wait()
        stop = bool(self._flag.item())
        self._flag = torch.tensor([int(self._asked)], dtype=torch.int32)
        self._work = dist.all_reduce(self._flag, async_op=True)
        return stop

    def settle(self) -> None:
        """Waits for the reduction under way, before the process group ends."""
        if self._work is not None:
            self._work.wait()
            self._work = None
