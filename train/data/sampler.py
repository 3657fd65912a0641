"""Sample order and random numbers per sample, as pure functions of seed, epoch and global sample index.

Without state, a resumed run gets the same samples with the same augmentation, even with another number of ranks.
The order is an argsort of 64-bit hashes, so it does not depend on library versions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014, figure 17): a bijection that avalanches."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def fold(*parts: int) -> int:
    """Hash several numbers, in order, into one 64-bit number, such as a seed from (seed, epoch, step, rank)."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = _mix((state + _GOLDEN) ^ _mix(np.array([part & 0xFFFFFFFFFFFFFFFF], np.uint64) + _GOLDEN))
    return int(state[0])


def order(seed: int, epoch: int, count: int, repeats: int = 1, batch: int = 1) -> Indices:
    """Return the permutation of `count` samples for one epoch.

    Repeated augmentation (Hoffer et al., arXiv 1901.09335): the first 1/repeats of it, each sample `repeats` times in
    one batch. Copy c of a sample has its index + c x `count`, and so separate random numbers. The copies are spread
    over the batch, so that they are on different ranks and mixup does not mix an image with itself.
    """
    keys = _mix(np.arange(count, dtype=np.uint64) * _GOLDEN + np.uint64(fold(seed, epoch)))
    permutation = np.argsort(keys, kind="stable").astype(np.int64)
    position = np.arange(count)
    copied: Indices = permutation[position // repeats] + position % repeats * count
    return copied[np.lexsort((position % repeats, position // batch))] if repeats > 1 else permutation


def uniforms(seed: int, epoch: int, indices: Indices, count: int) -> NDArray[np.float64]:
    """Return (len(indices), count) numbers in [0, 1), one row per sample."""
    rows = _mix(indices.astype(np.uint64) * _GOLDEN + np.uint64(fold(seed, epoch, 1)))
    table = _mix(rows[:, None] + np.arange(1, count + 1, dtype=np.uint64)[None, :] * _GOLDEN)
    numbers: NDArray[np.float64] = (table >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def steps_per_epoch(count: int, global_batch: int, keep_last: bool) -> int:
    """Return the number of batches per epoch, including the last, smaller one if it is kept."""
    return -(-count // global_batch) if keep_last else count // global_batch


def bounds(count: int, sizes: Sequence[int]) -> list[int]:
    """Return where the pieces of `count` items begin, and the end of the last: one per rank, in proportion to `sizes`.

    A piece may be empty. With equal sizes, pieces differ by at most one.
    """
    if len(set(sizes)) == 1:
        base, extra = divmod(count, len(sizes))
        return [rank * base + min(rank, extra) for rank in range(len(sizes) + 1)]
    return [count * before // sum(sizes) for before in itertools.accumulate(sizes, initial=0)]


def training_batch(permutation: Indices, step: int, global_batch: int, sizes: Sequence[int]) -> list[Indices]:
    """Return each rank's samples in one step of an epoch, in proportion to the ranks' `sizes`."""
    batch = permutation[step * global_batch : (step + 1) * global_batch]
    return [batch[start:end] for start, end in itertools.pairwise(bounds(len(batch), sizes))]


def validation_shares(count: int, sizes: Sequence[int]) -> list[Indices]:
    """Return each rank's validation samples: disjoint and unpadded, in proportion to the ranks' batch `sizes`.

    With equal sizes, shards of ceil(count / ranks); the last may be empty.
    """
    shard = -(-count // len(sizes))
    equal = [min(rank * shard, count) for rank in range(len(sizes) + 1)]
    ends = equal if len(set(sizes)) == 1 else bounds(count, sizes)
    return [np.arange(start, end, dtype=np.int64) for start, end in itertools.pairwise(ends)]
