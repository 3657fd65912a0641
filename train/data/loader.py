"""The dataloader: a thread pool decodes into preallocated slots, which are copied to the device.

Threads, not processes: the decoders release the GIL, nothing is pickled, and /dev/shm is not used.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from train.config import Config
from train.data import augment, decode, reading, sampler
from train.data.augment import Changes, draw
from train.data.batch import Batch, Copy, Event, Request, Transfer
from train.data.on_device import make_device_policy
from train.data.policy import make_own_change, make_policy
from train.data.source import Pixels, Source
from train.errors import TrainError

# seconds: between checks of reads; until a slow read is reported; until an unneeded read is abandoned
POLL, REPORT_AFTER, GIVE_UP = 1.0, 30.0, 5.0
CHUNK = 8  # images per task: small enough to spread a batch over threads, large enough to amortise the overhead


# decodes images of a batch, from this one on; returns the changes of each on the device, None if it cannot be read
DecodeMany = Callable[[int, Pixels], Sequence[Changes | None]]


class Slot:
    """Memory for one batch: several tasks decode into it, then it is copied to the device."""

    def __init__(self, size: int, pin: bool) -> None:
        """`size`: in bytes."""
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
        self._copy: Copy | None = None  # of the batch in it, from `send` to `wait`
        self._read: Event | None = None  # after which the last copy has read the memory
        self._tasks: list[Future[None]] = []
        self.changes: list[Changes] = []  # by image, to be computed on the device

    def decode(self, request: Request, labels: Tensor, side: int, many: DecodeMany, pool: Executor) -> None:
        """Start to decode a batch, once the copy of the one before has read the memory."""
        if self._read:
            self._read.synchronize()
        count = len(labels)
        images, weights = self._memory[: count * side**2 * 3].view(count, side, side, 3), torch.ones(count)
        out, valid, changes = images.numpy(), weights.numpy(), [Changes()] * count

        def chunk(start: int) -> None:
            for index, found in enumerate(many(start, out[start : start + CHUNK]), start):
                if found:
                    changes[index] = found
                else:
                    valid[index] = 0

        self._batch, self._filler = Batch(images, labels, weights, request.total, request.last), request.filler
        self.changes = changes
        self._tasks = [pool.submit(chunk, start) for start in range(0, count, CHUNK)]

    def decoded(self) -> bool:
        return all(task.done() for task in self._tasks)

    def send(self, transfer: Transfer, stalls: Stalls) -> None:
        """Wait until the batch is decoded; start its copy to the device, unless that was done before."""
        if self._copy:
            return
        done, waiting = wait(self._tasks, POLL, FIRST_EXCEPTION)
        while waiting and not any(task.exception() for task in done):
            stalls.check()
            done, waiting = wait(self._tasks, POLL, FIRST_EXCEPTION)
        for task in done:
            task.result()
        self._batch.weights[len(self._batch.weights) - self._filler :] = 0
        self._copy = transfer.start(self._batch)
        self._read = self._copy.done

    def wait(self) -> Batch:
        """Return the batch that was sent, for use in the current stream: later work there runs after the copy."""
        copy, self._copy = self._copy, None
        assert copy
        return copy.take()

    def cancel(self) -> None:
        """Wait until no task writes to the memory; a task that does not finish keeps it, and the slot gets other."""
        running = [task for task in self._tasks if not task.cancel()]
        if wait(running, GIVE_UP).not_done:
            self._memory = torch.empty_like(self._memory)
        self._copy = None


class AtOnce(Executor):
    """Runs a task when it is submitted, for --workers 0."""

    def submit(self, task: Callable[..., Any], /, *args: Any, **keywords: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(task(*args, **keywords))
        except Exception as error:  # noqa: BLE001 - raised by `result`, as for any executor
            done.set_exception(error)
        return done


@dataclass
class Stalls:
    """Detects slow reads: reported on the console, and an error after `limit` seconds."""

    limit: float
    reported: str = ""

    def check(self) -> None:
        """Raise TrainError if a read has taken longer than the limit."""
        name, seconds = reading.longest() or ("", 0.0)
        if seconds > self.limit:
            raise TrainError(
                f"{name}: not read within {self.limit:g} s (--timeout) on {socket.gethostname()}; "
                f"check the disk or the network file system"
            )
        if seconds > REPORT_AFTER and name != self.reported:
            self.reported = name
            print(f"train: {name}: not read within {seconds:.0f} s on {socket.gethostname()}; waiting", flush=True)


@dataclass
class Damaged:
    """Unreadable images, each reported once; more than `limit` stop the run."""

    limit: int
    names: dict[str, str]
    reads: list[str] = field(default_factory=list)  # of each time, since `take`

    def add(self, name: str, reason: str) -> None:
        """Record an image.

        Raises:
            TrainError: there are more than `limit`.
        """
        self.reads.append(name)
        if name not in self.names:
            self.names[name] = reason
            print(f"train: skipped {name}: {reason}", flush=True)
        if len(self.names) > self.limit:
            raise TrainError(
                f"{len(self.names)} images cannot be read, the last is {name}: {reason}; "
                f"repair or remove them, or increase --max-damaged"
            )

    def take(self) -> int:
        """Return how many images have been skipped since the last call."""
        reads, self.reads = self.reads, []
        return len(set(reads))


class Loader:
    """Decodes batches of one source on `config.workers` threads, `config.prefetch` batches ahead."""

    def __init__(
        self,
        config: Config,
        source: Source,
        decoder: decode.Decoder | None,
        batch: int,
        core_sharers: int,
        transfer: Transfer,
    ) -> None:
        """With a `decoder`, for training with augmentation; without, for validation with Pillow.

        `core_sharers`: processes on the same cores as this one.
        """
        self._config, self.source, self.batch_size = config, source, batch
        self._training = decoder is not None
        self._decoder, self._transfer = decoder or decode.Pillow(), transfer
        self._policy = make_policy(config) if self._training else None
        self._own_change = make_own_change(config) if self._training else None
        self._on_device = make_device_policy(config) if self._training else None
        self._damaged, self._stalls = Damaged(config.max_damaged, {}), Stalls(config.timeout)
        workers = config.workers if config.workers >= 0 else max(1, len(os.sched_getaffinity(0)) // core_sharers)
        self._pool = ThreadPoolExecutor(workers, "decode") if workers else AtOnce()
        depth = config.prefetch + 1 if workers else 1
        if transfer.device.type == "cuda":
            # the thread that queues the GPU's work waits for the GIL no longer than that, instead of 5 ms: 4 to 8 % of
            # the images/s of a compiled ResNet-50 on an H200 with 16 cores
            sys.setswitchinterval(2e-4)
        images = max(batch, 2)  # a batch of one is padded if batch norm needs two
        size = images * max(self.side(epoch) for epoch in range(config.epochs)) ** 2 * 3
        self._slots = [Slot(size, pin=transfer.device.type == "cuda") for _ in range(depth)]

    def batches(self, requests: Iterable[Request], epoch: int, side: int | None = None) -> Iterator[Batch]:
        """Yield one batch per request, in order, on the device; start the copy of the next one if it is decoded.

        Raises:
            TrainError: too many images cannot be read.
        """
        free, pending = deque(self._slots), deque[Slot]()
        waiting, side = iter(requests), side or self.side(epoch)
        try:
            while True:
                while free and (request := next(waiting, None)) is not None:
                    pending.append(free.popleft())
                    rows = request.indices % len(self.source.labels)  # larger ones are copies: see `sampler.order`
                    labels = torch.from_numpy(self.source.labels[rows])
                    many = self._decoding(request, rows, epoch, side)
                    pending[-1].decode(request, labels, side, many, self._pool)
                if not pending:
                    return
                pending[0].send(self._transfer, self._stalls)
                slot = pending.popleft()
                if pending and pending[0].decoded():
                    pending[0].send(self._transfer, self._stalls)
                batch = slot.wait()
                if self._on_device:
                    batch = replace(batch, images=self._on_device(batch.images, slot.changes))
                yield batch
                free.append(slot)
        finally:
            for unused in pending:
                unused.cancel()

    def skipped(self) -> int:
        """Return how many unreadable images this process has skipped since the last call."""
        return self._damaged.take()

    def side(self, epoch: int) -> int:
        return self._config.side(epoch) if self._training else self._config.image_size

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)  # a read may never return

    def _decoding(self, request: Request, rows: sampler.Indices, epoch: int, side: int) -> DecodeMany:
        """Return the function that decodes images of the request; their random numbers depend on nothing else."""
        numbers = sampler.uniforms(self._config.seed, epoch, request.indices, augment.NUMBERS)

        def many(start: int, outs: Pixels) -> list[Changes | None]:
            part = slice(start, start + len(outs))
            own = numbers[part].tolist()
            return [
                (draw(self._config, row[augment.SEED], side) if self._on_device else Changes()) if read else None
                for row, read in zip(own, self._decode(rows[part].tolist(), own, outs), strict=True)
            ]

        return many

    def _decode(self, indices: Sequence[int], numbers: Sequence[Sequence[float]], outs: Pixels) -> list[bool]:
        """Read and decode images; return whether each could be read."""
        wanted, failures = list[tuple[int, decode.Wanted]](), dict[int, Exception]()
        for place, data in enumerate(reading.read_many(self.source, indices, self._decoder.read_at_once)):
            choose = partial(self._view, numbers[place], len(outs[place]))
            if isinstance(data, OSError):
                failures[place] = data
            elif isinstance(data, np.ndarray):
                self._decoder.resize(data, choose, outs[place])
            else:
                wanted.append((place, decode.Wanted(data, choose, outs[place])))
        found = self._decoder.decode_many([image for _, image in wanted])
        failures |= {place: error for (place, _), error in zip(wanted, found, strict=True) if error}
        for place, error in sorted(failures.items()):
            name = self.source.name(indices[place])
            if isinstance(error, decode.NotAnImageError):
                raise TrainError(f"{name}: {error}; remove it from the data set") from error
            self._damaged.add(name, getattr(error, "strerror", None) or str(error))
            outs[place] = 0
        for place, out in enumerate(outs):
            for change in (self._policy, self._own_change):
                if change and place not in failures:
                    change(out, numbers[place][augment.SEED])
        return [place not in failures for place in range(len(outs))]

    def _view(self, numbers: Sequence[float], side: int, width: int, height: int) -> augment.View:
        if self._training:
            return augment.training_view(self._config, width, height, numbers, side)
        return augment.validation_view(self._config, width, height)
