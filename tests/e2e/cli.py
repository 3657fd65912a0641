"""Calls the launcher as a user does: in a separate process, in its own folder, with a job file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from launcher.records.store import created
from tests.e2e.forks import Forked, interpreter, variables
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"
LAUNCHER = (sys.executable, "-m", "launcher")  # this tree's


@dataclass(frozen=True)
class Cli:
    """`cwd` is the user's project folder, where runs/ is created; `launcher` its command.

    This tree's launcher is forked from a process that has imported it, where that makes no difference to it.
    """

    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict)
    launcher: tuple[str, ...] = LAUNCHER

    def start(self, *args: object, stdout: int | IO[bytes] = subprocess.PIPE) -> subprocess.Popen[str] | Forked:
        """Starts the launcher in the background, with stderr and, by default, stdout as pipes."""
        argv, env = [*map(str, args)], {**os.environ, "PYTHONPATH": str(ROOT), **self.env}
        if self.launcher == LAUNCHER and interpreter(env) == interpreter(variables()):
            return Forked(argv, self.cwd, env, stdout)
        return subprocess.Popen(
            [*self.launcher, *argv],
            cwd=self.cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *args: object, code: int | None = 0, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        """Runs the launcher; fails the test with all output if the exit code is not `code` (None: any)."""
        process = self.start(*args)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"launcher {args} did not end in {timeout} s\n{out}\n{err}") from None
        shown = f"launcher {' '.join(map(str, args))}: exit {process.returncode}\n--- stdout\n{out}\n--- stderr\n{err}"
        assert code is None or process.returncode == code, shown
        return subprocess.CompletedProcess(process.args, process.wait(), out, err)

    def until_logged(self, words: str, timeout: float = 90) -> None:
        """Waits until the master of the latest run has printed these words."""
        deadline = time.monotonic() + timeout
        while words not in (seen := self("logs", "--no-follow").stdout):
            assert time.monotonic() < deadline, f"{words!r} was not printed:\n{seen}"

    def job(self, name: str = "job", **keys: Any) -> Path:
        """Writes a job file and returns its path. Nodes that are plain processes get a free port of this machine."""
        if keys.get("runtime") == "process":
            keys.setdefault("port", free_port())
        path = self.cwd / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"name": name, **keys}, sort_keys=False))
        return path

    def program(self, name: str) -> str:
        """Copies one of the test programs into the project and returns its path there."""
        shutil.copy(PROGRAMS / name, self.cwd / name)
        return name

    def runs(self) -> list[Path]:
        """The run folders, oldest first. Two runs may begin within one second, which is all that an id tells."""

        def began(run: Path) -> tuple[str, int]:
            plan = run / "plan.json"
            return created(run.name), plan.stat().st_mtime_ns if plan.exists() else 0

        folder = self.cwd / "runs"
        return sorted(folder.glob("[!.]*"), key=began) if folder.exists() else []

    def result(self) -> dict[str, Any]:
        """result.json of the latest run."""
        value: dict[str, Any] = json.loads((self.runs()[-1] / "result.json").read_text())
        return value


def bed_job(**keys: Any) -> dict[str, Any]:
    """The keys common to all jobs on the bed: nodes, image, torch from the nodes' /opt/venv."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return {
        "image": {"ref": "launcher-bed-train"},
        "nodes": ["node1", "node2"],
        "mounts": {"/opt/venv": "/opt/venv:ro"},
        "env": {"PYTHONPATH": f"/opt/venv/lib/{python}/site-packages", "OMP_NUM_THREADS": "1"},
        **keys,
    }


@contextmanager
def small_disk(folder: Path, size: str = "256k", *options: str) -> Iterator[None]:
    """A new folder, with little room. options: of mount(8). Only root mounts one."""
    if os.geteuid() != 0:
        pytest.skip("mounts a small disk")
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", *options)), "launcher-test", folder], check=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
