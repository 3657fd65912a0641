"""What each test costs: `python -m tests.profile [--rows N] [PYTEST OPTIONS]` prints a table, the dearest test first.

Wall seconds, and processor seconds of all processes that a test starts, also of those that it leaves behind, and of the
bed's nodes with all that runs on them; without this machine's own engine and its other containers. Tests run in turn.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bed.cluster import LABEL
from tests.bed.settings import Settings

ONE_AFTER_ANOTHER = ("-n", "0", "-p", "no:cacheprovider", "-q")
SET_CHILD_SUBREAPER = 36  # prctl(2)
CGROUPS = Path("/sys/fs/cgroup")
NANOSECONDS = "cpuacct/docker/{}/cpuacct.usage"  # of a container, with cgroups of version 1
MICROSECONDS = ("docker/{}/cpu.stat", "system.slice/docker-{}.scope/cpu.stat")  # of version 2


@dataclass(frozen=True)
class Cost:
    """A test's set-up, call and tear-down."""

    test: str
    wall: float
    processor: float


class Costs:
    """A pytest plugin that measures each test."""

    def __init__(self) -> None:
        self.tests: list[Cost] = []
        self.nodes = nodes_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        wall, processor = time.monotonic(), processor_seconds()
        result = yield
        processor = processor_seconds() - processor
        before, self.nodes = self.nodes, nodes_seconds()
        for node, now in self.nodes.items():
            then = before.get(node, 0.0)
            processor += now - then if now >= then else now  # a node that was powered off counts anew
        self.tests.append(Cost(item.nodeid, time.monotonic() - wall, processor))
        return result


def processor_seconds() -> float:
    """Return the processor seconds of this process's parent and all its descendants, the ended ones included."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # proc_pid_stat(5), from its third field on
        except (FileNotFoundError, ProcessLookupError):  # it has just ended: its parent's figures include it
            continue
        parents[int(stat.parent.name)], ticks[int(stat.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    below = {os.getppid()}
    while more := {process for process, parent in parents.items() if parent in below} - below:
        below |= more
    return sum(ticks[process] for process in below) / os.sysconf("SC_CLK_TCK")


def nodes_seconds() -> dict[str, float]:
    """Return the processor seconds of the bed's nodes since they were started, by the ids of their containers."""
    label = f"label={LABEL}={Settings.from_environment().name}"
    argv = ["docker", "ps", "-q", "--no-trunc", "--filter", label]
    try:
        nodes = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.split()
    except FileNotFoundError:
        return {}
    return {node: _container_seconds(node) for node in nodes}


def _container_seconds(container: str) -> float:
    if (usage := CGROUPS / NANOSECONDS.format(container)).exists():
        return int(usage.read_text()) / 1e9
    for stat in (CGROUPS / name.format(container) for name in MICROSECONDS):
        if stat.exists():
            return int(dict(line.split() for line in stat.read_text().splitlines())["usage_usec"]) / 1e6
    return 0.0


def table(costs: list[Cost], rows: int) -> str:
    """Return a Markdown table of the dearest tests, and the sums of all."""
    dearest = sorted(costs, key=lambda cost: max(cost.wall, cost.processor), reverse=True)
    lines = [f"| {cost.processor:.1f} | {cost.wall:.1f} | {cost.test} |" for cost in dearest[:rows]]
    wall, processor = sum(cost.wall for cost in costs), sum(cost.processor for cost in costs)
    return "\n".join(
        ["| processor s | wall s | test |", "|---|---|---|", *lines, f"| {processor:.0f} | {wall:.0f} | all tests |"]
    )


def run(rows: int, options: list[str]) -> int:
    costs = Costs()
    try:
        return int(pytest.main([*ONE_AFTER_ANOTHER, *options], plugins=[costs]))
    finally:
        print(table(costs.tests, rows), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=30)
    own, options = parser.parse_known_args()
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what tests leave behind becomes a child of this process
    tests = os.fork()
    if tests == 0:
        os._exit(run(own.rows, options))
    while True:
        process, status = os.wait()
        if process == tests:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
