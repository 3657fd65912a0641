"""The planner against the published figures, invalid plans, and the fit of costs."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.errors import TrainError
from train.experiments.dual_batch import cli
from train.experiments.dual_batch.fit import Timing, fit
from train.experiments.dual_batch.plan import Cost, DualBatchPlan, plan_dual_batch

PUBLISHED = Cost(0.00022595, 0.006233854698278141)


def published(workers: int, small: int, ratio: float = 1.05) -> DualBatchPlan:
    return plan_dual_batch(workers, small, 50_000, 1000, ratio, [PUBLISHED])


@pytest.mark.parametrize(
    ("workers", "batches"), [(6, [62, 138, 203, 258, 307, 349]), (5, [79, 165, 237, 297, 349])], ids=["six", "five"]
)
def test_published_small_batches(workers: int, batches: list[int]) -> None:
    assert [published(workers, small).to_dict()["batch_small"] for small in range(1, workers + 1)] == batches


def test_published_split_and_factor() -> None:
    plan = published(6, 3)
    assert plan.to_dict() == {
        "batch_small": 203,
        "batch_large": 1000,
        "samples_small": 7916,
        "samples_large": 8750,
        "factor": 7916 / 8750,
    }


def test_factor_of_the_merge_figures() -> None:
    """f = 8750/13750, used in the tests of merges, is the plan for 4 workers, one of them small, at ratio 1.1."""
    plan = published(4, 1, 1.1)
    assert (plan.shares[0].samples, plan.shares[1].samples) == (8750, 13750)
    assert plan.shares[0].factor == 8750 / 13750


def test_the_follow_up_rounds_where_the_paper_truncates(capsys: pytest.CaptureFixture[str]) -> None:
    """6 workers, 4 small: d_L = 8750, d_S = 8125 in both; 258.6 samples per batch become 258 and 259."""
    options = "--workers 6 --small 4 --samples 50000 --base-batch 1000 --ratio 1.05 --a 0.00022595"
    found = {}
    for variant in ("published", "follow_up"):
        cli.main(["plan", *options.split(), "--b", str(PUBLISHED.b), "--json", "--variant", variant])
        found[variant] = json.loads(capsys.readouterr().out)
    exact = PUBLISHED.b / (1.05 * published(6, 4).seconds / 1.05 / 8125 - PUBLISHED.a)
    assert (found["published"]["batch_small"], found["follow_up"]["batch_small"]) == (int(exact), round(exact))
    assert found["published"]["samples_small"] == found["follow_up"]["samples_small"] == 8125


def test_the_command_prints_json() -> None:
    options = "--workers 6 --small 1 --samples 50000 --base-batch 1000 --ratio 1.05 --a 0.00022595"
    command = ["-m", "train", "dual-batch", "plan", *options.split(), "--b", str(PUBLISHED.b), "--json"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, check=True)
    plan = json.loads(done.stdout)
    assert set(plan) == {"batch_small", "batch_large", "samples_small", "samples_large", "factor"}
    assert (plan["batch_small"], plan["samples_small"], plan["factor"]) == (62, 6250, 6250 / 8750)


def test_an_invalid_plan_is_one_line_and_exit_2() -> None:
    options = "--workers 6 --small 1 --samples 50000 --base-batch 1000 --ratio 1 --a 1 --b 1"
    command = ["-m", "train", "dual-batch", "plan", *options.split()]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("train: error: ratio 1.0: must be greater than 1")
    assert done.stderr.count("\n") == 1


def test_without_small_workers_any_ratio_is_valid() -> None:
    plan = published(4, 0, 1.0)
    assert [share.samples for share in plan.shares] == [12_500] * 4
    assert plan.to_dict()["factor"] == 1.0


@pytest.mark.parametrize(
    ("workers", "small", "ratio", "why"),
    [
        (6, 1, 1.0, "must be greater than 1"),
        (6, 2, 0.9, "must be greater than 1"),
        (6, 1, 1.2, "large workers take all"),
        (2, 1, 2.5, "large workers take all"),
        (6, 7, 1.05, "0 to 6"),
        (6, -1, 1.05, "0 to 6"),
        (0, 0, 1.05, "workers 0"),
        (6, 6, 1e9, "less than 1"),
        (6, 1, float("nan"), "greater than 0"),
    ],
)
def test_impossible_plans_are_refused_with_the_reason(workers: int, small: int, ratio: float, why: str) -> None:
    with pytest.raises(TrainError, match=why):
        published(workers, small, ratio)


def test_invalid_costs_are_refused() -> None:
    for costs, why in (
        ([Cost(0, 1)], "greater than 0"),
        ([Cost(1, 0)], "greater than 0"),
        ([PUBLISHED] * 2, "2 values for 6"),
    ):
        with pytest.raises(TrainError, match=why):
            plan_dual_batch(6, 1, 50_000, 1000, 1.05, costs)


@given(
    costs=st.lists(st.builds(Cost, st.floats(1e-5, 1e-2), st.floats(1e-3, 1)), min_size=2, max_size=8),
    share=st.floats(0, 1),
    ratio=st.floats(0.01, 0.99),
)
def test_workers_of_any_speed_finish_a_round_together(costs: list[Cost], share: float, ratio: float) -> None:
    """Apart from truncation, all workers take the same time, and every sample is assigned once."""
    small = round(share * len(costs))
    speeds = [1 / cost.seconds_per_sample(500) for cost in costs]
    limit = sum(speeds) / sum(speeds[small:]) if small < len(costs) else 1.5
    limit = min(limit, len(costs) / (len(costs) - small) if small < len(costs) else 1.5)
    k = 1 + (limit - 1) * ratio * 0.9 if small else 1.0
    samples = 10_000_000
    try:
        plan = plan_dual_batch(len(costs), small, samples, 500, k, costs)
    except TrainError as error:
        assert "less than 1" in str(error)  # noqa: PT017
        return
    assert abs(sum(share.samples for share in plan.shares) - samples) <= 2 * len(costs)
    for cost, part in zip(costs, plan.shares, strict=True):
        slower, faster = (cost.seconds_per_sample(part.batch + more) * part.samples for more in (0, 1))
        assert faster * (1 - 1e-3) <= plan.seconds <= slower * (1 + 1e-3)


def test_slower_workers_get_fewer_samples() -> None:
    fast, slow = PUBLISHED, Cost(PUBLISHED.a * 3, PUBLISHED.b * 3)
    plan = plan_dual_batch(4, 2, 50_000, 1000, 1.05, [fast, slow, fast, slow])
    assert plan.shares[0].samples == pytest.approx(3 * plan.shares[1].samples, rel=1e-3)
    assert plan.shares[0].batch == pytest.approx(plan.shares[1].batch, abs=1)
    assert plan.shares[0].factor == pytest.approx(plan.shares[1].factor, rel=1e-3)


def test_fit_recovers_the_costs_from_noisy_times() -> None:
    noise = np.random.default_rng(0)
    timings = [
        Timing(batch, PUBLISHED.a * batch + PUBLISHED.b + float(noise.normal(0, 1e-4))) for batch in range(20, 1001, 20)
    ]
    found = fit(timings)
    assert found.a == pytest.approx(PUBLISHED.a, rel=0.01)
    assert found.b == pytest.approx(PUBLISHED.b, rel=0.01)


def test_fit_refuses_times_that_are_not_a_rising_line() -> None:
    with pytest.raises(TrainError, match="two batch sizes"):
        fit([Timing(8, 1.0), Timing(8, 1.1)])
    with pytest.raises(TrainError, match="greater than 0"):
        fit([Timing(8, 1.0), Timing(16, 0.9)])
