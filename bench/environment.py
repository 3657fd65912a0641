"""What programs that are held against each other run in: the environment, the launcher, the test bed's nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
class Caller:
    """Somebody's folder, in which they type `launcher`, and their ssh config."""

    folder: Path
    ssh_config: Path

    @classmethod
    @contextlib.contextmanager
    def at(cls, ssh_config: Path) -> Iterator[Caller]:
        """In a folder of its own, which goes at the end."""
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            yield cls(Path(name), ssh_config)

    @property
    def environment(self) -> dict[str, str]:
        return {**installed(), "LAUNCHER_SSH_CONFIG": str(self.ssh_config)}

    def job(self, name: str, nodes: int, run: Mapping[str, Any], **more: Any) -> str:
        """The path of a job file for the first so many nodes of the bed, with its code in the same folder."""
        file = self.folder / f"{name}.yaml"
        found = {"name": name, "image": {"ref": TRAIN_IMAGE}, "gpus": "none", "run": dict(run), **more}
        file.write_text(yaml.safe_dump({**found, "nodes": [f"node{place + 1}" for place in range(nodes)]}))
        return file.name

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[Any]:
        """`launcher ARGUMENTS` in this folder."""
        return subprocess.Popen([LAUNCHER, *arguments], cwd=self.folder, env=self.environment, **more)

    def launcher(self, *arguments: str) -> None:
        """`launcher ARGUMENTS` to its end. Raises RuntimeError with what it said where it fails."""
        call = [LAUNCHER, *arguments]
        done = subprocess.run(
            call, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(call)}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
            )

    def down(self) -> None:
        """The latest run's containers go, and its record."""
        self.launcher("down")
        self.forget()

    def forget(self) -> None:
        shutil.rmtree(self.folder / "runs", ignore_errors=True)
