"""docs/guide.md is correct: its commands run on the test bed as they stand, in order, and print what the guide shows.

A comment before a block of the guide makes it a step of the test: `<!-- bed: {sees: PATTERN} -->`. Its keys:

    sees    regular expressions that the output must match, as must the output that the guide shows
    exit    the exit code, if it is not 0
    before  a fault, applied before the command; at, then: the fault `then` is applied when the output matches `at`

The commands are the lines that begin with `$ `, continued after `> `. A yaml block is the job file; the test changes
only the keys of BED and ADDED.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.bed import faults
from tests.bed.bed import Node
from tests.e2e.cli import ROOT, bed_job
from tests.e2e.scene import Scene

GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
BLOCK = re.compile(
    r"(?:<!-- bed(?:: (?P<keys>\{[^\n]*\}))? -->\n)?^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.DOTALL | re.M
)
PROMPTS = ("$ ", "> ")
NAMES = ("gpu-a", "gpu-b", "gpu-c")
# The bed's machines have no GPUs, and its image has only Python: torch is in a folder of the machines.
BED = {"gpus": "none", "image": bed_job()["image"]}
ADDED = {key: bed_job()[key] for key in ("mounts", "env")}
WAIT = 300.0  # seconds for a command


@dataclass(frozen=True)
class Step:
    """A marked block of the guide."""

    kind: str
    body: str
    exit: int = 0
    sees: tuple[str, ...] = ()
    before: str = ""
    at: str = ""
    then: str = ""

    @classmethod
    def read(cls, kind: str, body: str, keys: str | None) -> Step:
        settings = yaml.safe_load(keys or "{}")
        sees = settings.pop("sees", [])
        return cls(kind, body, sees=(sees,) if isinstance(sees, str) else tuple(sees), **settings)

    @property
    def commands(self) -> str:
        return "\n".join(line[2:] for line in self.body.splitlines() if line.startswith(PROMPTS))

    @property
    def recorded(self) -> str:
        return "\n".join(line for line in self.body.splitlines() if not line.startswith(PROMPTS))


def steps() -> list[Step]:
    blocks = (block for block in BLOCK.finditer(GUIDE) if block[0].startswith("<!-- bed"))
    return [Step.read(block["kind"], block["body"], block["keys"]) for block in blocks]


def found(pattern: str, output: str) -> bool:
    """Whether the output matches, regardless of white space: a terminal breaks lines, also within words."""
    return re.search("".join(pattern.split()), "".join(output.split())) is not None


def test_the_recorded_output_is_what_the_test_expects() -> None:
    assert len(steps()) >= 15
    for step in steps():
        for pattern in step.sees:
            assert found(pattern, step.recorded), (step.commands, pattern)


def test_every_command_with_its_output_is_a_step() -> None:
    shown = [block["body"] for block in BLOCK.finditer(GUIDE) if block["kind"] == "console"]
    assert shown == [step.body for step in steps() if step.kind == "console"]
    assert all(len(line) <= 80 for body in shown for line in body.splitlines())


class Desk:
    """The reader's machine, with an ssh config of the guide's names."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene = scene
        self.nodes = dict(zip(NAMES, scene.nodes, strict=True))
        self.project = folder / "digits"
        self.project.mkdir()
        (folder / "launcher").symlink_to(ROOT)
        programs = folder / "bin"
        programs.mkdir()
        config = folder / "ssh_config"
        hosts = "".join(f"Host {name}\n    HostName {node.address}\n" for name, node in self.nodes.items())
        config.write_text(hosts + scene.bed.ssh_config.read_text())
        self._program(programs / "ssh", f"{shutil.which('ssh')} -F {config}")
        self._program(programs / "launcher", f"{sys.executable} -m launcher")
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "PYTHONPATH": str(ROOT), "LAUNCHER_SSH_CONFIG": str(config)}
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **own}

    @staticmethod
    def _program(path: Path, command: str) -> None:
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        path.chmod(0o755)

    def write_job(self, text: str) -> None:
        """Writes job.yaml with the changes of BED and ADDED."""
        job = yaml.safe_load(text)
        job |= BED | {key: job[key] | values for key, values in ADDED.items()}
        (self.project / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))

    def run(self, step: Step) -> None:
        """Runs a step's commands; fails the test unless they print and return what they should."""
        if step.before:
            self._fault(step.before)
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", step.commands],
            cwd=self.project,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        seen: list[str] = []
        reader = threading.Thread(target=_read, args=(process, seen), daemon=True)
        reader.start()
        try:
            if step.at:
                _until(lambda: re.search(step.at, "".join(seen)), process, seen)
                self._fault(step.then, process)
            _until(lambda: process.poll() is not None, process, seen, alive=False)
            reader.join(10)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        output = "".join(seen)
        assert process.returncode == step.exit, f"{step.commands}\nexit {process.returncode}\n{output}"
        for pattern in step.sees:
            assert found(pattern, output), f"{step.commands}: no {pattern!r} in\n{output}"

    def _fault(self, what: str, process: subprocess.Popen[str] | None = None) -> None:
        name = what.rpartition(" ")[2]
        if what == "Ctrl-C":
            assert process is not None
            os.killpg(process.pid, signal.SIGINT)
        elif what.startswith("power off"):
            faults.power_off(self.nodes[name])
        else:
            assert what.startswith("power on"), what
            faults.power_on(self.scene.bed, self.nodes[name])


def _read(process: subprocess.Popen[str], into: list[str]) -> None:
    assert process.stdout is not None
    into.extend(process.stdout)


def _until(
    reached: Callable[[], object], process: subprocess.Popen[str], seen: list[str], *, alive: bool = True
) -> None:
    deadline = time.monotonic() + WAIT
    while not reached():
        assert time.monotonic() < deadline, f"did not come in {WAIT:.0f} s:\n{''.join(seen)}"
        assert not alive or process.poll() is None, f"ended too early:\n{''.join(seen)}"
        time.sleep(0.05)


@pytest.fixture
def desk(scene: Scene, tmp_path: Path) -> Iterator[Desk]:
    """The guide's machines have a folder /data, in which the ssh user may write."""
    for node in scene.nodes:
        scene.bed.sh(node, "rm -rf /data && install -d -o trainer /data")
    yield Desk(scene, tmp_path)
    for node in scene.nodes:
        _recover(scene, node)
        scene.bed.sh(node, "rm -rf /data")


def _recover(scene: Scene, node: Node) -> None:
    if scene.bed.state(node) != "running":
        faults.power_on(scene.bed, node)


@pytest.mark.slow
@pytest.mark.bed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scene", [3], indirect=True)
def test_the_guide_from_bare_machines_to_a_trained_model(desk: Desk) -> None:
    for step in steps():
        if step.kind == "yaml":
            desk.write_job(step.body)
        else:
            desk.run(step)
    clean = ["launcher", "clean", "--unfetched", "--yes"]  # the guide only lists
    subprocess.run(clean, cwd=desk.project, env=desk.environment, check=True)
    assert desk.scene.bed.wait_clean(desk.scene.nodes, timeout=200, home=True) == []
