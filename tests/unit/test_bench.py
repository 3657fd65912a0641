"""`launcher doctor --bench`: collecting data from the nodes, a GPU's precision, and a CPU with a quota."""

# ruff: noqa: SLF001 - tests how nodes are followed, without a benchmark of minutes
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launcher.container_scripts import bench_parts
from launcher.errors import NodeUnreachable
from launcher.health.gpu import GpuState, Process
from launcher.health.machine import MachineState
from launcher.model.container import ContainerState, Phase
from launcher.model.facts import Gpu
from launcher.run import bench

ENDED = ContainerState("c", "c", "", {}, Phase.EXITED, exit_code=0)


class Engine:
    """Does not respond to the first queries, or to any."""

    def __init__(self, silent: int) -> None:
        self.node, self.files, self._silent = "gpu-a", self, silent

    def wait(self, container: str, timeout: float) -> ContainerState:
        self._silent -= 1
        if self._silent >= 0:
            raise NodeUnreachable("node gpu-a", "no answer")
        return ENDED

    def read(self, path: str, offset: int) -> bytes:
        return b"" if offset else b"all output"


@pytest.mark.parametrize(("silent", "ended"), [(2, True), (10**6, False)])
def test_a_node_that_misses_one_or_two_queries_is_not_lost(
    silent: int, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_POLL", 0.3)
    monkeypatch.setattr(bench, "_SILENT", 2.0)
    container = SimpleNamespace(output_dir="/output", name="c")
    plan: Any = SimpleNamespace(on=lambda _: SimpleNamespace(container=container, node="gpu-a", rank=0))
    fleet: Any = SimpleNamespace(engines=[Engine(silent)])
    observed = bench._Observed(MachineState())
    bench._follow(fleet, plan, {"gpu-a": observed}, 20)
    assert observed.ended is ended
    assert observed.text == (b"all output" if ended else b"")
    assert observed.problem == ("" if ended else "no answer")


@pytest.mark.parametrize(
    ("wanted", "capability", "expected"),
    [("bf16", (7, 0), "fp16"), ("bf16", (7, 5), "fp16"), ("bf16", (8, 0), "bf16"), ("none", (7, 0), "none")],
)
def test_bf16_is_not_measured_if_it_is_emulated(wanted: str, capability: tuple[int, int], expected: str) -> None:
    assert bench_parts.computed_in(wanted, capability) == expected


def test_processes_on_a_gpu_that_is_not_measured_are_not_reported() -> None:
    users = (Process(42, "python3", 9000),)
    states = tuple(GpuState(index, f"GPU-{index}", processes=users) for index in range(2))
    node: Any = SimpleNamespace(gpus=tuple(Gpu(index, f"GPU-{index}", "", 0, "") for index in range(2)))
    observed = {"gpu-a": bench._Observed(MachineState(gpus=states))}
    (found,) = bench._problems(observed, {"gpu-a": (node, ("GPU-1",))})
    assert (found.part, found.what) == ("GPU 1", "in use by python3 (pid 42, 9000 MiB)")
    assert bench._problems(observed, {"gpu-a": (node, ())}) == []


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
