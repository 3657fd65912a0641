"""Every rate equals its formula and torch's scheduler."""

from typing import Any

import pytest
import torch

from train.config import Config
from train.schedule import OneCycle, make_schedule, momentum_at, peak_rate, scaled_for_sgd


@pytest.mark.parametrize("total", [5, 10, 101, 5006])
@pytest.mark.parametrize(("peak", "warmup", "div", "final"), [(1.0, 0.3, 25.0, 1e4), (0.2, 0.5, 10.0, 100.0)])
def test_onecycle_equals_torchs(total: int, peak: float, warmup: float, div: float, final: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    oracle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        peak,
        total_steps=total,
        pct_start=warmup,
        div_factor=div,
        final_div_factor=final,
        cycle_momentum=False,
    )
    ours = OneCycle(peak, total, warmup, div, final)
    for step in range(total):
        assert ours(step) == pytest.approx(oracle.get_last_lr()[0], rel=0, abs=1e-12)
        optimizer.step()
        if step + 1 < total:
            oracle.step()


@pytest.mark.parametrize(("total", "warmup"), [(5, 0.3), (101, 0.3), (5006, 0.5)])
def test_the_cycled_momentum_equals_torchs(total: int, warmup: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    oracle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=total, pct_start=warmup)
    config = Config(data="", cycle_momentum=True, warmup=warmup)
    for step in range(total):
        assert momentum_at(config, step, total) == pytest.approx(optimizer.param_groups[0]["momentum"], abs=1e-12)
        optimizer.step()
        if step + 1 < total:
            oracle.step()
    assert momentum_at(Config(data=""), 0, total) is None


def test_the_rate_stays_constant_past_the_end() -> None:
    schedule = OneCycle(1.0, 10)
    assert schedule(10) == schedule(9) == pytest.approx(1 / 25 / 1e4)
    for name in ("cosine", "linear"):
        falling = make_schedule(Config(data="", schedule=name), 256, 10)
        assert falling(99) == falling(10) == pytest.approx(0, abs=1e-12)


def test_a_run_can_be_extended_unlike_with_torchs_scheduler_state() -> None:
    """Why a checkpoint stores only the step: OneCycleLR's state restores the old total number of steps."""

    def torch_s(total: int) -> torch.optim.lr_scheduler.OneCycleLR:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=total)

    first, second = torch_s(10), torch_s(20)
    second.load_state_dict(first.state_dict())
    for _ in range(10):
        second.optimizer.step()
        second.step()
    with pytest.raises(ValueError, match="total steps"):
        second.step()
    assert OneCycle(1.0, 20)(10) > OneCycle(1.0, 10)(10)


@pytest.mark.parametrize("warmup", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("total", [1, 2, 3])
def test_the_shortest_runs_have_a_rate(total: int, warmup: float) -> None:
    schedule = OneCycle(1.0, total, warmup)
    assert all(0 < schedule(step) <= 1 for step in range(total + 2))


def test_cosine_with_warm_up_gives_the_published_rates() -> None:
    config = Config(data="", schedule="cosine", lr=0.1, warmup=0.05)
    rate = make_schedule(config, global_batch=2048, total=100)
    expected = {0: 0.16, 4: 0.8, 5: 0.8, 52: 0.406614, 53: 0.393386, 99: 0.000219}
    assert {step: round(rate(step), 6) for step in expected} == expected


def test_the_linear_schedule_rises_and_falls_linearly() -> None:
    config = Config(data="", schedule="linear", lr=1.0, warmup=0.25, lr_scaling="none")
    rate = make_schedule(config, global_batch=64, total=8)
    assert [rate(step) for step in range(9)] == pytest.approx([0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])


def test_multistep_drops_at_its_milestones() -> None:
    config = Config(data="", schedule="multistep", lr=1.0, warmup=0.0, lr_scaling="none", milestones=(0.5, 0.8))
    rate = make_schedule(config, global_batch=64, total=10)
    assert [rate(step) for step in range(10)] == pytest.approx([1] * 5 + [0.1] * 3 + [0.01] * 2)


@pytest.mark.parametrize(("scaling", "peak"), [("linear", 2.0), ("sqrt", 2.0**0.5), ("none", 1.0)])
def test_the_peak_scales_with_the_global_batch(scaling: str, peak: float) -> None:
    assert peak_rate(Config(data="", lr=1.0, lr_scaling=scaling), global_batch=512) == peak


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "--lr 0.001 is scaled linearly to 0.004 for the global batch of 1024, which is for sgd; for adamw"),
        ({"optimizer": "muon"}, "for muon --lr-scaling sqrt or none is usual"),
        ({"optimizer": "lars"}, ""),
        ({"lr_scaling": "sqrt"}, ""),
        ({"lr_reference_batch": 1024}, ""),
    ],
)
def test_a_rate_of_adam_that_is_scaled_linearly_is_said(options: dict[str, Any], said: str) -> None:
    found = scaled_for_sgd(Config(**{"data": "", "optimizer": "adamw", "lr": 0.001} | options), 1024)
    assert said in found
    assert bool(said) == bool(found)


def test_a_warm_up_starts_at_the_given_fraction() -> None:
    """As torch's LinearLR, if it is stepped after every update."""
    config = Config(data="", schedule="cosine", lr=0.5, warmup=0.1, warmup_start=0.01)
    rate = make_schedule(config, 256, 1000)
    parameter = torch.nn.Parameter(torch.zeros(1))
    theirs = torch.optim.lr_scheduler.LinearLR(torch.optim.SGD([parameter], lr=0.5), 0.01, 1.0, 100)
    for step in range(100):
        assert rate(step) == pytest.approx(theirs.get_last_lr()[0])
        theirs.optimizer.step()
        theirs.step()
    assert rate(100) == pytest.approx(0.5)
