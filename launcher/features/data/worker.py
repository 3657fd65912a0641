"""Runs container_scripts/data_node.py on a node: its part of a transfer or of a verification, controlled by stdin.

It runs in a container of the job's image that mounts only the folders of the data, and exits with this process.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import DataFailed, LauncherError
from launcher.faults import disk
from launcher.model import checked
from launcher.model.container import Mount, Tool
from launcher.model.facts import NodeFacts, login_of
from launcher.node.machine import CommandStream

START_TIMEOUT = 120.0
LIST_TIMEOUT = 3600.0  # seconds to list the files of a source: there may be millions on a slow disk
_LONGEST = 1 << 20  # bytes of a message, which may name all damaged files
_SCRIPTS = Path(__file__).with_name("container_scripts")
_MODULES = ("data_tree", "data_store", "data_wire", "data_node")
_OF_FETCH = ("data_tree", "data_store", "data_http", "data_remote", "data_fetch")  # of a download, which imports more
SIGN_OF_LIFE = 5.0  # seconds between two lines to a process, which ends without them
# The first line of stdin has the modules; data_node reads the rest
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
# What to do after each end of a process, where that is known
FIXES = {
    "room": "free some space: launcher data rm, or set data_root in your settings file",
    "changed": "make sure that no program writes to the data, then try again: data already sent is kept",
    "replaced": "try again when nobody writes it there: the download starts anew",
    "lost": "open the ephemeral TCP ports between the nodes: firewall, security group",
    "package": "install it here with pip, or in the nodes' image: `image: {packages: [NAME]}` in the job",
    "denied": "give the download its credentials: `secrets` of the job, or data push --env NAME; see docs/data.md",
    "silent": "check the connection to the node, then try again: what was sent is kept",
    "unreachable": "check the URL, and the network of the nodes and of this machine",
    "cut": "try again: what has come is kept",
    "busy": "try again later: what has come is kept",
    "absent": "check the URL; copies on nodes stay until launcher data rm: to list them, launcher data ls --nodes A,B",
    "differs": "try again; if it differs again, the file there and its checksum do not belong together",
    "wrong": "download it yourself, and give its path",
    "redirected": "check the URL: curl -LI URL shows where it leads",
    "status": "check the URL",
}
_NO_PYTHON_FIX = "use an image with Python 3.8 or later (--image), or copy the data with rsync and use `mounts`"


def _bytes(value: object) -> int:
    return checked.number(value, 1 << 60)


def _port(value: object) -> int:
    if port := checked.number(value, 65535):
        return port
    raise ValueError("0 is not a valid port")


def _content(value: object) -> str:
    return checked.text(value, "([0-9a-f]{64})?", "name of data")


def _names(value: object) -> list[str]:
    return [str(name)[:4096] for name in checked.fitting(value, [str])]


# The keys of a worker's messages. The node and the image may have been tampered with
_KEYS: Mapping[str, Callable[[object], Any]] = {
    "end": lambda value: checked.text(value, "[a-z]{1,20}", "end of a transfer"),
    "why": lambda value: str(value)[:600],
    "where": lambda value: checked.text(value, "upstream|downstream", "neighbour"),
    **dict.fromkeys(("content", "state"), _content),
    "single": lambda value: checked.text(value, "(?!\\.{1,2}$)[^/\0]{0,255}", "name of a file"),
    "port": _port,
    **dict.fromkeys(("done", "total", "received", "sent", "bytes", "files", "listed", "unchecked"), _bytes),
    "note": lambda value: str(value)[:600],
    "damaged": _names,
}


def local_argv() -> list[str]:
    """Return the command of a worker on this machine."""
    return [sys.executable, "-c", _BOOT]


def tool(image: str, node: NodeFacts, mounts: Sequence[Mount]) -> Tool:
    """Return a worker in a container, as the ssh user; it exits at the end of its stdin."""
    user, groups = login_of(node)
    return Tool(image, (_FIND, _BOOT), "data", tuple(mounts), user, groups, network="host", interactive=True)


class Worker:
    """A running worker process. Not thread-safe, except close(). mask: hides secrets in what it says."""

    def __init__(
        self, node: str, stream: CommandStream, order: Mapping[str, Any], mask: Callable[[str], str] = str
    ) -> None:
        self.node, self._mask = node, mask
        self._rest, self._stderr, self.heard = b"", b"", time.monotonic()  # heard: time of its last output
        self.counted = {"sent": 0, "received": 0}  # bytes
        self._stream = stream
        self._sending, self._closed = threading.Lock(), threading.Event()
        names = dict.fromkeys((*(_OF_FETCH if order.get("role") == "fetch" else ()), *_MODULES))
        modules = [(name, (_SCRIPTS / f"{name}.py").read_text(encoding="utf-8")) for name in names]
        self.send(modules)
        self.send(order)
        threading.Thread(target=self._show_life, daemon=True).start()

    def send(self, message: Any) -> None:
        self._write(json.dumps(message).encode())

    def _write(self, line: bytes) -> None:
        with self._sending:
            self._stream.send(line + b"\n")

    def _show_life(self) -> None:
        while not self._closed.wait(SIGN_OF_LIFE):
            self._write(b"")

    def report(self, timeout: float) -> Mapping[str, Any] | None:
        """Return its next message, None after `timeout` seconds without one. Raises DataFailed, NodeUnreachable."""
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
            self._stderr = (self._stderr + found[1])[-4000:]
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            return {}
        try:
            message = {key: check(message[key]) for key, check in _KEYS.items() if key in message}
        except ValueError as error:
            what = f"the process that copies data sent an invalid message: {error}"
            raise DataFailed(self.node, what, "check who else has access to the node and to the image") from None
        message |= {key: self._mask(message[key]) for key in ("why", "note") if key in message}
        self.counted |= {key: message[key] for key in self.counted if key in message}
        return message

    def until(self, key: str, timeout: float = START_TIMEOUT) -> Any:
        """Return the value of the first message with this key. Raises the error that it reported, DataFailed, ..."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            message = self.report(1.0)
            if message and key in message:
                return message[key]
            if message and "end" in message:
                raise failure(self.node, message)
        raise DataFailed(self.node, f"did not start copying within {timeout:.0f} s", "check the load of the node")

    def _ended(self) -> LauncherError:
        stderr = self._mask(self._stderr.decode(errors="replace").strip())[-600:]
        if _NO_PYTHON in stderr:
            return DataFailed(self.node, "the image has no Python, which is needed to copy data", _NO_PYTHON_FIX)
        if "Cannot connect to the Docker daemon" in stderr:
            fix = "on the node: sudo systemctl start docker; then try again: what was sent is kept"
            return DataFailed(self.node, "its container engine does not answer", fix)
        if not stderr:
            what = "the process that copies data was killed: the engine was restarted, or memory ran out"
            return DataFailed(self.node, what, "check the engine and try again: what was sent is kept")
        return DataFailed(self.node, f"the process that copies data exited: {stderr}", "try again")

    def close(self) -> None:
        self._closed.set()
        self._stream.end_input()
        self._stream.close()


def failure(node: str, message: Mapping[str, Any]) -> DataFailed:
    """Return the error of a final message."""
    why = str(message.get("why", "it exited early"))
    if disk.is_full(why):
        found = disk.full(disk.DATA, why)
        return DataFailed(node, found.what, f"{found.fix}, `launcher data rm` old data")
    if ("certificate" in why and message.get("end") == "lost") or "RequestTimeTooSkewed" in why:  # the latter: S3
        return DataFailed(node, why, "compare the clocks of the nodes and of this machine: date -u")
    return DataFailed(node, why, FIXES.get(message.get("end", ""), ""))
