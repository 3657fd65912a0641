"""The order of samples and their random numbers depend only on seed, epoch and index."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from train.data import sampler

sizes, worlds = st.integers(1, 300), st.integers(1, 9)


@given(sizes, st.integers(0, 2**63), st.integers(0, 500))
def test_an_epoch_visits_every_image_once(count: int, seed: int, epoch: int) -> None:
    assert sorted(sampler.order(seed, epoch, count)) == list(range(count))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(sampler.order(seed, epoch, 50)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_order_does_not_depend_on_library_versions() -> None:
    """A checkpoint of an older version continues with the same images."""
    assert sampler.order(7, 3, 8).tolist() == [0, 3, 7, 2, 6, 5, 1, 4]
    assert sampler.uniforms(7, 3, np.array([5]), 2).tolist() == [[0.04575437527569526, 0.2410506905687938]]


@given(sizes, st.integers(1, 64), worlds)
def test_ranks_split_a_global_batch_without_gap_or_overlap(count: int, batch: int, world: int) -> None:
    order = sampler.order(0, 0, count)
    seen: list[int] = []
    for step in range(sampler.steps_per_epoch(count, batch, keep_last=True)):
        pieces = sampler.training_batch(order, step, batch, [batch] * world)
        assert len(pieces) == world
        assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
        seen += [int(index) for indices in pieces for index in indices]
    assert seen == order.tolist()


@given(sizes, st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_unequal_ranks_split_it_in_proportion(count: int, batches: list[int]) -> None:
    order, whole, seen = sampler.order(0, 0, count), sum(batches), list[int]()
    for step in range(sampler.steps_per_epoch(count, whole, keep_last=True)):
        pieces = sampler.training_batch(order, step, whole, batches)
        total = sum(map(len, pieces))
        assert all(abs(len(piece) - total * own / whole) <= 1 for piece, own in zip(pieces, batches, strict=True))
        assert total < whole or list(map(len, pieces)) == batches
        seen += [int(index) for indices in pieces for index in indices]
    assert seen == order.tolist()


@given(st.integers(0, 300), st.one_of(worlds.map(lambda world: [7] * world), st.lists(st.integers(1, 40), min_size=1)))
def test_validation_shards_are_a_partition(count: int, batches: list[int]) -> None:
    shares = sampler.validation_shares(count, batches)
    assert [int(index) for share in shares for index in share] == list(range(count))
    if len(set(batches)) == 1:
        assert len(shares[0]) == max(map(len, shares))


def test_random_numbers_depend_on_the_image_not_on_its_batch() -> None:
    alone = sampler.uniforms(1, 2, np.array([17]), 5)
    together = sampler.uniforms(1, 2, np.array([3, 17, 99]), 5)
    assert (alone[0] == together[1]).all()
    many = sampler.uniforms(1, 2, np.arange(20000), 3)
    assert many.min() >= 0
    assert many.max() < 1
    assert np.abs(many.mean(0) - 0.5).max() < 0.01
    assert np.abs(np.corrcoef(many.T) - np.eye(3)).max() < 0.03
