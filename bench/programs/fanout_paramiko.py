"""`python -m bench.programs.fanout_paramiko SSH_CONFIG COUNT KEY PORT...`: the library below us as it comes.

A thread a node, a connection, one command a phase; no config, no host key checked, no answer read as more than bytes.
Prints what fanout_ours prints. Ours does more and costs less: it lets no thread wait (launcher/node/hub).
"""

from __future__ import annotations

import gc
import json
import socket
import sys
import threading
import time
from collections.abc import Callable

import paramiko

from bench.programs.cost import cost

COMMANDS = {"facts": "facts", "start": "docker run -d any true", "stop": "docker rm -f any"}


def main() -> None:
    gc.set_threshold(200_000)
    key, ports = paramiko.Ed25519Key.from_private_key_file(sys.argv[3]), [int(port) for port in sys.argv[4:]]
    transports: dict[int, paramiko.Transport] = {}

    def connect(port: int) -> None:
        transport = transports[port] = paramiko.Transport(socket.create_connection(("127.0.0.1", port)))
        transport.start_client(timeout=60)
        transport.auth_publickey("bench", key)

    def run(port: int, command: str) -> None:
        with transports[port].open_session() as channel:
            channel.exec_command(command)
            while channel.recv(1 << 16):
                pass
            assert channel.recv_exit_status() == 0

    seconds = {}
    began = time.monotonic()
    for phase, command in COMMANDS.items():
        if phase == "facts":
            _on_all(ports, connect)
        _on_all(ports, lambda port, command=command: run(port, command))
        seconds[phase] = time.monotonic() - began
        began = time.monotonic()
    print(json.dumps({**seconds, **cost()}))
    for transport in transports.values():
        transport.close()


def _on_all(ports: list[int], do: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def one(port: int) -> None:
        try:
            do(port)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=one, args=(port,)) for port in ports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


if __name__ == "__main__":
    main()
