"""The stream below an ssh connection."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from launcher.node.ssh.wire import SshSocket, dial, run_proxy


def test_close_wakes_a_reader_at_once() -> None:
    ours, _theirs = socket.socketpair()
    wire = SshSocket(ours)
    closer = threading.Timer(0.2, wire.close)
    closer.start()
    assert wire.recv(1) == b""  # otherwise TimeoutError, after a second


def test_silence_times_out_after_a_second_whatever_paramiko_requests() -> None:
    ours, _theirs = socket.socketpair()
    wire = SshSocket(ours)
    wire.settimeout(0.1)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        wire.recv(1)
    assert time.monotonic() - began > 0.9


def test_the_wire_records_when_data_last_arrived() -> None:
    ours, theirs = socket.socketpair()
    wire = SshSocket(ours)
    wire.heard -= 60
    wire.send(b"to them")
    assert time.monotonic() - wire.heard > 59
    theirs.sendall(b"hello")
    assert [wire.recv(2), wire.recv(3)] == [b"he", b"llo"]
    assert time.monotonic() - wire.heard < 50


def test_a_closed_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        dial("127.0.0.1", port, time.monotonic() + 20)


def test_a_name_that_does_not_exist_says_so() -> None:
    with pytest.raises((socket.gaierror, TimeoutError)):
        dial("no-such-host.invalid", 22, time.monotonic() + 5)


def test_without_time_there_is_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(TimeoutError):
        dial("127.0.0.1", server.getsockname()[1], time.monotonic() - 1)


def test_a_proxy_command_is_connected_and_ends_with_the_wire() -> None:
    wire = run_proxy("sh -c 'echo message >&2; exec cat'")
    wire.send(b"echo")
    assert wire.recv(4) == b"echo"
    assert wire.proxy_errors() == "message"
    wire.close()
