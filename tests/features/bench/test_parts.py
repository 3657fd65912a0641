"""What `launcher doctor --bench` measures on a node: the precision of a GPU, and a CPU with a quota."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launcher.features.bench.container_scripts import bench_parts


@pytest.mark.parametrize(
    ("wanted", "capability", "expected"),
    [("bf16", (7, 0), "fp16"), ("bf16", (7, 5), "fp16"), ("bf16", (8, 0), "bf16"), ("none", (7, 0), "none")],
)
def test_bf16_is_not_measured_if_it_is_emulated(wanted: str, capability: tuple[int, int], expected: str) -> None:
    assert bench_parts.computed_in(wanted, capability) == expected


class Quota:
    """The clock of a container with 0.4 CPUs: after 40 ms of work it pauses until the next period of 100 ms."""

    def __init__(self, now: float) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def work(self, *_: Any, **__: Any) -> None:
        self.now += 0.003
        if self.now % 0.1 > 0.04:
            self.now += 0.1 - self.now % 0.1


@pytest.mark.parametrize("phase", [0.0, 0.02, 0.035, 0.037, 0.039])
def test_a_processor_with_a_quota_is_measured_at_the_quota(monkeypatch: pytest.MonkeyPatch, phase: float) -> None:
    clock, measures = Quota(1000.0 + phase), []
    monkeypatch.setattr(bench_parts, "time", clock)
    monkeypatch.setattr(torch, "mm", clock.work)
    monkeypatch.setattr(torch.Tensor, "copy_", clock.work)
    bench_parts.processor(4.0, lambda **measure: measures.append(measure))
    matmul, memory = (measure["value"] for measure in measures)
    # 14 operations in 100 ms
    assert matmul == pytest.approx(2 * 768**3 * 140 / 1e9, rel=0.05)
    assert memory == pytest.approx(8 * (16 << 20) * 140 / 1e9, rel=0.05)
