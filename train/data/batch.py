"""Batches and their transfer to the device: on a GPU a copy on a separate stream while the GPU computes.

A queued copy reads its source later, so code that overwrites the source must wait for the copy, as must the compute
stream.
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
    """The samples of one batch; the last `filler` samples are padding with weight 0."""

    indices: sampler.Indices
    total: int
    filler: int = 0
    last: bool = True


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of one rank, on its device. On a CPU, valid only until the next batch is requested."""

    images: Tensor  # (n, side, side, 3) uint8
    labels: Tensor  # (n,) int64
    weights: Tensor  # (n,) float32: 0 for an unreadable image or a filler
    total: int  # images of the step on all ranks
    last: bool  # the step's last micro-batch


def micro_batches(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the micro-batches of the next step."""
    for batch in batches:
        yield batch
        if batch.last:
            return


class Event(Protocol):
    """A point in a stream, like torch.cuda.Event."""

    def wait(self, stream: Any = None) -> None:
        """Make later work in the stream wait for the event."""

    def synchronize(self) -> None:
        """Wait until the event has occurred."""


@dataclass(frozen=True, eq=False)
class Copy:
    """A batch on the device once `done` has occurred; None if no copy is needed."""

    batch: Batch
    done: Event | None = None

    def take(self) -> Batch:
        """Return the batch for use in the current stream: later work there runs after the copy."""
        if self.done:
            stream = torch.cuda.current_stream(self.batch.images.device)
            self.done.wait(stream)
            for tensor in (self.batch.images, self.batch.labels, self.batch.weights):
                tensor.record_stream(stream)  # the allocator must not reuse the memory before the stream has read it
        return self.batch


class Transfer:
    """Starts copies to `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's stub

    def start(self, batch: Batch) -> Copy:
        """Queue the copy; the source must not change before it is done."""
        if self._stream is None:
            return Copy(batch)
        with torch.cuda.stream(self._stream):
            # images last: only they are in pinned memory, and the other copies would wait for theirs
            labels, weights, images = (
                tensor.to(self.device, non_blocking=True) for tensor in (batch.labels, batch.weights, batch.images)
            )
        copied = replace(batch, images=images, labels=labels, weights=weights)
        return Copy(copied, self._stream.record_event())
