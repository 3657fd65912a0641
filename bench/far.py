"""Real nodes with a network delay of 25 ms each way: start, complete run, `down` and end of a run.

    python -m tests.bed up -n 8 && python -m bench.far [--nodes 8] [--repeat 5] [--json FILE]

Uses nodes of the test bed with an ssh round trip of 50 ms (tests/bed/delay.py). Baseline: `ssh NODE docker run` to all
nodes concurrently, which sends no code, verifies no image and collects nothing. Measured:

- start: `launcher up -d` of a job that sleeps; baseline: `docker run -d` of the same program.
- a whole run: an attached `launcher up` of a job that does nothing (`true`); baseline: `docker run --rm`.
- down: `launcher down` of the job that sleeps; baseline: `docker rm -f`.
- the end of a run: from the end of its last container, as Docker reports it, to the exit of an attached `up`. The nodes
  share this machine's clock.

Each with one node and with all nodes. Launcher and baseline alternate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.environment import Caller, bed_of, ssh_to_all
from tests.bed.bed import Bed
from tests.bed.delay import delayed
from tests.bed.settings import TRAIN_IMAGE

DELAY = 0.025  # seconds each way
START, WHOLE, DOWN, END = "start", "whole run", "down", "end of a run"
START_TARGET = 2.2  # launcher / ssh, with all nodes
WHOLE_FACTOR, WHOLE_EXTRA = 1.3, 1.0  # allowed growth from one node to all: factor on ssh's growth, plus seconds
DOWN_TARGET = 1.0  # seconds, growth from one node to all
END_TARGET = 0.7  # seconds, one node
SLEEP = ["sleep", "600"]
SHORT = ["sleep", "4"]  # long enough for the launcher to follow the run before it ends
CONTAINER = "bench-far"
OPTIONS = f"--name {CONTAINER} --network host --ipc host --init"

Values = dict[tuple[str, str, int], list[float]]  # (what, method, nodes) -> seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.far", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each, after one warm-up")
    parser.add_argument("--json", type=Path, metavar="FILE")
    call = parser.parse_args()
    machine = report.machine()
    values: Values = {}
    with bed_of(call.nodes) as bed, delayed(bed, DELAY) as config, Caller.at(config) as caller:
        distant = DistantNodes(bed, caller)
        for turn in range(call.repeat + 1):
            for nodes in (1, call.nodes):
                for who, seconds in distant.turn(nodes) if turn % 2 else reversed(distant.turn(nodes)):
                    for what, took in seconds().items():
                        if turn:  # the first fills caches on both sides
                            values.setdefault((what, who, nodes), []).append(took)
                            print(f"  {turn}/{call.repeat}  {nodes} nodes, {what}: {who:8} {took:6.2f} s", flush=True)
    machine["load_after"] = round(os.getloadavg()[0], 2)
    show(values, call.nodes)
    if call.json:
        results = [{"what": w, "who": n, "nodes": c, **report.summary(v)} for (w, n, c), v in values.items()]
        report.write(call.json, {"machine": machine, "delay_each_way_s": DELAY, "results": results})
    return 0


class DistantNodes:
    """The launcher and ssh on distant nodes. Each call cleans up after itself; that is not timed."""

    def __init__(self, bed: Bed, caller: Caller) -> None:
        self._nodes = [node.alias for node in bed.nodes]
        self._caller = caller

    def turn(self, nodes: int) -> list[tuple[str, Any]]:
        return [
            ("launcher", lambda: self.launcher(self._nodes[:nodes])),
            ("ssh", lambda: self.ssh(self._nodes[:nodes])),
        ]

    def launcher(self, nodes: Sequence[str]) -> dict[str, float]:
        call, seconds = self._caller.launcher, {}
        seconds[START] = call("up", "-d", self._caller.job("bench-sleep", nodes, {"command": SLEEP})).wall
        seconds[DOWN] = call("down").wall
        seconds[WHOLE] = call("up", self._caller.job("bench-true", nodes, {"command": ["true"]})).wall
        self._caller.down()
        call("up", self._caller.job("bench-short", nodes, {"command": SHORT}))
        seconds[END] = self._caller.seconds_since_end()
        self._caller.down()
        return seconds

    def ssh(self, nodes: Sequence[str]) -> dict[str, float]:
        run = f"docker run {OPTIONS}"
        return {
            START: self._on_all(nodes, f"{run} -d {TRAIN_IMAGE} {' '.join(SLEEP)}"),
            DOWN: self._on_all(nodes, f"docker rm -f {CONTAINER}"),
            WHOLE: self._on_all(nodes, f"{run} --rm {TRAIN_IMAGE} true"),
        }

    def _on_all(self, nodes: Sequence[str], command: str) -> float:
        return ssh_to_all(self._caller.ssh_config, nodes, command).wall


def show(values: Values, most: int) -> None:
    rows = [("", *(f"{who}, {nodes} node{'s' * (nodes > 1)}" for who in ("launcher", "ssh") for nodes in (1, most)))]
    for what in (START, WHOLE, DOWN, END):
        cells = [values.get((what, who, nodes)) for who in ("launcher", "ssh") for nodes in (1, most)]
        rows.append((what, *("" if cell is None else _cell(cell) for cell in cells)))
    print()
    print(report.table(rows))

    def median(what: str, who: str, nodes: int) -> float:
        return statistics.median(values[what, who, nodes])

    def growth(what: str, who: str) -> float:
        return median(what, who, most) - median(what, who, 1)

    pairs = zip(values[START, "launcher", most], values[START, "ssh", most], strict=True)
    start = statistics.median(ours / theirs for ours, theirs in pairs)
    allowed = WHOLE_FACTOR * growth(WHOLE, "ssh") + WHOLE_EXTRA
    print()
    print(f"start with {most} nodes, ratio to concurrent ssh: {report.compared(start, START_TARGET)}")
    whole = report.compared(growth(WHOLE, "launcher"), allowed, "s")
    formula = f"{WHOLE_FACTOR:g} x {growth(WHOLE, 'ssh'):.2f} s of ssh + {WHOLE_EXTRA:g} s"
    print(f"a whole run grows from 1 to {most} nodes by {whole} ({formula})")
    print(f"down grows from 1 to {most} nodes by {report.compared(growth(DOWN, 'launcher'), DOWN_TARGET, 's')}")
    print(f"the end of a run on one node: {report.compared(median(END, 'launcher', 1), END_TARGET, 's')}")


def _cell(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    sys.exit(main())
