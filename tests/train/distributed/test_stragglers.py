"""The rule that detects slow ranks, for arbitrary figures (train/stragglers.py)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import spectral_norm

from train.config import Config
from train.distributed import ddp
from train.distributed.world import World
from train.experiments.syncbn import SyncBatchNorm
from train.precision import choose_precision
from train.stragglers import KINDS, RATIO, SLOWEST, WINDOW, Own, Stragglers, persistent, slowest

SECONDS = 10.0
parts = st.tuples(*[st.floats(0.05, 5.0)] * len(KINDS))


def even(ranks: int = 4, slow: dict[int, tuple[float, float, float]] | None = None) -> list[tuple[float, float, float]]:
    """Every rank waits 0.5 s and computes for 2 s; `slow`: additional times of slow ranks."""
    more = slow or {}
    return [(0.5 + a, 0.0 + b, 2.0 + c) for a, b, c in (more.get(rank, (0.0, 0.0, 0.0)) for rank in range(ranks))]


def after(intervals: Sequence[Own], nodes: int = 4) -> Stragglers:
    seen = Stragglers([f"gpu-{name}" for name in "abcdefgh"[:nodes]])
    for own in [even(nodes), *intervals]:  # the first one does not count
        seen.add(own, SECONDS)
    return seen


@pytest.mark.parametrize(
    ("more", "kind"), [((1.0, 0.0, 0.1), "data wait"), ((0.0, 1.0, 0.0), "transfer"), ((0.2, 0.0, 0.9), "forward pass")]
)
def test_a_slow_rank_is_named_with_node_ratio_and_kind(more: tuple[float, float, float], kind: str) -> None:
    seen = after([even(slow={2: more})] * SLOWEST)
    assert seen.now is not None
    ratio = f"{1 + sum(more) / 2.5:.2f}x the median"
    assert seen.name(seen.now) == f"rank 2 on gpu-c is slow: its work takes {ratio}, mostly its {kind}"
    assert after([even(slow={2: more})] * (SLOWEST - 1)).now is None
    assert seen.conclusion().startswith("rank 2 on gpu-c is slow: ")
    assert seen.conclusion().endswith(", at the end of 1 of 6 intervals")


def test_the_first_interval_does_not_count() -> None:
    """It compiles, reads ahead, and chooses kernels."""
    seen = Stragglers(["a", "b"])
    seen.add([(100.0, 0.0, 0.0), (1.0, 0.0, 0.0)], SECONDS)
    for _ in range(WINDOW):
        seen.add([(1.01, 0.0, 0.0), (1.0, 0.0, 0.0)], SECONDS)
    assert seen.now is None


def test_a_rank_that_recovers_is_no_longer_reported_except_in_the_summary() -> None:
    seen = after([even(slow={1: (1.0, 0.0, 0.0)})] * 8 + [even(slow={3: (0.01, 0.0, 0.0)})] * 8)
    assert seen.now is None
    assert "rank 1 on gpu-b" in seen.conclusion()


def test_of_two_ranks_not_both_are_slow() -> None:
    slow = [even(2, slow={turn // 10 % 2: (2.0, 0.0, 0.0)}) for turn in range(40)]
    seen = after(slow, 2)
    assert seen.conclusion() == (
        "no rank is slow in the whole run: it was rank 0 in 11 and rank 1 in 9 of 40 intervals, by turns"
    )
    assert after(slow[:10], 2).conclusion().startswith("rank 0 on gpu-a is slow: ")


def test_slowness_that_changes_ranks_is_not_reported() -> None:
    seen = after([even(slow={turn % 4: (1.0, 0.0, 0.0)}) for turn in range(20)])
    assert seen.now is None
    assert seen.conclusion() == (
        "the slowest rank takes 1.40x the median in 20 of 20 intervals, but it is not always the same rank: "
        "the data loader or the collective is the bottleneck"
    )
    few = after([even(slow={turn % 4: (1.0, 0.0, 0.0)}) for turn in range(WINDOW - 1)])
    assert few.conclusion() == "", "too few intervals to say so"


def test_equally_fast_ranks() -> None:
    seen = after([even()] * 20)
    assert (seen.now, seen.conclusion()) == (None, "")


def test_a_few_microseconds_do_not_count() -> None:
    """With --headspace and synchronised batch norm hardly anything is measured."""
    seen = after([[(1e-5, 0.0, 0.0), (1e-5, 0.0, 0.0), (9e-5, 0.0, 0.0), (1e-5, 0.0, 0.0)]] * 20)
    assert (seen.now, seen.conclusion()) == (None, "")


@pytest.mark.parametrize("nodes", [0, 1])
def test_a_single_rank_is_never_slow(nodes: int) -> None:
    seen = Stragglers(["a"] * nodes)
    for _ in range(20):
        seen.add([(1.0, 0.0, 2.0)], SECONDS)
    assert (seen.now, seen.last, seen.conclusion()) == (None, None, "")


def test_ranks_that_did_nothing() -> None:
    assert slowest([(0.0, 0.0, 0.0)] * 3) is None
    assert after([[(0.0, 0.0, 0.0)] * 4] * 10).now is None


@given(st.integers(2, 6).flatmap(lambda n: st.lists(st.lists(parts, min_size=n, max_size=n), max_size=WINDOW)))
def test_the_rule(window: list[list[tuple[float, float, float]]]) -> None:
    """As in the documentation, computed in another way."""
    named = persistent(window, [SECONDS] * len(window))
    ranks = range(len(window[0]) if window else 0)
    means = [sum(sum(own[rank]) for own in window) / len(window) for rank in ranks]
    ordered = sorted(means)
    half = len(ordered) // 2
    expected = None
    for rank in ranks:
        times = sum([*map(sum, own)].index(max(map(sum, own))) == rank for own in window)  # the first of equal ones
        middle = (ordered[half] + ordered[-half - 1]) / 2
        close = abs(means[rank] / middle - RATIO) < 1e-9 or abs(means[rank] - middle - SECONDS / 100) < 1e-9
        if times >= SLOWEST and means[rank] == ordered[-1] and means[rank] >= RATIO * middle:
            if close or (len(ordered) > 1 and ordered[-1] - ordered[-2] < 1e-9):
                return
            expected = rank if means[rank] - middle >= SECONDS / 100 else None
    assert (named.rank if named else None) == expected


@given(st.lists(parts, min_size=2, max_size=8), st.randoms())
def test_the_order_of_ranks_does_not_matter(own: list[tuple[float, float, float]], random: object) -> None:
    order = list(range(len(own)))
    random.shuffle(order)  # type: ignore[attr-defined]
    ours, theirs = slowest(own), slowest([own[index] for index in order])
    assert ours is not None
    assert theirs is not None
    assert theirs.ratio == pytest.approx(ours.ratio)
    assert sum(own[order[theirs.rank]]) == pytest.approx(sum(own[ours.rank]))


@pytest.mark.parametrize(
    ("layer", "waits"),
    [
        (nn.BatchNorm2d(3), False),
        (nn.SyncBatchNorm(3), True),
        (SyncBatchNorm(3), True),
        (spectral_norm(nn.Conv2d(3, 3, 1)), True),  # DDP sends its buffers before the forward pass
    ],
)
def test_a_forward_pass_that_waits_for_other_ranks_does_not_count(layer: nn.Module, waits: bool) -> None:
    config, world = Config(data=""), World(0, 1, 0, 1, torch.device("cpu"), "none")
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 2))
    assert ddp.make_step(config, world, choose_precision(config, world.device), model).forward_waits is waits
