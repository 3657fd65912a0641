"""Every rate equals its formula and torch's own scheduler."""

import pytest
import torch

from train.schedule import OneCycle


@pytest.mark.parametrize("total", [5, 10, 101, 5006])
@pytest.mark.parametrize(("peak", "warmup", "div", "final"), [(1.0, 0.3, 25.0, 1e4), (0.2, 0.5, 10.0, 100.0)])
def test_onecycle_is_torch_s(total: int, peak: float, warmup: float, div: float, final: float) -> None:
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


def test_past_the_end_the_rate_stays() -> None:
    schedule = OneCycle(1.0, 10)
    assert schedule(10) == schedule(9) == pytest.approx(1 / 25 / 1e4)


@pytest.mark.parametrize("warmup", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("total", [1, 2, 3])
def test_the_shortest_runs_have_a_rate(total: int, warmup: float) -> None:
    schedule = OneCycle(1.0, total, warmup)
    assert all(0 < schedule(step) <= 1 for step in range(total + 2))
