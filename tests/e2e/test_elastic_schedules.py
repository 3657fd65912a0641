"""Random schedules of partitions, pauses and killed containers: nothing of a superseded generation is ever used."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from tests.bed import faults
from tests.bed.bed import Bed, Node
from tests.bed.shell import CommandFailed
from tests.e2e.cli import bed_job
from tests.e2e.drill import Drill, kill_container, output_folder
from tests.e2e.scene import Scene

pytestmark = [pytest.mark.bed, pytest.mark.slow, pytest.mark.timeout(600)]

SEEDS = range(20)
SHAPES = [(3, 0), (4, 0), (3, 1)]  # nodes, spares
CUT, CUT_ONE_WAY, PAUSED, KILLED = "cut", "cut one way", "paused", "killed"
BEGIN, LASTS = 14, (1, 10)  # seconds: the latest start of a fault, and its duration
INTERVAL, SECONDS = 5, 0.1
LOST_AFTER = 5  # seconds; the minimum in a job file
LINE = re.compile(r"generation \d+ step \d+ \w+")  # what rank 0 of chain.py prints
Line = list[tuple[int, int, str]]  # generation, the step after which it started, its master
Chain = list[tuple[int, int, str]]  # step, generation, value


@dataclass(frozen=True)
class Fault:
    """From `begin` to `end`, in seconds: packets between `these` and `those` nodes are dropped, or only those sent by
    `these`; or a node is paused; or its container is killed at `begin` and restarted by the engine."""

    kind: str
    begin: float
    end: float
    these: tuple[int, ...]
    those: tuple[int, ...] = ()

    @property
    def ways(self) -> set[tuple[int, int]]:
        """Return the pairs of nodes (from, to) whose packets are dropped."""
        there = set(itertools.product(self.these, self.those))
        return there | {(b, a) for a, b in there} if self.kind == CUT else there


@dataclass(frozen=True)
class Schedule:
    nodes: int
    spares: int
    faults: tuple[Fault, ...]

    @property
    def least(self) -> int:
        return (self.nodes + self.spares) // 2 + 1

    @property
    def steps(self) -> int:
        """Number of steps, so many that the run cannot end before the last fault has ended."""
        return INTERVAL * math.ceil(max(fault.end for fault in self.faults) / SECONDS / INTERVAL)


def draw(seed: int) -> Schedule:
    rng = random.Random(seed)
    nodes, spares = rng.choice(SHAPES)
    found = []
    for kind in [rng.choice([CUT, CUT_ONE_WAY]), *rng.choices([CUT, CUT_ONE_WAY, PAUSED, KILLED], k=rng.randint(3, 5))]:
        begin = rng.uniform(0, BEGIN)
        names = rng.sample(range(nodes + spares), nodes + spares)
        first = rng.randint(1, len(names) - 1)
        these, those = names[:first], names[first : rng.randint(first + 1, len(names))]
        cut = kind in (CUT, CUT_ONE_WAY)
        ends = (tuple(these), tuple(those)) if cut else (tuple(these[:1]), ())
        found.append(Fault(kind, begin, begin + rng.uniform(*LASTS), *ends))
    return Schedule(nodes, spares, tuple(sorted(found, key=lambda fault: fault.begin)))


def inflict(bed: Bed, nodes: Sequence[Node], schedule: Sequence[Fault]) -> None:
    """Apply each fault at its time, also overlapping ones; remove all at the end."""
    started, paused = time.monotonic(), set[int]()
    with ExitStack() as healing, ThreadPoolExecutor() as pool:
        for node in nodes:
            healing.callback(faults.heal_network, bed, node)
        standing = [healing.enter_context(ExitStack()) for _ in nodes]
        for moment in sorted({moment for fault in schedule for moment in (fault.begin, fault.end)}):
            time.sleep(max(0.0, started + moment - time.monotonic()))
            now = [fault for fault in schedule if fault.begin <= moment < fault.end]
            before, paused = paused, {fault.these[0] for fault in now if fault.kind == PAUSED}
            for index in before - paused:
                standing[index].close()
            cut = {(nodes[a].address, nodes[b].address) for fault in now for a, b in fault.ways}
            awake = [node for index, node in enumerate(nodes) if index not in before & paused]
            list(pool.map(lambda node, cut=cut: faults.drop_only(bed, node, cut), awake))
            for fault in now:
                if (fault.kind, fault.begin) == (KILLED, moment) and fault.these[0] not in before & paused:
                    with suppress(CommandFailed):  # it is not running at the moment
                        kill_container(bed, nodes[fault.these[0]])
            for index in paused - before:
                standing[index].enter_context(faults.paused(nodes[index]))


@pytest.mark.parametrize(
    ("seed", "scene"), [(seed, draw(seed).nodes + draw(seed).spares) for seed in SEEDS], indirect=["scene"]
)
def test_nothing_of_a_superseded_generation_is_used(seed: int, scene: Scene) -> None:
    schedule, cli = draw(seed), scene.cli
    print(schedule.nodes, "nodes", schedule.spares, "spares", *schedule.faults, sep="\n")
    names = [node.alias for node in scene.nodes]
    keys: dict[str, Any] = {"nodes": names[: schedule.nodes], "min_nodes": schedule.least, "restarts": 100}
    keys |= {"spares": names[schedule.nodes :]} if schedule.spares else {}
    run = {"command": ["python3", cli.program("chain.py"), str(schedule.steps), str(INTERVAL), str(SECONDS)]}
    up = Drill.follow(cli, "up", cli.job("schedule", **bed_job(run=run, lost_after=f"{LOST_AFTER}s", **keys)))
    up.sees("^generation . step 5 ")
    inflict(scene.bed, scene.nodes, schedule.faults)
    up.end(0)
    written = [line for node in scene.nodes for line in lines_of(scene, node, "generations/*/metrics.jsonl")]
    line = line_of_generations(scene, schedule)
    print("generations, the step after which each started, its master:", line)
    one_world_at_a_time([json.loads(text) for text in written], line)
    joined = [json.loads(text) for text in (cli.runs()[-1] / "metrics.jsonl").read_text().splitlines()]
    curve = [(at["step"], at["generation"], at["value"]) for at in joined if "kind" not in at]
    assert curve == undisturbed(line, schedule.steps)
    lines = one_log(scene, up)
    lost = {f"generation {generation} step {step} {value}" for step, generation, value in curve} - {*lines}
    assert len(lost) <= sum(fault.kind == KILLED for fault in schedule.faults), lost  # a line not yet written
    assert scene.clean() == 0


def lines_of(scene: Scene, node: Node, files: str) -> list[str]:
    return scene.bed.sh(node, f"cd {output_folder(scene.cli)} && cat {files} 2>/dev/null || true").splitlines()


def line_of_generations(scene: Scene, schedule: Schedule) -> Line:
    """Return the generations that led to the last checkpoint, which a quorum of the nodes has."""
    kept = [json.loads(text) for node in scene.nodes for text in lines_of(scene, node, "checkpoints/*.json")]
    generation, step, value, line = max(kept)
    assert (step, value) == (schedule.steps, undisturbed(line, step)[-1][2])
    assert kept.count([generation, step, value, line]) >= schedule.least
    return line


def undisturbed(line: Line, steps: int) -> Chain:
    """Return the results of a run that changes its world after these steps without losing any step."""
    chain: Chain = []
    value = ""
    for (generation, begin, master), (_, end, _) in itertools.pairwise([*line, (0, steps, "")]):
        for step in range(begin + 1, end + 1):
            value = hashlib.sha256(f"{value} {generation} {master} {step}".encode()).hexdigest()[:16]
            chain.append((step, generation, value))
    return chain


def one_world_at_a_time(written: Sequence[dict[str, Any]], line: Line) -> None:
    """Each generation continued from the previous one; none took a step after a newer one had started.

    Exception: a first node that was paused may already have received one step from all others and may take this step.
    """
    reports = [at for at in written if at.get("kind") == "start"]
    assert all(at["line"] == line[: len(at["line"])] for at in reports), f"not all of these are in {line}: {reports}"
    starts = {at["generation"]: at["time"] for at in reports}
    for older, newer in itertools.pairwise(sorted(starts)):
        mine = {at["step"]: at["time"] for at in written if at["generation"] == older and "kind" not in at}
        late = [step for step, when in mine.items() if when > starts[newer]]
        assert len(late) <= 1, f"generation {older} took {late} after {newer} had started"


def one_log(scene: Scene, up: Drill) -> list[str]:
    """Return the output of rank 0 in the order of generations; `up` must show each line in order, at most once."""
    logs = [text for node in scene.nodes for text in lines_of(scene, node, f"logs/{node.alias}.log")]
    printed = sorted(filter(LINE.fullmatch, logs), key=lambda text: [int(word) for word in text.split()[1:4:2]])
    assert len(set(printed)) == len(printed)
    assert list(filter(LINE.fullmatch, scene.cli("logs", "--no-follow").stdout.splitlines())) == printed
    shown: Iterator[str] = iter(printed)
    assert all(text in shown for _, text in up.lines if LINE.fullmatch(text)), str(up)
    return printed
