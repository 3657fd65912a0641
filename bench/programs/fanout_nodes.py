"""Many pretended nodes in one process: `python fanout_nodes.py COUNT ROUND_TRIP_MS HOST_KEY AUTHORIZED_KEYS`.

Each has an ssh server of its own (asyncssh) behind a wire that delays every byte by half the round trip, each way. Its
shell answers the launcher's look and nothing else, `docker system dial-stdio` speaks as much of the Engine API as a
start and a stop need; every other command prints what `facts` prints, or nothing. Prints the ports as a JSON list; ends
with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncssh
from asyncssh.connection import SSHConnection
from asyncssh.constants import MSG_IGNORE

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "sha256:" + "1" * 64
VERSION = {"Version": "27.0.0", "ApiVersion": "1.46", "MinAPIVersion": "1.24"}
INFO = {
    "ID": "pretended",
    "ServerVersion": "27.0.0",
    "DockerRootDir": "/var/lib/docker",
    "SecurityOptions": ["name=seccomp,profile=builtin"],
    "Runtimes": {"runc": {}},
}


SHELL = "exec sh"
_plainly = SSHConnection.send_packet


def _send_packet(self: SSHConnection, kind: int, *args: bytes, **handler: Any) -> None:
    """asyncssh sends an empty message before every other one; sshd does not."""
    if kind != MSG_IGNORE:
        _plainly(self, kind, *args, **handler)


class Engine:
    """The containers of one node."""

    def __init__(self) -> None:
        self.containers: dict[str, dict[str, Any]] = {}

    def answer(self, method: str, target: str, body: bytes) -> tuple[int, Any]:
        path, _, query = re.sub(r"^/v1\.\d+", "", target).partition("?")
        words = path.strip("/").split("/")
        if words[0] in ("_ping", "version", "info"):
            return 200, VERSION if words[0] == "version" else INFO
        if words[:2] == ["containers", "create"]:
            name = dict(pair.split("=") for pair in query.split("&"))["name"]
            config = json.loads(body)
            self.containers[name] = {
                "Id": name,
                "Name": f"/{name}",
                "Image": IMAGE,
                "Config": {"Labels": config["Labels"]},
                "State": {"Status": "created", "ExitCode": 0},
            }
            return 201, {"Id": name, "Warnings": []}
        if words[:2] == ["containers", "json"]:
            return 200, [{"Id": name} for name in self.containers]
        found = self.containers.get(words[1]) if words[0] == "containers" and len(words) > 1 else None
        if found is None:
            return 404, {"message": f"no such thing: {target}"}
        if method == "DELETE":
            del self.containers[words[1]]
            return 204, None
        what = words[2]
        if what == "start":
            found["State"] = {"Status": "running", "ExitCode": 0, "StartedAt": "2026-01-01T00:00:00Z"}
        if what == "stop":
            found["State"] |= {"Status": "exited", "ExitCode": 143, "FinishedAt": "2026-01-01T00:01:00Z"}
        return {"json": (200, found), "archive": (200, None)}.get(what, (204, None))

    async def serve(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        """HTTP/1.1, kept alive."""
        while True:
            try:
                head = (await process.stdin.readuntil(b"\r\n\r\n")).decode()
            except asyncio.IncompleteReadError:
                return
            method, target, _ = head.split(" ", 2)
            length = re.search(r"(?i)content-length: (\d+)", head)
            body = await process.stdin.readexactly(int(length.group(1))) if length and int(length.group(1)) else b""
            status, value = self.answer(method, target, body)
            data = b"" if value is None else json.dumps(value).encode()
            kind = "" if status == 204 else f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
            process.stdout.write(f"HTTP/1.1 {status} x\r\n{kind}\r\n".encode() + data)


async def _shell(process: asyncssh.SSHServerProcess[bytes], look: bytes) -> None:
    """The frame of launcher.node.ssh.shell, the look in it where that is asked for."""
    while True:
        try:
            asked = await process.stdin.readuntil(re.compile(rb"done\\n' (\w+) .*\n"))
        except asyncio.IncompleteReadError:
            return
        mark = asked.split()[-1]
        out = look if b"section user" in asked else b""
        process.stdout.write(mark + b" begin\n" + out + mark + b" end\n0\n\n" + mark + b" done\n")


async def _node(look: bytes, key: str, allowed: str, delay: float) -> int:
    engine = Engine()

    async def run(process: asyncssh.SSHServerProcess[bytes]) -> None:
        command = process.command or ""
        if command == "docker system dial-stdio":
            await engine.serve(process)
        else:
            if command == SHELL:
                await _shell(process, look)
            if command == "facts":
                process.stdout.write(look)
                process.stdout.write(json.dumps([VERSION, INFO]).encode())
        process.exit(0)

    listener = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[key],
        authorized_client_keys=allowed,
        process_factory=run,
        encoding=None,
        compression_algs=None,
    )

    async def wire(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * delay)  # TCP's own handshake
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", listener.get_port())
        await asyncio.gather(_carry(reader, inner_writer, delay), _carry(inner_reader, writer, delay))

    server = await asyncio.start_server(wire, "127.0.0.1", 0, backlog=512)
    return int(server.sockets[0].getsockname()[1])


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    """Every byte as late as it was read plus the delay; any number of them may be under way."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                writer.close()
                return
            writer.write(data)

    task = asyncio.create_task(deliver())
    try:
        while data := await reader.read(1 << 16):
            under_way.put_nowait((loop.time() + delay, data))
    except ConnectionError:
        data = b""
    under_way.put_nowait((loop.time() + delay, b""))
    await task


async def main() -> None:
    count, delay = int(sys.argv[1]), float(sys.argv[2]) / 2000
    script = (ROOT / "launcher" / "node" / "facts.sh").read_bytes()
    SSHConnection.send_packet = _send_packet  # type: ignore[method-assign]
    look = subprocess.run(["sh", "-s"], input=script, stdout=subprocess.PIPE, check=True).stdout
    ports = [await _node(look, sys.argv[3], sys.argv[4], delay) for _ in range(count)]
    print(json.dumps(ports), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)  # whatever connections are still open


if __name__ == "__main__":
    asyncio.run(main())
