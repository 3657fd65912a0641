"""Prefetching of batches: a thread pool decodes into preallocated uint8 slots; batches come in the requested order.

Threads, not processes: the decoders release the GIL, nothing is pickled, and /dev/shm is not used.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from train.config import Config
from train.data import augment, decode, sampler
from train.data.source import Pixels, Source
from train.errors import TrainError

CHUNK = 8  # images per task: few enough to spread a batch over the threads, enough to amortise the task's overhead


@dataclass(frozen=True)
class Batch:
    """What one rank processes at once. Valid only until the next batch is requested, because its slot is reused."""

    images: Tensor  # (n, side, side, 3) uint8
    labels: Tensor  # (n,) int64
    weights: Tensor  # (n,) float32: 0 for an unreadable image or a filler
    total: int  # images of the whole step, all ranks together
    last: bool  # the step's last micro-batch


@dataclass(frozen=True)
class Request:
    """The samples of one batch; the last `filler` of them are padding with weight 0."""

    indices: sampler.Indices
    total: int
    filler: int = 0
    last: bool = True


@dataclass
class Damaged:
    """Images that could not be read, each reported once; more than the limit ends the run."""

    limit: int
    names: dict[str, str]

    def add(self, name: str, reason: str) -> None:
        """Records one.

        Raises:
            TrainError: there are more than `limit`.
        """
        if name not in self.names:
            self.names[name] = reason
            print(f"train: skipped {name}: {reason}", flush=True)
        if len(self.names) > self.limit:
            raise TrainError(
                f"{len(self.names)} images cannot be read, the last one {name}: {reason}; "
                f"repair or remove them, or allow more with --max-damaged"
            )


class Loader:
    """Decodes batches of one source on `config.workers` threads, `config.prefetch` batches ahead."""

    def __init__(
        self, config: Config, source: Source, decoder: decode.Decoder | None, batch: int, local_world: int, pin: bool
    ) -> None:
        """With a `decoder`: for training, augmented; without: for validation, always with Pillow."""
        self._config, self._source, self._training = config, source, decoder is not None
        self._decoder = decoder or decode.Pillow()
        self._damaged = Damaged(config.max_damaged, {})
        workers = config.workers if config.workers >= 0 else max(1, len(os.sched_getaffinity(0)) // local_world)
        self._pool = ThreadPoolExecutor(workers, "decode") if workers else None
        depth = config.prefetch + 1 if workers else 1
        largest = max(self._side(epoch) for epoch in range(config.epochs))
        self._slots = [torch.empty(batch * largest**2 * 3, dtype=torch.uint8, pin_memory=pin) for _ in range(depth)]

    def batches(self, requests: Iterable[Request], epoch: int, side: int | None = None) -> Iterator[Batch]:
        """One batch per request, in order.

        Raises:
            TrainError: too many images cannot be read.
        """
        free, pending = deque(self._slots), deque[tuple[Request, Tensor, Tensor, list["Future[None]"]]]()
        waiting, side = iter(requests), side or self._side(epoch)
        try:
            while True:
                while free and (request := next(waiting, None)) is not None:
                    size = len(request.indices) * side**2 * 3
                    slot = free.popleft()[:size].view(-1, side, side, 3)
                    weights = torch.ones(len(request.indices))
                    pending.append((request, slot, weights, self._start(request, slot, weights, epoch)))
                if not pending:
                    return
                request, slot, weights, tasks = pending.popleft()
                for task in tasks:
                    task.result()
                weights[len(weights) - request.filler :] = 0
                labels = torch.from_numpy(self._source.labels[request.indices])
                yield Batch(slot, labels, weights, request.total, request.last)
                free.append(self._whole(slot))
        finally:
            for _, _, _, tasks in pending:
                for task in tasks:
                    task.cancel()

    def _side(self, epoch: int) -> int:
        return self._config.side(epoch) if self._training else self._config.image_size

    def close(self) -> None:
        """Ends the threads."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def _whole(self, slot: Tensor) -> Tensor:
        return next(whole for whole in self._slots if whole.data_ptr() == slot.data_ptr())

    def _start(self, request: Request, slot: Tensor, weights: Tensor, epoch: int) -> list[Future[None]]:
        numbers = sampler.uniforms(self._config.seed, epoch, request.indices, augment.NUMBERS)
        out, valid = slot.numpy(), weights.numpy()

        def chunk(start: int) -> None:
            for place in range(start, min(start + CHUNK, len(out))):
                valid[place] = self._decode(int(request.indices[place]), numbers[place].tolist(), out[place])

        starts = range(0, len(out), CHUNK)
        if self._pool:
            return [self._pool.submit(chunk, start) for start in starts]
        for start in starts:
            chunk(start)
        return []

    def _decode(self, index: int, numbers: list[float], out: Pixels) -> bool:
        def choose(width: int, height: int) -> augment.View:
            if self._training:
                return augment.training_view(self._config, width, height, numbers, len(out))
            return augment.validation_view(self._config, width, height)

        try:
            data = self._source.read(index)
            if isinstance(data, bytes):
                self._decoder.decode(data, choose, out)
            else:
                self._decoder.resize(data, choose, out)
        except decode.NotAnImageError as error:
            raise TrainError(f"{self._source.name(index)}: {error}; remove it from the data set") from error
        except (decode.DecodeError, OSError) as error:
            self._damaged.add(self._source.name(index), str(error))
            out[...] = 0
            return False
        return True
