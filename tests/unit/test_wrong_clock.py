"""The newest checkpoint of nodes whose clocks differ: two machines in temporary homes, one with its own date."""

from __future__ import annotations

import dataclasses
import gzip
import io
import os
import re
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import launcher
from launcher.model.plan import Plan
from launcher.node.connect import Fleet
from launcher.node.machine import CommandStream, LocalMachine
from launcher.node.process.engine import ProcessEngine
from launcher.node.trees import NodeClock
from launcher.records.store import NodeOfRun, Record
from launcher.run.begin.earlier import files_of
from launcher.run.begin.inherit import shares, undecided
from launcher.run.end.outcome import clocks_ahead
from launcher.run.locate import Attached
from tests.unit.test_inherit import Heir, holder

OLD, NEW = "job-20260101-000000-aaaa", "job-20260102-000000-bbbb"


class Node(LocalMachine):
    """This machine with another home, and a clock that is off by some seconds."""

    def __init__(self, name: str, home: Path, offset: float) -> None:
        super().__init__(name, "me")
        tools = home / "bin"
        tools.mkdir(parents=True)
        (tools / "date").write_text(f'#!/bin/sh\nexec /bin/date -d "{offset:+} seconds" "$@"\n')
        (tools / "date").chmod(0o755)
        self.settings = ["env", f"PATH={tools}:{os.environ['PATH']}", f"HOME={home}"]
        self.home, self.offset = home, offset

    def start(self, argv: Sequence[str], *, stdin: bool, timeout: float) -> CommandStream:
        return super().start([*self.settings, *argv], stdin=stdin, timeout=timeout)

    def wrote(self, run: str, path: str, text: str, ago: float) -> None:
        """A program of the run wrote this file so many seconds ago."""
        file = self.home / ".launcher" / run / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        when = time.time() - ago + self.offset
        os.utime(file, (when, when))

    def read(self, run: str, path: str) -> str:
        return (self.home / ".launcher" / run / path).read_text()


class Engine(ProcessEngine):
    def __init__(self, machine: Node) -> None:
        super().__init__(machine.node)
        self.host, self.machine, self.files = machine.node, machine, type(self.files)(machine)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Node, Node]:
    monkeypatch.chdir(tmp_path)
    return Node("gpu-a", tmp_path / "a", 0), Node("gpu-b", tmp_path / "b", 3600)


def resume(nodes: tuple[Node, Node], old: str = OLD, new: str = NEW) -> list[str]:
    """Copy what the new run of both nodes gets; return what is said."""
    keys: dict[str, Any] = {"name": "job", "nodes": ["gpu-a", "gpu-b"], "image": {"ref": "x"}, "code": "code"}
    Path("code").mkdir(exist_ok=True)
    plan: Plan = launcher.plan({**keys, "run": {"command": ["true"]}}, offline=True)
    planned = []
    for node, each in zip(nodes, plan.nodes, strict=True):
        output = f"{node.home}/.launcher/{new}"
        spec = dataclasses.replace(each.container, output_dir=output, workdir=f"{output}/workdir/{node.node}")
        planned.append(dataclasses.replace(each, container=spec))
    rows = [
        NodeOfRun(
            node.node, node.node, rank, f"launcher-{old}-{rank}", f"{node.home}/.launcher/{old}", range(rank, rank + 1)
        )
        for rank, node in enumerate(nodes)
    ]
    code = io.BytesIO()
    with gzip.GzipFile(fileobj=code, mode="wb") as zipped, tarfile.open(fileobj=zipped, mode="w"):
        pass
    said: list[str] = []
    fleet = Fleet([Engine(node) for node in nodes], {}, None)
    record = Record.rebuild(old, "docker", rows)
    with files_of(
        record, dataclasses.replace(plan, nodes=tuple(planned)), fleet, code.getvalue(), None, said.append
    ) as copy:
        copy()
    return said


def test_the_newest_is_that_of_the_corrected_times(nodes: tuple[Node, Node]) -> None:
    one, ahead = nodes
    one.wrote(OLD, "checkpoints/last.pt", "epoch 9", ago=100)
    ahead.wrote(OLD, "checkpoints/last.pt", "epoch 5", ago=500)
    said = resume(nodes)
    assert [node.read(NEW, "checkpoints/last.pt") for node in nodes] == ["epoch 9", "epoch 9"]
    about = r"(59:5\d|1:00:0\d)"  # an hour, as well as it can be measured on a busy machine
    assert re.fullmatch(
        rf"gpu-b: its clock is {about} ahead of this machine's; the times of its files are corrected", said[0]
    )
    assert said[2].startswith("gpu-b: resumes from gpu-a's checkpoints/last.pt (")
    assert said[2].endswith("; not from its own checkpoints/last.pt")
    assert len(said) == 3


def test_how_far_the_clocks_of_a_failed_runs_nodes_are_ahead_is_measured(nodes: tuple[Node, Node]) -> None:
    engines = {node.node: Engine(node) for node in nodes}
    rows = tuple(NodeOfRun(node.node, node.node, 0, "c", "/o", range(1)) for node in nodes)
    attached = Attached(Record.rebuild(OLD, "docker", rows), rows, engines, Fleet([*engines.values()], {}, None))
    ahead = clocks_ahead(attached, [*engines])
    assert ahead["gpu-b"] == pytest.approx(3600, abs=60)
    assert ahead.get("gpu-a", 0.0) == pytest.approx(0, abs=60)
    assert clocks_ahead(attached, ["gpu-b"]) == {}


def test_a_copy_keeps_the_moment_and_not_the_wrong_time(nodes: tuple[Node, Node]) -> None:
    """Else it would hide what the new run writes within the hour, when that is resumed."""
    one, ahead = nodes
    ahead.wrote(OLD, "checkpoints/last.pt", "epoch 5", ago=500)
    resume(nodes)
    assert one.read(NEW, "checkpoints/last.pt") == "epoch 5"
    assert abs((one.home / ".launcher" / NEW / "checkpoints/last.pt").stat().st_mtime - (time.time() - 500)) < 60
    third = "job-20260103-000000-cccc"
    resume(nodes, NEW, third)  # nothing was written: each has a copy, whose it is depends on how busy this machine is
    assert {node.read(third, "checkpoints/last.pt") for node in nodes} == {"epoch 5"}
    ahead.wrote(NEW, "checkpoints/last.pt", "epoch 6", ago=300)
    resume(nodes, NEW, "job-20260104-000000-dddd")
    assert one.read("job-20260104-000000-dddd", "checkpoints/last.pt") == "epoch 6"


def test_a_copy_is_recognised_as_well_as_the_clocks_are_known() -> None:
    here, there = holder("a", 0, last_pt=100.0), holder("b", 1, last_pt=3700.02)
    for error, known in ((0.05, True), (0.001, False)):
        ahead = dataclasses.replace(there, clock=NodeClock(3600.0, error, 1000.0))
        assert (here.copy(here.entries["last.pt"], ahead) is not None) is known


def test_files_of_the_future_and_those_of_about_the_same_time_are_named(nodes: tuple[Node, Node]) -> None:
    one, ahead = nodes
    one.wrote(OLD, "checkpoints/last.pt", "epoch 9", ago=100)
    ahead.wrote(
        OLD, "checkpoints/last.pt", "epoch 10", ago=-900
    )  # its clock has been corrected by less than it was off
    said = resume(nodes)
    late = "checkpoints/last.pt has a time in the future of its own clock, and may not be the newest"
    assert f"warning: gpu-b: {late}" in said


def test_a_difference_below_the_error_of_the_clocks_is_said() -> None:
    a, b = holder("a", 0, last_pt=100.0), holder("b", 1, last_pt=100.02)
    a, b = (dataclasses.replace(each, clock=NodeClock(0.0, 0.05, 1000.0)) for each in (a, b))
    assert [node.name for node, _ in undecided([a, b])] == ["b", "a"]
    certain = (
        dataclasses.replace(a, clock=NodeClock(0.0, 0.001, 1000.0)),
        dataclasses.replace(b, clock=NodeClock(0.0, 0.001)),
    )
    assert undecided(certain) == []
    assert undecided([a]) == []
    on_one_machine = dataclasses.replace(b, host="a")
    assert undecided([a, on_one_machine]) == []  # by one clock


def test_of_a_clock_that_is_behind_the_newest_is_found_too() -> None:
    a = holder("a", 0, last_pt=100)
    b = dataclasses.replace(holder("b", 1, last_pt=60), clock=NodeClock(-100.0, 0.01, 1000.0))
    (share,) = shares([a, b], [Heir("a", "a", frozenset([0]), "/new")], elastic=False)
    assert [source.name for source, _ in share.files.values()] == ["b"]
    (share,) = shares([a, b], [Heir("a", "a", frozenset([0]), "/new")], elastic=True)
    assert [source.name for source, _ in share.files.values()] == ["b"]
