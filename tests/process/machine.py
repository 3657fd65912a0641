"""A temporary home folder with containers that are plain processes."""

from __future__ import annotations

import io
import json
import tarfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from launcher import container_scripts
from launcher.model import labels
from launcher.model.container import ContainerSpec, Layout
from launcher.node.process import supervisor
from launcher.node.process.engine import ProcessEngine

RUN = "job-20261121-120000-abcd"


class Machine:
    """A temporary home folder, and the engines and containers that tests create in it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.output = home / ".launcher" / RUN
        self.names: list[str] = []

    def spec(self, program: str, rank: int = 0, restarts: int = 0, entry: bool = True, **env: str) -> ContainerSpec:
        """A container that runs `sh -c program`, by default under the entry script."""
        node = f"local-{rank}"
        own = self.output / ".node" / node
        argv = ("sh", "-c", textwrap.dedent(program))
        return ContainerSpec(
            name=f"launcher-{RUN}-{rank}",
            image="",
            argv=("sh", f"{own}/kit/entry.sh", *argv) if entry else argv,
            env={"LAUNCHER_RUN": RUN, "LAUNCHER_NODE": node, "LAUNCHER_OUTPUT": str(self.output), **env},
            labels={labels.RUN: RUN, labels.NODE: node, labels.PURPOSE: "run"},
            layout=Layout(f"{own}/code", str(self.output), f"{own}/kit"),
            output_dir=str(self.output),
            user="",
            restarts=restarts,
        )

    def create(self, spec: ContainerSpec, **code: str) -> tuple[ProcessEngine, str]:
        engine = ProcessEngine(spec.labels[labels.NODE])
        engine.files.make_dir(spec.output_dir)
        name = engine.create(spec)
        self.names.append(name)
        engine.put(name, archive(spec, code))
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


def archive(spec: ContainerSpec, code: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        home = tarfile.TarInfo(f"{spec.layout.kit}/home".lstrip("/"))
        home.type, home.mode = tarfile.DIRTYPE, 0o700
        tar.addfile(home)
        files = {f"{spec.layout.kit}/{n}": t for n, t in container_scripts.scripts().items()}
        files |= {f"{spec.layout.code}/{n}": t.encode() for n, t in code.items()}
        for name, data in files.items():
            info = tarfile.TarInfo(name.lstrip("/"))
            info.size, info.mode, info.uid = len(data), 0o755, 4711
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
