"""Hardware facts: operations, peaks, memory, and the cores near a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train.runs import ROOT
from train.config import Config
from train.distributed.world import choose_device
from train.hardware import cores_of, forward_flops, ideal_seconds, peak_flops, peak_memory
from train.models import make_model


@pytest.mark.parametrize(("arch", "published"), [("resnet50", 4.09e9), ("mobilenet_v2", 0.30e9)])
def test_operations_are_twice_torchvisions_multiply_adds(arch: str, published: float) -> None:
    assert forward_flops(make_model(arch, 1000), 224) == pytest.approx(2 * published, rel=0.01)


def test_peaks_are_found_by_the_name_that_the_driver_gives() -> None:
    found = {name: peak_flops(name, "bf16", True) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "Tesla T4")}
    assert list(found.values()) == [989e12, 756e12, 65e12]
    assert peak_flops("NVIDIA A100-SXM4-80GB", "none", tf32=True) == 156e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "none", tf32=False) == 19.5e12
    assert peak_flops("NVIDIA A10G", "bf16", True) is None
    assert peak_flops("cpu", "bf16", True) is None


def test_the_published_a100_figure_is_a_fifth_of_its_peak() -> None:
    """2,470 images/s of ResNet-50."""
    ideal = ideal_seconds(make_model("resnet50", 1000), 224, "NVIDIA A100-SXM4-80GB", "fp16", True)
    assert ideal
    assert 2470 * ideal == pytest.approx(0.194, abs=0.002)


def test_peak_memory_is_that_of_the_process_on_a_cpu() -> None:
    before = peak_memory(torch.device("cpu"))
    now = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    torch.ones((int(before * 1e6) - now) // 4 + 100_000_000)
    assert peak_memory(torch.device("cpu")) > before + 300


def test_lists_of_cores() -> None:
    assert cores_of("0-3,8\n") == {0, 1, 2, 3, 8}
    assert cores_of("\n") == frozenset()


@pytest.mark.ci
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_process_stays_on_the_cores_near_its_gpu() -> None:
    """Ranks 0 and 1 share one core, rank 2 has the other; the cores near rank 3's GPU are unknown."""
    all_cores = sorted(os.sched_getaffinity(0))
    near = [[all_cores[0]], [all_cores[0]], [all_cores[1], 900_000], []]
    code = (
        "import json, os\nfrom train.hardware import bind_to_gpu\n"
        f"near = [frozenset(cores) for cores in {near}]\n"
        f"for rank in range(4):\n    os.sched_setaffinity(0, {all_cores})\n"
        "    print(json.dumps([bind_to_gpu(near, rank), sorted(os.sched_getaffinity(0))]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    bound = [json.loads(line) for line in done.stdout.splitlines()]
    assert bound == [[2, all_cores[:1]], [2, all_cores[:1]], [1, all_cores[1:2]], [4, all_cores]]


def test_deterministic_algorithms_on_request() -> None:
    try:
        choose_device(Config(data="", device="cpu", deterministic=True), 0, 1)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
