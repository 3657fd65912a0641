"""A batch, and its way to the device: none on a CPU; on a GPU a copy on a stream of its own, while the GPU computes.

A queued copy reads its source later. So code that overwrites the source waits for the copy first, and the stream that
computes with the result waits for it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from train.data import sampler


@dataclass(frozen=True)
class Request:
    """The samples of one batch; the last `filler` of them are padding with weight 0."""

    indices: sampler.Indices
    total: int
    filler: int = 0
    last: bool = True


@dataclass(frozen=True, eq=False)
class Batch:
    """What one rank processes at once, on its device. On a CPU valid only until the next batch is requested."""

    images: Tensor  # (n, side, side, 3) uint8
    labels: Tensor  # (n,) int64
    weights: Tensor  # (n,) float32: 0 for an unreadable image or a filler
    total: int  # images of the whole step, all ranks together
    last: bool  # the step's last micro-batch


def micro_batches(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Those of the next step."""
    for batch in batches:
        yield batch
        if batch.last:
            return


class Event(Protocol):
    """A point in a stream, as torch.cuda.Event."""

    def wait(self, stream: Any = None) -> None:
        """Makes what is queued in the stream from now on wait for it."""

    def synchronize(self) -> None:
        """Returns when it has happened."""


@dataclass(frozen=True, eq=False)
class Copy:
    """A batch on the device, once `done` has happened; without that event nothing is copied."""

    batch: Batch
    done: Event | None = None

    def take(self) -> Batch:
        """The batch, for the current stream: what is queued there from now on runs after the copy."""
        if self.done:
            stream = torch.cuda.current_stream(self.batch.images.device)
            self.done.wait(stream)
            for tensor in (self.batch.images, self.batch.labels, self.batch.weights):
                tensor.record_stream(stream)  # the allocator must not reuse it before that stream has read it
        return self.batch


class Transfer:
    """Starts copies to `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's stub

    def start(self, batch: Batch) -> Copy:
        """Queues the copy; the source must not change before it is done."""
        if self._stream is None:
            return Copy(batch)
        with torch.cuda.stream(self._stream):
            # the images last: only they are in pinned memory, the others' copies would wait for theirs
            labels, weights, images = (
                tensor.to(self.device, non_blocking=True) for tensor in (batch.labels, batch.weights, batch.images)
            )
        copied = replace(batch, images=images, labels=labels, weights=weights)
        return Copy(copied, self._stream.record_event())
