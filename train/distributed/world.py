"""The processes of a run: rank, world size and device of this one, and the collectives that the trainer needs.

Collectives are no-ops for a single process, which needs no process group.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

# Imported before any group exists, because default arguments of its functions keep the group that exists at import.
# If DDP imports it later, the group's threads live until the interpreter shuts down, which aborts the process.
import torch.distributed.nn
from torch import Tensor

from train.config import Config
from train.errors import TrainError, alike_on_a_machine
from train.foreach import copy_
from train.hardware import bind_to_gpu, near_cores

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process's position among all; `size` is 1 for a single process."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str  # "none" for a single process
    core_sharers: int = 1  # processes on the same cores as this one
    sharded: bool = (
        True  # each rank reads its own samples; False: ranks are stages of one model and read the same samples
    )
    generation: int = 0  # increases when the world is re-formed after the loss of a node
    full_size: int = 0  # size of the job's full world, if this one may lack nodes
    patient: Any = None  # a group that waits for as long as a rank lives, not only --timeout

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes the files."""
        return self.rank == 0

    @property
    def shard(self) -> int:
        """This rank's index among the `data_shards`."""
        return self.rank if self.sharded else 0

    @property
    def data_shards(self) -> int:
        """The number of shards of the samples."""
        return self.size if self.sharded else 1

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a CPU tensor over all ranks, on every rank."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def max(self, value: float) -> float:
        """Return the maximum over all ranks, on every rank."""
        highest = torch.tensor([value], dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX)
        return float(highest)

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Return the value of rank `source`, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, source)
        return box[0]

    def gather(self, value: T, patient: bool = False) -> list[T]:
        """Return the values of all ranks, on every rank. `patient`: some may need longer than --timeout to get here."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self.patient if patient else None)
        return values

    def all_ranks_or_exit(self, what: Callable[[], T]) -> T:
        """Call `what` on every rank; if one rank fails, all exit instead of waiting for it forever.

        It may take longer on one rank than --timeout: reading a disk or a store. Ranks that die are noticed.

        Raises:
            TrainError: on the first rank that failed, with rank and machine unless all failed the same way.
            SystemExit: 2, on the other ranks.
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
        mine = (str(failure), socket.gethostname()) if failure else None
        dist.all_gather_object(reports, mine, group=self.patient)
        failed = [(rank, *report) for rank, report in enumerate(reports) if report]
        if not failed:
            return result
        rank, message, host = failed[0]
        if self.rank != rank:
            raise SystemExit(2)
        alike = len(failed) == self.size and len({report[1] for report in failed}) == 1
        raise TrainError(message if alike else f"{message} (rank {rank} on {host})") from failure


def start(config: Config) -> World:
    """Join the process group described by torchrun's environment variables, if set.

    Raises:
        TrainError: the requested device is not available.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    instance = bool(os.environ.get("LAUNCHER_MIG"))  # this process has one GPU instance (MIG), as device 0
    with alike_on_a_machine():
        device = choose_device(config, 0, 1) if instance else choose_device(config, local_rank, local_size)
    sharers = local_size
    if device.type == "cuda" and config.bind_cores:
        sharers = bind_to_gpu([near_cores(0 if instance else gpu) for gpu in range(local_size)], local_rank)
    if config.threads:
        torch.set_num_threads(config.threads)
    backend, patient = "none", None
    if size > 1:
        # gloo in addition to NCCL: stop flags and metrics are CPU tensors and must not wait for queued GPU work
        backend = (
            "cpu:gloo,cuda:nccl" if device.type == "cuda" and not instance else "gloo"
        )  # NCCL does not support MIG
        # nccl2, the NCCL of torch 2.15, otherwise takes a GPU by LOCAL_RANK or the global rank; the older one would
        # only start earlier.
        bound = device if "nccl" in backend and torch.__version__ >= "2.15.0a0" else None
        dist.init_process_group(backend, timeout=timedelta(seconds=config.timeout), device_id=bound)
        patient = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    sharded = config.parallel not in ("model", "pipeline")
    generation = int(os.environ.get("LAUNCHER_GENERATION", "0"))
    full_size = int(os.environ.get("LAUNCHER_FULL_WORLD", "0"))
    found = World(rank, size, local_rank, local_size, device, backend, sharers, sharded, generation, full_size)
    return replace(found, patient=patient)


def choose_device(config: Config, local_rank: int, local_size: int) -> torch.device:
    """Return this process's device; also configure deterministic mode, TF32 and cuDNN's benchmark mode.

    Raises:
        TrainError: the requested device is not available.
    """
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # https://docs.nvidia.com/cuda/cublas, 2.1.4
        torch.use_deterministic_algorithms(True)
    found = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device == "cuda" and found == 0:
        raise TrainError("--device cuda: torch found no GPU; check the driver, CUDA_VISIBLE_DEVICES and torch's build")
    if found == 0:
        return torch.device("cpu")
    if local_size > found:
        raise TrainError(
            f"{local_size} processes on this machine, but {found} GPUs; start one process per GPU, or use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    torch.backends.cudnn.allow_tf32 = config.tf32
    torch.backends.cudnn.benchmark = not config.deterministic
    return torch.device("cuda", local_rank)


def broadcast_together(tensors: Sequence[Tensor]) -> None:
    """Broadcast rank 0's tensors in place, with one collective per data type."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault(tensor.dtype, []).append(tensor)
    for kept in alike.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in kept])
        dist.broadcast(flat, 0)
        parts = torch.split(flat, [tensor.numel() for tensor in kept])
        copy_(
            [tensor.detach() for tensor in kept],
            [part.view_as(tensor) for part, tensor in zip(parts, kept, strict=True)],
        )


class Agreed(NamedTuple):
    """Decision of all ranks before the next step."""

    stop: bool
    save: bool


class StopSignal:
    """Makes all ranks stop or save at the same step after a SIGTERM on any rank, without delaying a step.

    Each step starts an asynchronous all-reduce of the local flags and reads the result of the previous step, which has
    already arrived; all ranks read the same sum at the same step.
    """

    world: World

    def __init__(self, world: World | None = None) -> None:
        """`world`: may be set later, before the first step; a stop may be requested before."""
        if world:
            self.world = world
        self.reached = threading.Event()  # set when all ranks stop
        self._asked = False
        self._flags = torch.zeros(2, dtype=torch.int32)
        self._work: Any = None

    def ask(self) -> None:
        """Request a stop; called from a signal handler."""
        self._asked = True

    def agreed(self, save: bool = False) -> Agreed:
        """Return the requests made before the last step; every rank must call it once per step. save: a new request."""
        if self.world.size == 1:
            if self._asked:
                self.reached.set()
            return Agreed(self._asked, save)
        if self._work is not None:
            self._work.wait()
        agreed = Agreed(*(bool(flag) for flag in self._flags))
        if agreed.stop:
            self.reached.set()
        self._flags = torch.tensor([self._asked, save], dtype=torch.int32)
        self._work = dist.all_reduce(self._flags, async_op=True)
        return agreed

    def stopped(self) -> bool:
        """Like `agreed`, without saving."""
        return self.agreed().stop

    def settle(self) -> None:
        """Wait for the pending all-reduce before the process group is destroyed."""
        if self._work is not None:
            self._work.wait()
            self._work = None


# errors of gloo, the store and NCCL
_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Socket closed|Connection refused|recvValue failed|failed to recv"
    r"|Timed out waiting .*ms for (recv|send)|remote process exited|ncclRemoteError|store.*may have died",
    re.IGNORECASE,
)


@contextmanager
def report_lost_peers(world: World) -> Iterator[None]:
    """Convert a collective's error about a lost or unresponsive peer into a TrainError."""
    try:
        yield
    except RuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        with suppress(ImportError):  # available in the launcher's workers; records the pending collective of each rank
            importlib.import_module("launcher_flight_recorder").record()
        why = next(line for line in str(error).splitlines() if _LOST.search(line)).strip()
        raise TrainError(
            f"rank {world.rank} of {world.size} on {socket.gethostname()} lost another process: {why}; for the cause, "
            f"see the log of the first rank that failed (shown by `launcher status`)"
        ) from error
