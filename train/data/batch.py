"""A batch, and its way to the device: none on a CPU; on a GPU a copy on a stream of its own, while the GPU computes.

A queued copy reads its source later. So whoever overwrites the source waits for the copy first, and whoever computes
with the result makes its stream wait for the copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


@dataclass(frozen=True, eq=False)
class Copy:
    """A batch on the device, once the event has happened; without an event nothing is copied."""

    batch: Batch
    done: torch.cuda.Event | None = None

    def take(self) -> Batch:
        """The batch, for the current stream: what is queued there from now on runs after the copy."""
        if self.done:
            stream = torch.cuda.current_stream(self.batch.images.device)
            stream.wait_event(self.done)
            for tensor in (self.batch.images, self.batch.labels, self.batch.weights):
                tensor.record_stream(stream)  # the allocator must not reuse it before that stream has read it
        return self.batch

    def wait(self) -> None:
        """Returns when the source may be overwritten."""
        if self.done:
            self.done.synchronize()


class Transfer:
    """Starts copies to `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's stub

    def start(self, batch: Batch) -> Copy:
        """Queues the copy; the source must not change before `Copy.wait` returns."""
        if self._stream is None:
            return Copy(batch)
        with torch.cuda.stream(self._stream):
            # the images last: only they are in pinned memory, the others' copies would wait for theirs
            labels, weights, images = (
                tensor.to(self.device, non_blocking=True) for tensor in (batch.labels, batch.weights, batch.images)
            )
        copied = replace(batch, images=images, labels=labels, weights=weights)
        return Copy(copied, self._stream.record_event())
