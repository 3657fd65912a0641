"""Freed memory is kept, as measured by the page faults of a new process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from train.memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()

def step():
    return sum(float(part[0]) for part in [torch.ones(4 << 20) for _ in range(4)])

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

torch.set_num_threads(1)
for _ in range(5):
    step()
before = faults()
for _ in range(10):
    step()
print((faults() - before) / 10)
"""


def per_step(how: str) -> float:
    # glibc adapts its thresholds, and whether it returns memory depends on addresses; with these it always does
    gives_back = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env={**os.environ, **gives_back},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


@pytest.mark.ci
def test_memory_freed_in_a_step_is_reused_in_the_next() -> None:
    usual, kept = per_step("leave"), per_step("keep")
    print(f"page faults per step: {usual:.0f}, with freed memory kept {kept:.0f}")
    assert usual > 10_000
    assert kept < 100
