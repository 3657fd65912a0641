"""A simulated Docker engine: the part of the Engine API that a run uses, over one byte stream.

A run's container does nothing. It exits SIMULATED_SECONDS (from its environment) after its start, or when it is
stopped, and writes the same files as entry.sh to its output folder: a log of 16 kB and three smaller files. Image
probes are short programs with relevant output and are actually executed on this machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

IMAGE = "bench:latest"
IMAGE_ID = "sha256:" + "1" * 64
SECONDS = "SIMULATED_SECONDS"
LOG = b"".join(b"step %6d  loss 0.123456  images/s 1234.5\n" % step for step in range(190))  # 8 kB
RANK_LOG = LOG[:4096]
VERSION = {"Version": "27.0.0", "ApiVersion": "1.46", "MinAPIVersion": "1.24", "Os": "linux", "Arch": "amd64"}
INFO = {
    "ServerVersion": "27.0.0",
    "DockerRootDir": "/var/lib/docker",
    "SecurityOptions": ["name=seccomp,profile=builtin"],
    "Runtimes": {"runc": {}},
    "DriverStatus": [],
}
IMAGE_FOUND = {
    "Id": IMAGE_ID,
    "RepoTags": [IMAGE],
    "RepoDigests": [],
    "Architecture": "amd64",
    "Os": "linux",
    "Created": "2026-01-01T00:00:00Z",
    "Size": 1 << 30,
    "Config": {"Env": ["PATH=/usr/bin:/bin"], "Entrypoint": None, "Cmd": ["sh"], "Labels": {}},
    "RootFS": {"Type": "layers", "Layers": [IMAGE_ID]},
}

Read = Callable[[int], Awaitable[bytes]]


class Container:
    """One container; `found` is its inspect document."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.config = config
        self.labels: Mapping[str, str] = config.get("Labels") or {}
        self.ended = asyncio.Event()
        self.log = b""
        self.timer: asyncio.TimerHandle | None = None
        self.probe: asyncio.Task[None] | None = None
        self.found: dict[str, Any] = {
            "Id": hashlib.sha256(name.encode()).hexdigest(),
            "Name": f"/{name}",
            "Image": IMAGE_ID,
            "Config": {"Labels": dict(self.labels), "Tty": False, "Image": IMAGE},
            "RestartCount": 0,
            "State": {"Status": "created", "Running": False, "ExitCode": 0, "StartedAt": "", "FinishedAt": ""},
        }

    @property
    def status(self) -> str:
        return str(self.found["State"]["Status"])

    def summary(self) -> dict[str, Any]:
        """Its entry in a list of containers."""
        names, labels = [self.found["Name"]], self.found["Config"]["Labels"]
        image = {"Image": IMAGE, "ImageID": IMAGE_ID}
        return {"Id": self.found["Id"], "Names": names, "Labels": labels, "State": self.status, "Created": 0, **image}

    def start(self) -> None:
        self.found["State"] |= {"Status": "running", "Running": True, "StartedAt": _now()}
        env = dict(pair.partition("=")[::2] for pair in self.config.get("Env") or [])
        if self.labels.get("launcher.purpose") == "run":
            self._write(begun=True)
            self.timer = asyncio.get_running_loop().call_later(float(env.get(SECONDS, "3600")), self.end)
        else:
            argv = [*(self.config.get("Entrypoint") or []), *(self.config.get("Cmd") or [])]
            self.probe = asyncio.create_task(self._run(argv, env))

    def end(self, code: int = 0) -> None:
        """Ends the container, unless it has already ended."""
        if self.status != "running":
            return
        if self.timer is not None:
            self.timer.cancel()
            self._write(begun=False, code=code)
        self.found["State"] |= {"Status": "exited", "Running": False, "ExitCode": code, "FinishedAt": _now()}
        self.ended.set()

    async def _run(self, argv: list[str], env: Mapping[str, str]) -> None:
        pipe, same = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
        environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", **env}
        process = await asyncio.create_subprocess_exec(*argv, env=environment, stdout=pipe, stderr=same)
        self.log, _ = await process.communicate()
        self.end(process.returncode or 0)

    def _write(self, *, begun: bool, code: int = 0) -> None:
        output, node, rank = (self.labels[f"launcher.{key}"] for key in ("output", "node", "node_rank"))
        now = int(time.time())
        files = {
            f"logs/{node}.log": LOG,
            f"logs/{node}.clock": b"%d %d\n" % (now, len(LOG)),
            f"state/{node}.attempts": b"start %d\n" % now if begun else b"exit %d %d\n" % (code, now),
            f"logs/rank-{rank}.log": b"" if begun else RANK_LOG,
        }
        for name, data in files.items():
            path = Path(output, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(data)


class Engine:
    """The containers of one node. `number` makes the engine's id unique."""

    def __init__(self, number: int) -> None:
        self._containers: dict[str, Container] = {}
        self._info = {**INFO, "ID": f"simulated-{number}"}

    async def serve(self, readuntil: Callable[[bytes], Awaitable[bytes]], exactly: Read, stream: Any) -> None:
        """Serves HTTP/1.1 requests until the stream ends. `stream` has write()."""
        while True:
            try:
                head = (await readuntil(b"\r\n\r\n")).decode("latin-1")
            except asyncio.IncompleteReadError:
                return
            method, target, _ = head.split(" ", 2)
            body = await _body(head, readuntil, exactly)
            path, _, query = re.sub(r"^/v1\.\d+", "", target).partition("?")
            parts = [unquote(word) for word in path.strip("/").split("/")]
            if parts[0] == "containers" and parts[-1] == "wait" and (container := self._find(parts[1])):
                stream.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
                await container.ended.wait()
                data = json.dumps({"StatusCode": container.found["State"]["ExitCode"]}).encode()
                stream.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
                continue
            status, kind, data = self._answer(method, parts, query, body)
            stream.write(_response(method, status, kind, data))

    def _answer(self, method: str, parts: list[str], query: str, body: bytes) -> tuple[int, str, bytes]:
        if parts[0] == "_ping":
            return 200, "text/plain", b"OK"
        status, value = self._about(method, parts, {key: found[-1] for key, found in parse_qs(query).items()}, body)
        if isinstance(value, bytes):
            return status, "application/vnd.docker.multiplexed-stream", value
        return status, "application/json", b"" if value is None else json.dumps(value).encode()

    def _about(self, method: str, parts: list[str], query: Mapping[str, str], body: bytes) -> tuple[int, Any]:
        """Status and JSON, None for no content."""
        if parts[0] in ("version", "info"):
            return 200, VERSION if parts[0] == "version" else self._info
        if parts == ["images", "json"]:
            return 200, [IMAGE_FOUND]
        if parts[0] == "images" and parts[-1] == "json" and "/".join(parts[1:-1]) in (IMAGE, IMAGE_ID):
            return 200, IMAGE_FOUND
        if parts == ["containers", "create"]:
            return self._create(query["name"], json.loads(body))
        if parts == ["containers", "json"]:
            wanted = json.loads(query.get("filters", "{}")).get("label", [])
            return 200, [each.summary() for each in self._containers.values() if _fits(each.labels, wanted)]
        container = self._find(parts[1]) if parts[0] == "containers" and len(parts) > 1 else None
        if container is None:
            if parts[0] not in ("containers", "images"):
                print(f"simulated engine: {method} /{'/'.join(parts)} is not implemented", file=sys.stderr, flush=True)
            return 404, {"message": f"not found: {'/'.join(parts)}"}
        if method == "DELETE":
            if container.status == "running" and query.get("force") not in ("1", "true", "True"):
                return 409, {"message": "it is running: stop it first"}
            container.end(137)
            del self._containers[container.found["Name"][1:]]
            return 204, None
        return self._act(container, parts[2])

    def _act(self, container: Container, what: str) -> tuple[int, Any]:
        if what == "start":
            container.start()
        elif what in ("stop", "kill"):
            container.end(143)
        elif what == "json":
            return 200, container.found
        elif what == "archive":
            return 200, None
        elif what == "logs":
            return 200, struct.pack(">BxxxL", 1, len(container.log)) + container.log if container.log else b""
        else:
            print(f"simulated engine: /containers/ID/{what} is not implemented", file=sys.stderr, flush=True)
            return 404, {"message": what}
        return 204, None

    def _create(self, name: str, config: Mapping[str, Any]) -> tuple[int, Any]:
        if name in self._containers:
            return 409, {"message": f"the name {name} is already in use"}
        self._containers[name] = Container(name, config)
        return 201, {"Id": self._containers[name].found["Id"], "Warnings": []}

    def _find(self, text: str) -> Container | None:
        """The container with that name or id."""
        by_id = (each for each in self._containers.values() if each.found["Id"] == text)
        return self._containers.get(text) or next(by_id, None)


async def _body(head: str, readuntil: Callable[[bytes], Awaitable[bytes]], exactly: Read) -> bytes:
    if re.search(r"(?i)transfer-encoding: *chunked", head):
        data = b""
        while size := int((await readuntil(b"\r\n")).split(b";")[0], 16):
            data += await exactly(size)
            await exactly(2)
        await readuntil(b"\r\n")
        return data
    length = re.search(r"(?i)content-length: *(\d+)", head)
    return await exactly(int(length[1])) if length and int(length[1]) else b""


def _response(method: str, status: int, kind: str, data: bytes) -> bytes:
    head = f"HTTP/1.1 {status} x\r\nApi-Version: {VERSION['ApiVersion']}\r\nOstype: linux\r\n"
    if status != 204:
        head += f"Content-Type: {kind}\r\nContent-Length: {len(data)}\r\n"
    return f"{head}\r\n".encode() + (b"" if method == "HEAD" or status == 204 else data)


def _fits(labels: Mapping[str, str], wanted: list[str] | Mapping[str, bool]) -> bool:
    pairs = (text.partition("=") for text in wanted)
    return all(key in labels and (not equals or labels[key] == value) for key, equals, value in pairs)


def _now() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e9):09}Z"
