"""A temporary home folder with containers that are plain processes."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from launcher.model import labels
from launcher.model.container import ContainerSpec, Layout
from launcher.model.plan import new_run_id
from launcher.node import output_folder
from launcher.node.process import supervisor
from launcher.node.process.engine import ProcessEngine
from launcher.records.paths import NodePaths
from launcher.run.begin.start import kit


class Machine:
    """A temporary home folder, and the engines and containers that tests create in it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.run = new_run_id("job")  # another one per test: processes of the whole machine are found by its name
        self.output = home / ".launcher" / self.run
        self.names: list[str] = []

    def spec(self, program: str, rank: int = 0, restarts: int = 0, entry: bool = True, **env: str) -> ContainerSpec:
        """A container that runs `sh -c program`, by default under the entry script."""
        node = f"local-{rank}"
        own, workdir = self.output / ".node" / node, NodePaths(str(self.output), node).workdir
        argv = ("sh", "-c", textwrap.dedent(program))
        return ContainerSpec(
            name=f"launcher-{self.run}-{rank}",
            image="",
            argv=("sh", f"{own}/kit/entry.sh", *argv) if entry else argv,
            env={"LAUNCHER_RUN": self.run, "LAUNCHER_NODE": node, "LAUNCHER_OUTPUT": str(self.output), **env},
            labels={labels.RUN: self.run, labels.NODE: node, labels.PURPOSE: "run"},
            layout=Layout(workdir, str(self.output), f"{own}/kit"),
            output_dir=str(self.output),
            workdir=workdir,
            user="",
            restarts=restarts,
        )

    def create(self, spec: ContainerSpec, **code: str) -> tuple[ProcessEngine, str]:
        engine = ProcessEngine(spec.labels[labels.NODE])
        output_folder.make(engine.files, spec.output_dir, self.run, spec.workdir)
        name = engine.create(spec)
        self.names.append(name)
        engine.put(name, kit(spec.layout.kit, "", {}, remapped=False))
        for path, text in code.items():
            Path(spec.workdir, path).write_text(text)
        return engine, name

    def start(self, spec: ContainerSpec, **code: str) -> tuple[ProcessEngine, str]:
        engine, name = self.create(spec, **code)
        engine.start(name)
        return engine, name

    def log(self, rank: int = 0) -> str:
        log = self.output / "logs" / f"local-{rank}.log"
        return log.read_text() if log.exists() else ""

    def until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"timed out after {seconds} s; the log: {self.log()}"
            time.sleep(0.02)

    def wait_for_output(self, text: str, rank: int = 0) -> None:
        self.until(lambda: text in self.log(rank))

    def supervisor(self, rank: int = 0) -> int:
        return int(json.loads((self.output / ".node" / f"local-{rank}" / "state.json").read_text())["supervisor"])

    def alive(self) -> set[int]:
        return {pid for name in self.names for pid in supervisor.processes(name)}
