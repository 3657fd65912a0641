"""`launcher doctor --bench`: collecting data from the nodes."""

# ruff: noqa: SLF001 - tests how nodes are followed, without a benchmark of minutes
from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import launcher
from launcher.errors import NodeUnfit, NodeUnreachable
from launcher.features.bench import run
from launcher.features.bench.health import measures
from launcher.features.bench.health.gpu import GpuState, Process
from launcher.features.bench.health.machine import MachineState
from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.facts import Gpu
from launcher.node.files import Span
from launcher.node.process.engine import ProcessEngine

ENDED = ContainerState("c", "c", "", {}, Phase.EXITED, exit_code=0)


class Engine:
    """Does not respond to the first queries, or to any."""

    def __init__(self, silent: int) -> None:
        self.node, self.host, self.files, self._silent = "gpu-a", "gpu-a", self, silent

    def wait(self, container: str, timeout: float) -> ContainerState:
        self._silent -= 1
        if self._silent >= 0:
            raise NodeUnreachable("node gpu-a", "no answer")
        return ENDED

    def read_spans(self, spans: Sequence[Span], *, below: str) -> Generator[tuple[Span, bytes], None, None]:
        (log,) = spans
        yield from ((log, piece) for piece in (b"all ", b"output") if not log.offset)


@pytest.mark.parametrize(("silent", "ended"), [(2, True), (10**6, False)])
def test_a_node_that_misses_one_or_two_queries_is_not_lost(
    silent: int, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_POLL", 0.3)
    monkeypatch.setattr(run, "_SILENT", 2.0)
    container = SimpleNamespace(output_dir="/output", name="c")
    plan: Any = SimpleNamespace(node_plan=lambda _: SimpleNamespace(container=container, node="gpu-a", rank=0))
    fleet: Any = SimpleNamespace(engines=[Engine(silent)])
    observed = run._Observed(MachineState())
    run._follow(fleet, plan, {"gpu-a": observed}, 20)
    assert observed.ended is ended
    assert observed.text == (b"all output" if ended else b"")
    assert observed.problem == ("" if ended else "no answer")


@pytest.mark.parametrize(("purpose", "phase"), [("bench", Phase.RUNNING), ("run", Phase.RUNNING), ("", Phase.EXITED)])
def test_a_node_is_in_use_by_a_run_or_by_another_doctor(
    purpose: str, phase: Phase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    marks = {labels.RUN: "job-1", labels.PURPOSE: purpose or "bench", labels.OWNER: "ada@laptop"}
    state = ContainerState("c", "c", "", marks, phase, None)

    class Used(ProcessEngine):
        def list(self, labels: Mapping[str, str | None]) -> Sequence[ContainerState]:
            return [state] if labels.items() <= {**marks, "launcher.run": None}.items() else []

    job = launcher.load({"name": "a", "runtime": "process", "nodes": ["local"], "run": {"command": ["true"]}})
    engine = Used("local")
    if not purpose:
        assert run._idle(job, engine)[0].name == "local"
        return
    with pytest.raises(NodeUnfit) as refused:
        run._idle(job, engine)
    assert refused.value.what in (
        "in use: `doctor --bench` of ada@laptop is measuring it",
        "in use: run job-1 is running there",
    )


def test_processes_on_a_gpu_that_is_not_measured_are_not_reported() -> None:
    users = (Process(42, "python3", 9000),)
    states = tuple(GpuState(index, f"GPU-{index}", processes=users) for index in range(2))
    node: Any = SimpleNamespace(gpus=tuple(Gpu(index, f"GPU-{index}", "", 0, "") for index in range(2)))
    observed = {"gpu-a": run._Observed(MachineState(gpus=states))}
    (found,) = run._problems(observed, {"gpu-a": (node, ("GPU-1",))})
    assert (found.part, found.what) == ("GPU 1", "in use by python3 (pid 42, 9000 MiB)")
    assert run._problems(observed, {"gpu-a": (node, ())}) == []


@pytest.mark.parametrize("value", ["9" * 400, "NaN", "1e999", '"x"', "[1]", "[" * 5000, "null"], ids=range(7))
def test_a_node_may_print_any_measurement(value: str) -> None:
    printed = f'{measures.MARK}{{"kind": "read", "part": "/d", "value": {value}, "again": {value}}}\n'
    assert measures.read("gpu-a", ["gpu-a"], printed, {}).measures == ()
