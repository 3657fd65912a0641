"""One node's part of a transfer, or of a verification: a process of container_scripts/data_node.py, led over its stdin.

It runs in a container of the job's image, with the data set's folders and nothing else, and ends with this process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from launcher import container_scripts
from launcher.errors import DataFailed, LauncherError
from launcher.model import checked, labels
from launcher.model.container import Mount
from launcher.model.facts import NodeFacts
from launcher.node.machine import CommandStream, Machine

START_TIMEOUT = 120.0
LIST_TIMEOUT = 3600.0  # seconds to list the files of a source: millions, on a slow disk
_LONGEST = 1 << 20  # bytes of a report: the names of damaged files
_MODULES = ("data_tree", "data_store", "data_wire", "data_node")
# The first line of stdin has the modules; the rest is the last one's
_BOOT = """
import json, sys, types
for name, text in json.loads(sys.stdin.readline()):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name + ".py", "exec"), module.__dict__)
sys.modules["data_node"].main()
"""
_NO_PYTHON = "launcher: no python"
_FIND = f"""
for p in python3 python; do command -v "$p" >/dev/null && exec "$p" -c "$0"; done; echo '{_NO_PYTHON}' >&2; exit 3
"""
CURE = "it needs Python 3.8 or later; name another image with --image, or copy by rsync and use mounts"


def here() -> list[str]:
    """The process on this machine."""
    return [sys.executable, "-c", _BOOT]


def in_container(image: str, node: NodeFacts, mounts: Sequence[Mount]) -> list[str]:
    """The process in a container of the ssh user's that goes with its stdin."""
    rootless = node.engine is not None and node.engine.rootless
    user, groups = ("0:0", ()) if rootless else (f"{node.uid}:{node.gid}", node.groups)
    argv = ["docker", "run", "--rm", "--interactive", "--init", "--log-driver", "none", "--network", "host"]
    argv += ["--read-only", "--user", user, "--security-opt", "label=disable", "--label", f"{labels.PURPOSE}=data"]
    argv += [word for group in groups for word in ("--group-add", str(group))]
    for mount in mounts:
        fields = ["type=bind", f"src={mount.source}", f"dst={mount.target}", *(["readonly"] if mount.read_only else [])]
        argv += ["--mount", ",".join('"' + f.replace('"', '""') + '"' if {*f} & {*',"'} else f for f in fields)]
    return [*argv, "--entrypoint", "sh", image, "-c", _FIND, _BOOT]


class Worker:
    """A running process. Not for several threads at once, but for close()."""

    def __init__(self, machine: Machine, argv: Sequence[str], order: Mapping[str, Any]) -> None:
        """Raises NodeUnreachable, NodeUnfit."""
        self.node = machine.node
        self._rest, self._words, self.heard = b"", b"", time.monotonic()  # heard: when it last said something
        self.counted = {"sent": 0, "received": 0}  # bytes
        self._stream: CommandStream = machine.open(argv)
        modules = [(name, container_scripts.text(f"{name}.py").decode()) for name in _MODULES]
        self.send(modules)
        self.send(order)

    def send(self, said: Any) -> None:
        self._stream.send(json.dumps(said).encode() + b"\n")

    def report(self, timeout: float) -> Mapping[str, Any] | None:
        """What it says next; None: nothing within `timeout` seconds. Raises DataFailed, NodeUnreachable."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            found = self._stream.receive(left)
            if found is None or len(self._rest) > _LONGEST:
                raise self._ended()
            if any(found):
                self.heard = time.monotonic()
            self._rest += found[0]
            self._words = (self._words + found[1])[-4000:]
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict):
            return {}
        self.counted |= {key: checked.number(said[key], 1 << 60) for key in self.counted if key in said}
        return said

    def until(self, key: str, timeout: float = START_TIMEOUT) -> Any:
        """The value of the first report that has this key, or the error that it ended with. Raises DataFailed, ..."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            said = self.report(1.0)
            if said and key in said:
                return said[key]
            if said and "end" in said:
                raise failure(self.node, said)
        raise DataFailed(self.node, f"did not start to copy in {timeout:.0f} s", "is the node overloaded?")

    def _ended(self) -> LauncherError:
        words = self._words.decode(errors="replace").strip()[-600:]
        if _NO_PYTHON in words:
            return DataFailed(self.node, "the image has no Python to copy data with", CURE)
        return DataFailed(self.node, f"the process that copies data ended: {words or 'it was killed'}", "try again")

    def close(self) -> None:
        self._stream.end_input()
        self._stream.close()


def failure(node: str, said: Mapping[str, Any]) -> DataFailed:
    """The error that a process reported as its end."""
    why = str(said.get("why", "it ended early"))[:600]
    fixes = {
        "room": "make room there: launcher data rm, or set data_root in your settings file",
        "changed": "let nothing write to the data, then try again: what was sent is kept",
        "lost": "open the ephemeral TCP ports between the nodes: firewall, security group",
    }
    return DataFailed(node, why, fixes.get(str(said.get("end")), ""))
