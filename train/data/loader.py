"""Prefetch batches: a thread pool decodes into preallocated slots, which are copied to the device.

Threads, not processes: the decoders release the GIL, nothing is pickled, and /dev/shm is not used.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from train.config import Config
from train.data import augment, decode, reading, sampler
from train.data.batch import Batch, Copy, Event, Request, Transfer
from train.data.changes import Changes, draw
from train.data.on_device import make_device_policy
from train.data.policy import make_policy
from train.data.source import Pixels, Source
from train.errors import TrainError

# seconds: between checks of reads; until a slow read is reported; until an unneeded read is abandoned
POLL, REPORT_AFTER, GIVE_UP = 1.0, 30.0, 5.0
CHUNK = 8  # images per task: small enough to spread a batch over threads, large enough to amortise the overhead


@dataclass
class Slot:
    """Memory for one batch; `read`: the event after which the copy to the device has read it."""

    memory: Tensor
    read: Event | None = None


@dataclass
class Pending:
    """A batch that is being decoded into its slot, then copied to the device."""

    slot: Slot
    batch: Batch
    filler: int
    tasks: list[Future[None]]
    changes: list[Changes]  # by image, computed on the device
    copy: Copy | None = None

    def ready(self) -> bool:
        return all(task.done() for task in self.tasks)

    def send(self, transfer: Transfer, stalls: Stalls) -> Copy:
        """Wait until the batch is decoded and start its copy to the device, if not done before."""
        if self.copy is None:
            done, waiting = wait(self.tasks, POLL, FIRST_EXCEPTION)
            while waiting and not any(task.exception() for task in done):
                stalls.check()
                done, waiting = wait(self.tasks, POLL, FIRST_EXCEPTION)
            for task in done:
                task.result()
            self.batch.weights[len(self.batch.weights) - self.filler :] = 0
            self.copy = transfer.start(self.batch)
            self.slot.read = self.copy.done
        return self.copy

    def cancel(self) -> None:
        """Wait until no task writes to the slot; a task that does not finish keeps the old memory."""
        running = [task for task in self.tasks if not task.cancel()]
        if wait(running, GIVE_UP).not_done:
            self.slot.memory = torch.empty_like(self.slot.memory)


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

    def add(self, name: str, reason: str) -> None:
        """Record an image.

        Raises:
            TrainError: there are more than `limit`.
        """
        if name not in self.names:
            self.names[name] = reason
            print(f"train: skipped {name}: {reason}", flush=True)
        if len(self.names) > self.limit:
            raise TrainError(
                f"{len(self.names)} images cannot be read, the last is {name}: {reason}; "
                f"repair or remove them, or increase --max-damaged"
            )


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
        self._on_device = make_device_policy(config) if self._training else None
        self._damaged, self._stalls = Damaged(config.max_damaged, {}), Stalls(config.timeout)
        workers = config.workers if config.workers >= 0 else max(1, len(os.sched_getaffinity(0)) // core_sharers)
        self._pool = ThreadPoolExecutor(workers, "decode") if workers else None
        depth = config.prefetch + 1 if workers else 1
        images = max(batch, 2)  # a batch of one is padded if batch norm needs two
        size = images * max(self.side(epoch) for epoch in range(config.epochs)) ** 2 * 3
        pin = transfer.device.type == "cuda"
        self._slots = [Slot(torch.empty(size, dtype=torch.uint8, pin_memory=pin)) for _ in range(depth)]

    def batches(self, requests: Iterable[Request], epoch: int, side: int | None = None) -> Iterator[Batch]:
        """Yield one batch per request, in order, on the device; start the copy of the next one if it is decoded.

        Raises:
            TrainError: too many images cannot be read.
        """
        free, pending = deque(self._slots), deque[Pending]()
        waiting, side = iter(requests), side or self.side(epoch)
        try:
            while True:
                while free and (request := next(waiting, None)) is not None:
                    pending.append(self._start(free.popleft(), request, epoch, side))
                if not pending:
                    return
                copy = pending[0].send(self._transfer, self._stalls)
                sent = pending.popleft()
                if pending and pending[0].ready():
                    pending[0].send(self._transfer, self._stalls)
                batch = copy.take()
                if self._on_device:
                    batch = replace(batch, images=self._on_device(batch.images, sent.changes))
                yield batch
                free.append(sent.slot)
        finally:
            for unused in pending:
                unused.cancel()

    def side(self, epoch: int) -> int:
        return self._config.side(epoch) if self._training else self._config.image_size

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)  # a read may never return

    def _start(self, slot: Slot, request: Request, epoch: int, side: int) -> Pending:
        if slot.read:
            slot.read.synchronize()
        count, images_in_all = len(request.indices), len(self.source.labels)
        rows = request.indices % images_in_all  # larger indices are copies of an image: see `sampler.order`
        images, weights = slot.memory[: count * side**2 * 3].view(count, side, side, 3), torch.ones(count)
        labels = torch.from_numpy(self.source.labels[rows])
        numbers = sampler.uniforms(self._config.seed, epoch, request.indices, augment.NUMBERS)
        out, valid = images.numpy(), weights.numpy()
        changes = [Changes()] * count

        def chunk(start: int) -> None:
            for index in range(start, min(start + CHUNK, count)):
                valid[index] = self._decode(int(rows[index]), numbers[index].tolist(), out[index])
                if self._on_device and valid[index]:
                    changes[index] = draw(self._config, float(numbers[index, augment.SEED]), side)

        batch, tasks = Batch(images, labels, weights, request.total, request.last), []
        for start in range(0, count, CHUNK):
            if self._pool:
                tasks.append(self._pool.submit(chunk, start))
            else:
                chunk(start)
        return Pending(slot, batch, request.filler, tasks, changes)

    def _decode(self, index: int, numbers: list[float], out: Pixels) -> bool:
        def choose(width: int, height: int) -> augment.View:
            if self._training:
                return augment.training_view(self._config, width, height, numbers, len(out))
            return augment.validation_view(self._config, width, height)

        try:
            data = reading.read(self.source, index)
            if isinstance(data, bytes):
                self._decoder.decode(data, choose, out)
            else:
                self._decoder.resize(data, choose, out)
        except decode.NotAnImageError as error:
            raise TrainError(f"{self.source.name(index)}: {error}; remove it from the data set") from error
        except (decode.DecodeError, OSError) as error:
            self._damaged.add(self.source.name(index), getattr(error, "strerror", None) or str(error))
            out[...] = 0
            return False
        if self._policy:
            self._policy(out, numbers[augment.SEED])
        return True
