"""Environment of the compared programs: environment variables, the launcher, nodes of the test bed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.bed import cluster
from tests.bed.bed import Bed
from tests.bed.settings import TRAIN_IMAGE, Settings

LAUNCHER = str(Path(sys.executable).with_name("launcher"))
LIMIT = 300.0


def installed() -> dict[str, str]:
    """Return this environment with bytecode caching enabled, as for installed tools."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


@contextlib.contextmanager
def bed_of(nodes: int) -> Iterator[Bed]:
    """The test bed, locked for this process, with clean nodes. Raises SystemExit if it has too few nodes."""
    settings = Settings.from_environment()
    with cluster.locked(settings, "session"):
        bed = Bed.attach(settings)
        if len(bed.nodes) < nodes:
            raise SystemExit(f"{settings.name} has {len(bed.nodes)} nodes: python -m tests.bed up -n {nodes}")
        bed.sweep()
        yield bed


@dataclass(frozen=True)
class Cost:
    """Resources that programs used. wall, processor: seconds; memory: MiB, the largest process."""

    wall: float
    processor: float
    memory: float


def wait_for(processes: Sequence[subprocess.Popen[Any]], began: float) -> Cost:
    """Waits for all processes and sets their `returncode`. began: from time.monotonic().

    memory is never less than this process's own: Linux counts a forked child's peak from its parent's size.
    """
    processor = memory = 0.0
    deadline = threading.Timer(LIMIT, lambda: [os.kill(process.pid, signal.SIGKILL) for process in processes])
    deadline.start()
    for process in processes:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        processor += used.ru_utime + used.ru_stime
        memory = max(memory, used.ru_maxrss / 1024)
    deadline.cancel()
    return Cost(time.monotonic() - began, processor, memory)


def ssh_to_all(ssh_config: Path, hosts: Sequence[str], command: str) -> Cost:
    """One `ssh HOST COMMAND` per host, concurrently, with output in files. Raises RuntimeError if one fails."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in hosts]
        argv = ["ssh", "-F", str(ssh_config), "-o", "BatchMode=yes"]
        began = time.monotonic()
        processes = [
            subprocess.Popen([*argv, host, command], stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            for host, file in zip(hosts, files, strict=True)
        ]
        cost = wait_for(processes, began)
        for process, host, file in zip(processes, hosts, files, strict=True):
            if process.returncode:
                file.seek(0)
                raise RuntimeError(f"ssh {host} {command}: exit {process.returncode}\n{file.read()[-1000:]}")
    return cost


@dataclass(frozen=True)
class Caller:
    """A user's working folder and ssh config."""

    folder: Path
    ssh_config: Path
    variables: Mapping[str, str] = field(default_factory=dict)  # added to the environment

    @classmethod
    @contextlib.contextmanager
    def at(cls, ssh_config: Path, **variables: str) -> Iterator[Caller]:
        """With a temporary working folder, which is removed at the end."""
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            yield cls(Path(name), ssh_config, variables)

    @property
    def environment(self) -> dict[str, str]:
        return {**installed(), **self.variables, "LAUNCHER_SSH_CONFIG": str(self.ssh_config)}

    def job(self, name: str, nodes: Sequence[Any], run: Mapping[str, Any], **more: Any) -> str:
        """Writes a job file into the folder, which is also its code, and returns its name."""
        file = self.folder / f"{name}.yaml"
        found = {"name": name, "nodes": list(nodes), "image": {"ref": TRAIN_IMAGE}, "gpus": "none", "run": dict(run)}
        file.write_text(yaml.safe_dump({**found, **more}))
        return file.name

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[Any]:
        """Starts `launcher ARGUMENTS` in this folder."""
        return subprocess.Popen([LAUNCHER, *arguments], cwd=self.folder, env=self.environment, **more)

    def launcher(self, *arguments: str) -> Cost:
        """Runs `launcher ARGUMENTS`. Raises RuntimeError with its output if it fails."""
        with tempfile.TemporaryFile("w+") as output:
            began = time.monotonic()
            process = self.start(*arguments, stdout=output, stderr=output)
            cost = wait_for([process], began)
            if process.returncode:
                output.seek(0)
                end = output.read()[-4000:]
                raise RuntimeError(f"launcher {' '.join(arguments)}: exit {process.returncode}\n{end}")
        return cost

    def seconds_since_end(self) -> float:
        """Time since the last container of the folder's only run exited, by Docker's clock, which all nodes share."""
        now = time.time()
        [result] = self.folder.glob("runs/*/result.json")
        return now - max(node["finished"] for node in json.loads(result.read_text())["nodes"])

    def down(self) -> None:
        """Removes the latest run's containers and its record."""
        self.launcher("down")
        self.forget()

    def forget(self) -> None:
        shutil.rmtree(self.folder / "runs", ignore_errors=True)
