"""Many simulated nodes in one process: `python -m bench.programs.fanout_nodes FOLDER FIRST COUNT ROUND_TRIP_MS`.

Each is a separate ssh server (asyncssh) behind a proxy that delays every byte by half the round trip each way. It
runs commands (fanout_commands.py), acts as a Docker engine (`docker system dial-stdio`, fanout_engine.py), has sftp and
forwards connections. FOLDER has the host key `host`, the user's `user.pub` and `bin/docker`; the nodes' home folders
are created in it. Prints the ports as a JSON list. When its stdin ends, it prints which commands ran in a real shell
and how often, and exits.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import asyncssh
from asyncssh.connection import SSHConnection
from asyncssh.constants import MSG_IGNORE

from bench.programs.fanout_commands import Commands, node_address, record_facts, run_for_real
from bench.programs.fanout_engine import LOG, RANK_LOG, Engine
from tests.bed.delay import serve_delayed

DIAL_STDIO = "docker system dial-stdio"
BASELINE_FILES = {"log": 2 * LOG, "rank": RANK_LOG, "clock": b"1 1\n" * 2, "attempts": b"start 1\nexit 0 2\n"}
_send_packet = SSHConnection.send_packet


def _without_ignore(self: SSHConnection, kind: int, *args: bytes, **handler: Any) -> None:
    """asyncssh sends an empty message before each message. sshd does not, and reading it would cost the client time."""
    if kind != MSG_IGNORE:
        _send_packet(self, kind, *args, **handler)


class Server(asyncssh.SSHServer):
    """Forwards connections for its client, as sshd does. Anybody on this machine may log in: a client that first asks
    for the method "none", as paramiko and ssh do, could not try a key with paramiko, which asyncssh lets ask only once.
    """

    def begin_auth(self, username: str) -> bool:  # noqa: ARG002 - asyncssh's
        return False

    def connection_requested(self, *_: object) -> bool:
        return True


async def begin(folder: Path, number: int, delay: float, recorded: bytes) -> int:
    """Starts one node; returns its port."""
    home = folder / f"node{number}"
    (home / "job").mkdir(parents=True)
    for name, data in BASELINE_FILES.items():
        (home / "job" / name).write_bytes(data)
    engine = Engine(number)

    async def run(process: asyncssh.SSHServerProcess[bytes]) -> None:
        command = process.command or ""
        if command == DIAL_STDIO:
            work = engine.serve(process.stdin.readuntil, process.stdin.readexactly, process.stdout)
        else:
            work = commands.run(process, command)
        working = asyncio.ensure_future(work)
        closed = asyncio.create_task(process.wait_closed())
        await asyncio.wait({working, closed}, return_when=asyncio.FIRST_COMPLETED)
        closed.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
        elif (error := working.exception()) is not None:
            if not isinstance(error, ConnectionError):  # ConnectionError: the client has disconnected
                traceback.print_exception(error)
            process.exit(255)
        else:
            process.exit(working.result() or 0)

    listener = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_factory=Server,
        server_host_keys=[folder / "host"],
        authorized_client_keys=str(folder / "user.pub"),
        process_factory=run,
        sftp_factory=True,
        encoding=None,
        compression_algs=None,
    )
    outside = await serve_delayed("127.0.0.1", listener.get_port(), delay)
    port = int(outside.sockets[0].getsockname()[1])
    commands = Commands(home, node_address(number), port, recorded, folder / "template", folder / "bin" / "docker")
    return port


async def main() -> None:
    folder, first, count, delay = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]) / 2000
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every node connects to the first one through its proxy
    SSHConnection.send_packet = _without_ignore  # type: ignore[method-assign]
    (folder / "template").mkdir(exist_ok=True)
    recorded = record_facts(folder / "template")
    print(json.dumps([await begin(folder, first + index, delay, recorded) for index in range(count)]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(json.dumps(run_for_real), flush=True)
    os._exit(0)  # without closing the connections that are still open


if __name__ == "__main__":
    asyncio.run(main())
