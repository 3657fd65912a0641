"""`launcher doctor --bench`: how the nodes are followed, and in what precision a GPU is measured."""

# ruff: noqa: SLF001 - how nodes are followed, without the minutes that a bench takes
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from launcher.container_scripts.bench_parts import computed_in
from launcher.errors import NodeUnreachable
from launcher.health.gpu import GpuState, Process
from launcher.health.machine import MachineState
from launcher.model.container import ContainerState, Phase
from launcher.model.facts import Gpu
from launcher.run import bench

ENDED = ContainerState("c", "c", "", {}, Phase.EXITED, exit_code=0)


class Engine:
    """Does not answer at first, or never."""

    def __init__(self, silent: int) -> None:
        self.node, self.files, self._silent = "gpu-a", self, silent

    def wait(self, container: str, timeout: float) -> ContainerState:
        self._silent -= 1
        if self._silent >= 0:
            raise NodeUnreachable("node gpu-a", "no answer")
        return ENDED

    def read(self, path: str, offset: int) -> bytes:
        return b"" if offset else b"all that it said"


@pytest.mark.parametrize(("silent", "ended"), [(2, True), (10**6, False)])
def test_a_node_that_misses_a_question_or_two_is_not_lost(
    silent: int, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_POLL", 0.3)
    monkeypatch.setattr(bench, "_SILENT", 2.0)
    container = SimpleNamespace(output_dir="/output", name="c")
    plan: Any = SimpleNamespace(on=lambda _: SimpleNamespace(container=container, node="gpu-a", rank=0))
    fleet: Any = SimpleNamespace(engines=[Engine(silent)])
    heard = bench._Heard(MachineState())
    bench._follow(fleet, plan, {"gpu-a": heard}, 20)
    assert heard.ended is ended
    assert heard.text == (b"all that it said" if ended else b"")
    assert heard.problem == ("" if ended else "no answer")


@pytest.mark.parametrize(
    ("wanted", "capability", "expected"),
    [("bf16", (7, 0), "fp16"), ("bf16", (7, 5), "fp16"), ("bf16", (8, 0), "bf16"), ("none", (7, 0), "none")],
)
def test_bf16_is_not_measured_where_it_is_emulated(wanted: str, capability: tuple[int, int], expected: str) -> None:
    assert computed_in(wanted, capability) == expected


def test_who_uses_a_gpu_that_is_not_measured_is_no_fault() -> None:
    users = (Process(42, "python3", 9000),)
    states = tuple(GpuState(index, f"GPU-{index}", processes=users) for index in range(2))
    node: Any = SimpleNamespace(gpus=tuple(Gpu(index, f"GPU-{index}", "", 0, "") for index in range(2)))
    heard = {"gpu-a": bench._Heard(MachineState(gpus=states))}
    (found,) = bench._troubles(heard, {"gpu-a": (node, ("GPU-1",))})
    assert (found.part, found.what) == ("GPU 1", "in use by python3 (pid 42, 9000 MiB)")
    assert bench._troubles(heard, {"gpu-a": (node, ())}) == []
