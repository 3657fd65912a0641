"""A world on the test bed, of two nodes. What is true comes from /proc and the nodes' files, seen from outside.

It touches nothing but the nodes of its own bed: the launcher cannot reach this machine's engine (World's DOCKER_HOST),
and no job names `local`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.bed import faults
from tests.bed.bed import Bed, Node
from tests.bed.settings import TRAIN_IMAGE, TRAINER
from tests.bed.shell import CommandFailed, output
from tests.histories import history as h
from tests.histories.play import Step, World, _processes

LAUNCHER_HOME = f"home/{TRAINER}/.launcher"
TRUTH = f"home/{TRAINER}/truth"  # on a node; in containers /truth
UID = 1001  # of TRAINER


class BedWorld(World):
    everywhere = ("--nodes", "node1,node2")

    def __init__(self, bed: Bed, root: Path, webhook: str) -> None:
        self.bed = bed
        self.nodes = {node.alias: node for node in bed.nodes[:2]}
        bed.sweep(*self.nodes.values())
        # the files of a node, also while it is paused
        pids = {
            name: output(["docker", "inspect", "-f", "{{.State.Pid}}", n.container]) for name, n in self.nodes.items()
        }
        self.files = {name: Path("/proc", pid, "root") for name, pid in pids.items()}
        self.lasting: dict[str, tuple[threading.Thread, threading.Event]] = {}
        super().__init__(root, webhook)
        self.mark = f"/truth/{root.name}"
        for files in self.files.values():
            shutil.rmtree(files / TRUTH, ignore_errors=True)  # of an earlier history
            (files / TRUTH).mkdir()
            os.chown(files / TRUTH, UID, UID)

    def variables(self) -> dict[str, str]:
        caches = self.bed.settings.state / "caches"  # what is known of the engines; each history would ask again
        return {"LAUNCHER_SSH_CONFIG": str(self.bed.ssh_config), "XDG_CACHE_HOME": str(caches)}

    def where(self, step: Step) -> dict[str, Any]:
        nodes: Any = {"pool": list(self.nodes)} if step.sweep else list(step.nodes)
        return {"image": {"ref": TRAIN_IMAGE}, "nodes": nodes, "mounts": {f"/{TRUTH}": "/truth"}}

    # --- faults

    def is_there(self, began: h.Began) -> bool:
        """And can be reached by hand: not while something befalls its machine."""
        there = any(where == (began.run, began.node) for where in self.containers())
        return there and began.node not in self.lasting

    def befall(self, fault: str, began: h.Began) -> None:
        command = {"remove": "rm -f", "kill container": "kill"}.get(fault)
        if command is None:
            super().befall(fault, began)
            return
        names = [name for run, node, name, _ in self._containers() if (run, node) == (began.run, began.node)]
        with contextlib.suppress(CommandFailed):  # it has ended meanwhile
            self.bed.sh(self.nodes[began.node], f"docker {command} {' '.join(names)}")

    def signal(self, began: h.Began, number: int) -> None:
        for run, node, ident, pid in self.processes():
            if (run, node, ident) == (began.run, began.node, began.pid):
                os.kill(pid, number)

    def strike_machine(self, step: Step) -> None:
        """For some seconds, or until `go_on`; one fault of a machine at a time."""
        if step.node in self.lasting:
            return
        begun, over = threading.Event(), threading.Event()
        thread = threading.Thread(target=self._strike, args=(step, begun, over))
        self.lasting[step.node] = thread, over
        thread.start()
        begun.wait()

    def _strike(self, step: Step, begun: threading.Event, over: threading.Event) -> None:
        node = self.nodes[step.node]
        self.note(h.Fault(time.monotonic(), step.fault, "", step.node))
        try:
            with FAULTS[step.fault](self.bed, node):
                begun.set()
                over.wait(step.lasting)
        finally:
            begun.set()
            self.note(h.Fault(time.monotonic(), h.HEALED, "", step.node))
            self.lasting.pop(step.node)

    def go_on(self) -> None:
        self._heal()
        super().go_on()

    def _heal(self) -> None:
        for thread, over in list(self.lasting.values()):
            over.set()
            thread.join()

    def end(self) -> None:
        self._heal()
        super().end()
        self.bed.sweep(*self.nodes.values())

    # --- what is true

    def logs(self) -> list[Path]:
        return [files / TRUTH / self.root.name for files in self.files.values()]

    def homes(self) -> list[Path]:
        return [files / LAUNCHER_HOME for files in self.files.values()]

    def containers(self) -> list[tuple[str, str]]:
        return [(run, node) for run, node, *_ in self._containers()]

    def started(self) -> Iterator[str]:
        return (run for run, _, _, runs in self._containers() if runs)

    def _containers(self) -> Iterator[tuple[str, str, str, bool]]:
        """The run, the node, the name and whether it runs, from the engines' own files."""
        for files in self.files.values():
            for config in (files / "var/lib/docker/containers").glob("*/config.v2.json"):
                with contextlib.suppress(OSError, ValueError):  # it is removed, or written, at this moment
                    value = json.loads(config.read_text())
                    labels = value["Config"]["Labels"] or {}
                    if "launcher.run" in labels:
                        name, runs = value["Name"].lstrip("/"), value["State"]["Running"]
                        yield labels["launcher.run"], labels["launcher.node"], name, runs

    def processes(self) -> Iterator[tuple[str, str, int, int]]:
        for pid, env in _processes(self.mark):
            with contextlib.suppress(OSError):
                if "LAUNCHER_RUN" in env:
                    began = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
                    yield env["LAUNCHER_RUN"], env["LAUNCHER_NODE"], began, pid


@contextlib.contextmanager
def _connections(bed: Bed, node: Node) -> Iterator[None]:
    """Every connection is reset; new ones work."""
    faults.kill_ssh_sessions(bed, node)
    yield


FAULTS: dict[str, Callable[[Bed, Node], contextlib.AbstractContextManager[None]]] = {
    "engine": faults.without_engine,
    "pause": lambda _, node: faults.paused(node),
    "connections": _connections,
    "cut": faults.isolated,
}
