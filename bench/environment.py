"""What programs that are held against each other run in: the environment, the launcher, the test bed's nodes."""

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
    """This one, with byte code kept: what a rival has from its installation, we have from the first run."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


@contextlib.contextmanager
def bed_of(nodes: int) -> Iterator[Bed]:
    """The test bed, for this process alone and with nothing on its nodes. Raises SystemExit where it is too small."""
    settings = Settings.from_environment()
    with cluster.locked(settings, "session"):
        bed = Bed.attach(settings)
        if len(bed.nodes) < nodes:
            raise SystemExit(f"{settings.name} has {len(bed.nodes)} nodes: python -m tests.bed up -n {nodes}")
        for node in bed.nodes:
            bed.sweep(node)
        yield bed


@dataclass(frozen=True)
class Cost:
    """What programs took. processor: seconds; memory: MiB, the most that one of them had."""

    wall: float
    processor: float
    memory: float


def wait_for(processes: Sequence[subprocess.Popen[Any]], began: float) -> Cost:
    """Until all have ended, each with a `returncode`. began: by time.monotonic().

    memory is never less than this process's own: Linux counts a program as large as the one that started it.
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
    """One `ssh HOST COMMAND` a host, all at once, each with its output in a file. Raises RuntimeError."""
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
    """A user's folder, in which they type `launcher`, and their ssh config."""

    folder: Path
    ssh_config: Path
    variables: Mapping[str, str] = field(default_factory=dict)  # of their environment, besides ours

    @classmethod
    @contextlib.contextmanager
    def at(cls, ssh_config: Path, **variables: str) -> Iterator[Caller]:
        """In a folder of its own, which goes at the end."""
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            yield cls(Path(name), ssh_config, variables)

    @property
    def environment(self) -> dict[str, str]:
        return {**installed(), **self.variables, "LAUNCHER_SSH_CONFIG": str(self.ssh_config)}

    def job(self, name: str, nodes: Sequence[Any], run: Mapping[str, Any], **more: Any) -> str:
        """The name of a job file, with its code in the same folder."""
        file = self.folder / f"{name}.yaml"
        found = {"name": name, "nodes": list(nodes), "image": {"ref": TRAIN_IMAGE}, "gpus": "none", "run": dict(run)}
        file.write_text(yaml.safe_dump({**found, **more}))
        return file.name

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[Any]:
        """`launcher ARGUMENTS` in this folder."""
        return subprocess.Popen([LAUNCHER, *arguments], cwd=self.folder, env=self.environment, **more)

    def launcher(self, *arguments: str) -> Cost:
        """`launcher ARGUMENTS` to its end. Raises RuntimeError with what it said where it fails."""
        with tempfile.TemporaryFile("w+") as said:
            began = time.monotonic()
            process = self.start(*arguments, stdout=said, stderr=said)
            cost = wait_for([process], began)
            if process.returncode:
                said.seek(0)
                words = said.read()[-4000:]
                raise RuntimeError(f"launcher {' '.join(arguments)}: exit {process.returncode}\n{words}")
        return cost

    def seconds_since_end(self) -> float:
        """From the last end of a container of the only run here, as its engine told, until now; one clock for all."""
        now = time.time()
        [result] = self.folder.glob("runs/*/result.json")
        return now - max(node["finished"] for node in json.loads(result.read_text())["nodes"])

    def down(self) -> None:
        """The latest run's containers go, and its record."""
        self.launcher("down")
        self.forget()

    def forget(self) -> None:
        shutil.rmtree(self.folder / "runs", ignore_errors=True)
