"""What a run measured, from the lines of its metrics.jsonl."""

from typing import Any

import pytest

from launcher.errors import RunUnknown
from launcher.features.compare.measured import measure, steady_rate


def lines(rate: float, world: int, batch: int, start: float = 0.0) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl: one slow interval, then three at `rate`."""
    head = {"kind": "start", "time": start, "world": world, "global_batch": batch, "arch": "x", "step": 0, "config": {}}
    steps = [
        {
            "kind": "step",
            "time": start + i,
            "step": 10 * i,
            "images_per_s": rate / (9 if i == 1 else 1),
            "loss": 3 - i / 9,
        }
        for i in range(1, 5)
    ]
    epoch = {"kind": "epoch", "time": start + 5, "epoch": 1, "train": {"top1": 61.5}, "val": {"top1": 60.25}}
    epoch |= {"memory_mb": 82.772}
    return [head, *steps, epoch, {"kind": "end", "time": start + 5, "top1": 60.25, "seconds": 5.0}]


def test_the_rate_excludes_the_first_interval_of_each_start() -> None:
    once = lines(100.0, 2, 32)
    assert steady_rate(once) == pytest.approx(100)
    assert steady_rate(once[:2]) == pytest.approx(100 / 9)  # the only interval


def test_the_rate_excludes_intervals_that_compile() -> None:
    slow = {"kind": "step", "time": 5.0, "step": 50, "images_per_s": 1.0, "loss": 2.0, "compiled": True}
    assert steady_rate([*lines(100.0, 2, 32), slow]) == pytest.approx(100)


def test_a_resumed_run_counts_as_one_run() -> None:
    first, second = lines(100.0, 2, 32)[:4], lines(100.0, 2, 32, start=1000.0)
    run = measure([*first, *second], "r", "r")
    assert run.images_per_s == pytest.approx(100)
    assert [time for time, _ in run.losses] == [1, 2, 3, 4, 5, 6, 7]
    assert (run.method, run.devices, run.batch, run.accuracy, run.train_accuracy) == ("ddp", 2, 32, 60.25, 61.5)


def test_a_run_without_a_step_is_refused() -> None:
    with pytest.raises(RunUnknown, match="has no training step"):
        measure(lines(1.0, 1, 1)[:1], "r", "r")
