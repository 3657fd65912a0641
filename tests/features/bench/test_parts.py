"""What `launcher doctor --bench` measures on a node: the precision of a GPU, and a CPU with a quota."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.features.bench.container_scripts import bench_model, bench_parts
from launcher.features.bench.health import measures
from tests.gpu import pretend
from tests.train.runs import digit_tree

SCRIPTS = Path(bench_parts.__file__).parent
ROOT = SCRIPTS.parents[3]


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


@pytest.mark.ci
def test_the_trainers_model_is_a_program_with_its_reason_on_its_last_line() -> None:
    """The launcher's own package `train` is beside it, as in the container."""

    def measured(*options: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, str(SCRIPTS / "bench_model.py"), "--data", "synthetic", "--arch", "smallcnn", *options]
        until = time.monotonic() + 100_000  # the whole batch, and every way to compress
        env = {**os.environ, "PYTHONPATH": str(ROOT), "BENCH_UNTIL": str(until), "OMP_NUM_THREADS": "1"}
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)

    refused = measured("--parallel", "fsdp")
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1] == "the forecast is for --parallel ddp, not fsdp"
    report = measures.read(
        "a", ["a"], measured("--image-size", "32", "--batch-size", "4", "--accumulate", "3").stdout, {}
    )
    found = {each.kind: each.value for each in report.measures}
    sent = {each.of: each.value for each in report.measures if each.kind == "sent"}
    assert list(sent) == ["bf16", "powersgd:1", "powersgd:2", "powersgd:4"]
    assert sent["powersgd:1"] < sent["powersgd:2"] < sent["powersgd:4"] < sent["bf16"] == found["gradients"] / 2
    seconds = {each.of: each.value for each in report.measures if each.kind == "compression"}
    assert seconds.keys() == sent.keys()
    assert min(seconds.values()) > 0
    assert found["gradients"] > 4 * 64 * 1000  # its last layer alone
    assert found["passes"] == 3
    assert found["step"] > 0


def test_the_classes_of_the_model_are_those_of_the_data(tmp_path: Path) -> None:
    digit_tree(tmp_path / "digits", 12, 4)
    (tmp_path / "cifar").mkdir()
    for name in ("train", "meta"):  # not read
        (tmp_path / "cifar" / name).touch()
    kinds = {"synthetic": 1000, str(tmp_path / "digits"): 10, str(tmp_path / "cifar"): 100}
    kinds |= {str(ROOT / "jobs" / "data" / "digits.tar"): 10, str(tmp_path / "missing"): None, "mine:images": None}
    assert {data: bench_model.classes_of(data) for data in kinds} == kinds


@pytest.mark.parametrize(("most", "size"), [(128, 128), (100_000, 256)])
def test_a_slow_batch_leaves_time_for_the_ways_to_compress(most: int, size: int) -> None:
    now = 0.0

    def step(images: int) -> float:
        nonlocal now
        now += (took := 0.04 + 0.006 * images)
        return took

    found = bench_model.grow(step, most, 12.0, lambda: now)
    assert found == (size, pytest.approx(0.04 + 0.006 * size), True)
    assert 12.0 - now > 40 * 0.052  # not 40 steps of the largest batch
    assert not bench_model.grow(step, most, now + 2.0, lambda: now)[2]  # the step itself is worth more


@pytest.mark.parametrize("hangs", [pytest.param(False, marks=pytest.mark.ci), True])
def test_copies_between_gpus_that_hang_end_the_measurement_of_the_gpus(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, Any]] = []
    with pretend.gpu(2):
        if hangs:
            monkeypatch.setattr(pretend.Event, "query", lambda _: False)
            monkeypatch.setattr(bench_parts, "HUNG", 0.01)
        monkeypatch.setattr(bench_parts, "_matmul", lambda *_: None)  # of 8192 rows
        assert bench_parts.gpus(0.1, "bf16", lambda **each: said.append(each)) is not hangs
    kinds = [each["kind"] for each in said]
    assert kinds == (["copy", "to GPU", "from GPU", "failed"] if hangs else ["copy", "to GPU", "from GPU", "peer"] * 2)
    if hangs:
        assert (said[-1]["part"], said[-1]["what"]) == ("GPU 0", "copies to GPU 1 hang")
