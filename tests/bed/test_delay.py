"""The delay in front of the nodes: exactly as specified, with unchanged data and unlimited throughput."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from tests.bed.bed import Bed
from tests.bed.delay import delayed, delayed_ports
from tests.bed.shell import output

SECONDS = 0.05


@contextlib.contextmanager
def echo_server(greeting: bytes = b"") -> Iterator[tuple[str, int]]:
    """Sends the greeting, then echoes everything, including the end of the stream."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(ConnectionError):
                connection.sendall(greeting)
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)


def in_time(greeted: list[float], answered: list[float], round_trip: list[float]) -> bool:
    """Includes the first response, which is sent with the last packet of the handshake."""
    return max(min(greeted), min(answered)) < 5 * SECONDS and min(round_trip) < 3 * SECONDS


def test_every_connection_and_every_answer_takes_a_round_trip() -> None:
    greeted: list[float] = []
    answered: list[float] = []
    round_trip: list[float] = []
    with echo_server(b"hello") as target, delayed_ports([target], SECONDS) as [port]:
        # A busy machine adds delay, but less than one more trip in all of so many attempts; nothing arrives early.
        while not round_trip or (len(round_trip) < 50 and not in_time(greeted, answered, round_trip)):
            began = time.monotonic()
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(b"first")
                assert connection.recv(5) == b"hello"
                greeted.append(time.monotonic() - began)
                assert connection.recv(5) == b"first"
                answered.append(time.monotonic() - began)
                began = time.monotonic()
                connection.sendall(b"again")
                assert connection.recv(5) == b"again"
                round_trip.append(time.monotonic() - began)
    assert in_time(greeted, answered, round_trip)
    assert min(*greeted, *answered) >= 4 * SECONDS
    assert min(round_trip) >= 2 * SECONDS


def test_bytes_arrive_unchanged_and_throughput_is_not_limited() -> None:
    sent = os.urandom(32 << 20)
    received = hashlib.sha256()
    with echo_server() as target, delayed_ports([target], SECONDS) as [port]:
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", port)) as connection:

            def send() -> None:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)

            threading.Thread(target=send, daemon=True).start()
            while data := connection.recv(1 << 16):
                received.update(data)
        took = time.monotonic() - began
    assert received.digest() == hashlib.sha256(sent).digest()
    assert took < 40  # a round trip per 64 KiB would take 51 s


def test_concurrent_connections_do_not_wait_for_each_other() -> None:
    with echo_server(b"x") as target, delayed_ports([target], SECONDS) as [port]:
        began = time.monotonic()
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        connections[0].sendall(b"y")
        assert connections[0].recv(1) == b"x"
        assert time.monotonic() - began < 36 * SECONDS  # sequential: 40
        for connection in connections:
            connection.close()


def test_a_connection_to_a_closed_port_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        target = free.getsockname()
    with delayed_ports([target], 0.01) as [port], socket.create_connection(("127.0.0.1", port), 5) as connection:
        assert connection.recv(1) == b""


@pytest.mark.bed
def test_ssh_reaches_every_node_delayed_and_verifies_its_host_key(bed: Bed) -> None:
    def took(config: object, alias: str) -> float:
        began = time.monotonic()
        argv = ["ssh", "-F", str(config), "-o", "BatchMode=yes", alias, "uname", "-n"]
        assert output(argv, timeout=30) == alias
        return time.monotonic() - began

    with delayed(bed, SECONDS) as config:
        for node in bed.nodes[:2]:
            # at least: TCP, versions, key exchange, authentication, a channel, the command
            assert took(config, node.alias) > 6 * 2 * SECONDS

        strange = config.with_name("strange")
        strange.write_text(config.read_text().replace(f"HostKeyAlias {bed.nodes[0].address}", "HostKeyAlias stranger"))
        argv = ["ssh", "-F", str(strange), "-o", "BatchMode=yes", bed.nodes[0].alias, "true"]
        refused = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
        assert "Host key verification failed" in refused.stderr
