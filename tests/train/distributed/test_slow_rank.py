"""One of four ranks is slow, by its data or a CPU limit, and is reported. Slowness that changes ranks is not."""

from __future__ import annotations

import re
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.train.runs import Rank, digit_tree, finish, start
from train.stragglers import WINDOW

RANKS, PART, INTERVALS = 4, 16, 11  # the second: of a rank, in an interval
IMAGES = RANKS * PART * INTERVALS
SHARE = 0.25  # of the processor time that the other ranks get, for the rank that has little of it
ANY = "data wait|forward pass"  # its loader is slow, too
PIECE = 2_000_000  # nanoseconds of work after which it is stopped


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digit_tree(tmp_path_factory.mktemp("digits"), IMAGES, 16, across=True)


def trained(data: Path, output: Path, slow: str, seed: int = 0, throttled: int | None = None) -> Rank:
    """Rank 0 of a run of INTERVALS intervals; `throttled`: the rank with less processor time."""
    batch = 8 if throttled is None else 4  # more steps: each is stopped at moments of its own
    every = PART // batch
    options = f"--data {data} --arch smallcnn --image-size 24 --batch-size {batch} --epochs 1 --log-every {every}"
    env = {"SLOW": slow, "SEED": str(seed), "TRAINING": str(IMAGES), "IN_AN_INTERVAL": str(PART)}
    # without workers nothing is read ahead: on a busy machine slow reads could hide behind slow steps
    more = f"--lr 0.1 --workers 0 --checkpoints {output / 'checkpoints'}"
    ranks = start(
        output, RANKS, *options.split(), *more.split(), program=("-m", "tests.train.programs.slow_rank"), env=env
    )
    ended = threading.Event()
    try:
        if throttled is not None:
            ranks[0].wait_for("images to train on")  # printed before the first step
            threading.Thread(target=_throttle, args=(ranks[throttled], ended)).start()
        assert finish(ranks) == [0] * RANKS, "\n\n".join(rank.text for rank in ranks)
    finally:
        ended.set()
    return ranks[0]


def _throttle(rank: Rank, ended: threading.Event) -> None:
    """Stop the rank after each PIECE of work, like a CPU limit; waiting for data or other ranks does not count."""
    done = _work(rank)
    with suppress(OSError):  # it has ended
        while not ended.wait(PIECE / 1e9):
            before, done = done, _work(rank)
            if done - before >= PIECE:
                rank.process.send_signal(signal.SIGSTOP)
                ended.wait((done - before) / 1e9 * (1 / SHARE - 1))
                rank.process.send_signal(signal.SIGCONT)
            else:
                done = before


def _work(rank: Rank) -> int:
    """Nanoseconds in which it ran or waited for a processor: on a busy machine all ranks wait, and it is still slow."""
    ran, waited, _ = Path(f"/proc/{rank.process.pid}/schedstat").read_text().split()
    return int(ran) + int(waited)


def check_reported(first: Rank, rank: int, kind: str) -> None:
    steps = first.metrics("step")
    assert len(steps) == INTERVALS
    said = [step.get("slow", "") for step in steps[:WINDOW]]
    assert any(text.startswith(f"rank {rank} on gpu-{'abcd'[rank]} is slow: ") for text in said), [*said, first.text]
    named = next(text for text in said if text)
    assert re.search(rf"x the median, mostly its ({kind})$", named)
    assert f"train: {named}" in first.text
    end = rf"^train: rank {rank} on gpu-{'abcd'[rank]} is slow: .*, at the end of \d+ of {INTERVALS - 1} intervals"
    assert re.search(end, first.text, re.MULTILINE), first.text
    assert first.metrics("end")[-1]["slow"].startswith(f"rank {rank} on ")
    assert not any(text and not text.startswith(f"rank {rank} on ") for text in said)


def check_none_reported(first: Rank) -> None:
    assert not [step for step in first.metrics("step") if "slow" in step], first.text
    assert "the data loader or the collective is the bottleneck" in first.text
    assert first.metrics("end")[-1]["slow"].startswith("the slowest rank takes ")


@pytest.mark.ci
def test_a_rank_with_slow_data_is_named(data: Path, tmp_path: Path) -> None:
    check_reported(trained(data, tmp_path, "2"), 2, "data wait")


@pytest.mark.ci
def test_a_rank_with_little_processor_time_is_named(data: Path, tmp_path: Path) -> None:
    check_reported(trained(data, tmp_path, "none", throttled=1), 1, ANY)


@pytest.mark.ci
def test_slowness_that_changes_ranks_is_not_reported(data: Path, tmp_path: Path) -> None:
    check_none_reported(trained(data, tmp_path, "wander"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_again(data: Path, tmp_path: Path, seed: int) -> None:
    """Every kind ten times, each rank in turn, and changing ranks in another order."""
    rank = seed % RANKS
    check_reported(trained(data, tmp_path / "data", str(rank)), rank, "data wait")
    check_reported(trained(data, tmp_path / "cpu", "none", throttled=rank), rank, ANY)
    check_none_reported(trained(data, tmp_path / "wander", "wander", seed))
