"""Exact validation: every image counts exactly once on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from train.data.batch import Batch, Request
from train.data.loader import Loader
from train.data.source import Pixels
from train.distributed.world import World, broadcast_together
from train.errors import Stopped
from train.metrics import Closed, Meter, Scores, validation_indices
from train.step import Objective

SHOWN = 32  # maximum number of misclassified images to return


def evaluate(
    model: nn.Module,
    loader: Loader,
    objective: Objective,
    world: World,
    stopped: Callable[[], bool] = lambda: False,
    report: Callable[[int, int, Scores, Scores], None] = lambda *_: None,
) -> tuple[Tensor, Pixels]:
    """Return `counts` summed over all images of the loader's source and all ranks, without padding.

    Also return the first misclassified images, (n, side, side, 3), on the first rank of each machine.
    `stopped` is called before every batch, equally often on every rank. `report` is called every `--log-every` batches
    with the finished batches, their total, and the scores since the last call and overall.

    Raises:
        Stopped: `stopped` returned True.
    """
    config, count, size = objective.config, len(loader.source.labels), loader.batch_size
    if world.data_shards > 1:  # batch norm: every rank validates and saves the running statistics of rank 0
        broadcast_together(list(model.buffers()))
    mine, total = validation_indices(config.metrics, count, world, size)
    pieces = (mine[start : start + size] for start in range(0, total * size, size))
    filler = np.zeros(1, np.int64)  # equally many batches on every rank: --parallel fsdp gathers weights in each
    requests = (Request(piece, count) if len(piece) else Request(filler, count, filler=1) for piece in pieces)
    batches = loader.batches(requests, epoch=0)
    meter: Meter[int] = Meter(world)
    mistaken = Mistaken()

    def show(closed: Closed[int] | None) -> None:
        if closed:
            report(closed.what, total, Scores.of(closed.sums), Scores.of(meter.epoch))

    model.eval()
    classify = Mirrored(model) if config.val_flip else model
    for done in range(1, total + 1):
        if stopped():
            raise Stopped
        batch = next(batches)
        with torch.no_grad():  # not inference_mode: fully_shard would keep gathered weights, which cannot train
            output = objective.forward_loss(classify, batch)
        meter.add(output.counts)
        if output.logits is not None and world.local_rank == 0:
            mistaken.add(batch, output.logits)
        if done % config.log_every == 0 and done < total:
            show(meter.close(done))
    show(meter.flush())
    meter.reduce()
    return meter.epoch + meter.interval, mistaken.images(config.image_size)


class Mirrored(nn.Module):
    """Averages the logits of an image and its mirror image. Stages without logits return a token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, H, W) -> (n, classes), in at least fp32."""
        first: Tensor = self.model(images)
        wide = torch.promote_types(first.dtype, torch.float32)
        half = first.to(wide) / 2  # before the second pass: with CUDA graphs, it overwrites the result of the first
        second: Tensor = self.model(images.flip(3))
        return half + second.to(wide) / 2


class Mistaken:
    """The first SHOWN misclassified images, selected on the device so that no batch waits for it."""

    def __init__(self) -> None:
        self._images: list[Tensor] = []  # at most one tensor, at most SHOWN images
        self._wrong: list[Tensor] = []  # which of them are misclassified

    def add(self, batch: Batch, logits: Tensor) -> None:
        """Add misclassified images of this batch until there are SHOWN."""
        wrong = (logits.argmax(1) != batch.labels) & (batch.weights > 0)
        first = _first(wrong)
        images, wrong = torch.cat([*self._images, batch.images[first]]), torch.cat([*self._wrong, wrong[first]])
        first = _first(wrong)
        self._images, self._wrong = [images[first]], [wrong[first]]

    def images(self, side: int) -> Pixels:
        """(n, side, side, 3)."""
        if not self._images:
            return np.empty((0, side, side, 3), np.uint8)
        found: Pixels = self._images[0].cpu().numpy()[self._wrong[0].cpu().numpy()]
        return found


def _first(wrong: Tensor) -> Tensor:
    """Return SHOWN indices, true ones first. A boolean index would wait for the device to learn its size."""
    return wrong.to(torch.uint8).argsort(descending=True, stable=True)[:SHOWN]
