"""Repeat one batch on the device, to measure the training speed without data loading (`--headspace`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from train.data.batch import Batch, Request
from train.data.loader import Loader
from train.data.source import Dataset, Pixels

SYNTHETIC_CLASSES, SYNTHETIC_VALIDATION = 1000, 1000


class Repeated:
    """Loads one batch, keeps it on the device and repeats it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._kept: Batch | None = None

    def batches(self, requests: Iterable[Request], epoch: int) -> Iterator[Batch]:
        """Yield one batch per request, of the requested size and the epoch's side."""
        side = self._loader.side(epoch)
        for request in requests:
            kept, n = self._kept, len(request.indices)
            if kept is None or n > len(kept.labels) or kept.images.shape[1] != side:
                first = next(self._loader.batches([replace(request, filler=0)], epoch))
                images, labels, weights = first.images.clone(), first.labels.clone(), first.weights.clone()
                kept = self._kept = Batch(images, labels, weights, request.total, request.last)
            weights = kept.weights[:n]
            if request.filler:
                weights = weights.clone()
                weights[n - request.filler :] = 0
            yield Batch(kept.images[:n], kept.labels[:n], weights, request.total, request.last)

    def skipped(self) -> int:
        return self._loader.skipped()

    def close(self) -> None:
        self._loader.close()


@dataclass(frozen=True)
class NoiseSource:
    """Images of random noise: a synthetic data set."""

    side: int
    labels: NDArray[np.int64]
    files = ()
    sizes = checksums = None

    def name(self, index: int) -> str:
        """Return a name that marks the image as synthetic."""
        return f"synthetic#{index}"

    def read(self, index: int) -> Pixels:
        """Return random pixels, with the index as the seed."""
        return np.random.default_rng(index).integers(0, 256, (self.side, self.side, 3), np.uint8)

    def place(self, index: int) -> None:
        """Nowhere."""


def synthetic(images: int, side: int) -> Dataset:
    """Return a data set with `images` training images of at most a thousand classes."""
    classes = min(SYNTHETIC_CLASSES, images)
    train, val = (np.arange(count, dtype=np.int64) % classes for count in (images, min(images, SYNTHETIC_VALIDATION)))
    return Dataset([str(number) for number in range(classes)], NoiseSource(side, train), NoiseSource(side, val))
