"""A node's utilization, parsed from whatever it sends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.run.status import GpuUtilization, Utilization
from launcher.run.status import utilization as parse

SAID = b"""Welcome to gpu-a!
MemTotal:       1000 kB
MemAvailable:    250 kB
GPU-1, 98, 14000, 16384
GPU-2, [N/A], [Unknown Error], 16384
GPU-3, 5, 6, 7
Failed to initialize NVML: Driver/library version mismatch
"""


def test_the_runs_own_gpus_in_its_order() -> None:
    assert parse(SAID, ["GPU-2", "GPU-1"]) == Utilization(
        (GpuUtilization("GPU-2", None, None, 16384), GpuUtilization("GPU-1", 98, 14000, 16384)), 750 * 1024, 1000 * 1024
    )


@given(st.one_of(st.binary(max_size=200), st.integers(0, len(SAID)).map(lambda end: SAID[:end])))
def test_any_output_of_a_node_is_handled(said: bytes) -> None:
    found = parse(said, ["GPU-1"])
    assert 0 <= found.memory <= found.memory_total
