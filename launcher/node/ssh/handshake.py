"""The ssh handshake on paramiko's Transport, TCP connections from the server, verification of host keys."""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import paramiko

from launcher.node.ssh import known_hosts
from launcher.node.ssh.wire import SshSocket, Stream

# aes128-gcm needs no separate MAC: 2 to 3 times the throughput of paramiko's first choice, aes128-ctr
FAST_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr")
_WINDOW = 8 << 20  # bytes: paramiko's 2 MiB are too few for a fast network with a long round trip
_END_TIMEOUT = 0.2
_MARGIN = 5.0  # seconds more than our own time limit, which should be reached first
_LOG = "launcher.ssh"
_CONNECT_FAILED = 2  # SSH_OPEN_CONNECT_FAILED, RFC 4254 5.1

logging.getLogger(_LOG).addHandler(logging.NullHandler())  # otherwise Python prints paramiko's errors to stderr


def handshake(wire: SshSocket, host_key_algorithms: Sequence[str], deadline: float) -> paramiko.Transport:
    """Exchange keys with the server; the caller verifies the host key. deadline: of time.monotonic().

    Raises TimeoutError, EOFError (it hung up), OSError, paramiko.SSHException.
    """
    like_a_socket: Any = wire  # SshSocket has all methods of a socket that paramiko uses
    transport = paramiko.Transport(like_a_socket, default_window_size=_WINDOW)
    transport.set_log_channel(_LOG)
    options = transport.get_security_options()
    fast = [name for name in FAST_CIPHERS if name in options.ciphers]
    options.ciphers = [*fast, *(name for name in options.ciphers if name not in fast)]
    usable = {*options.key_types, *known_hosts.CERTIFIED}
    options.key_types = [name for name in host_key_algorithms if name in usable]
    left = max(0.1, deadline - time.monotonic())
    transport.banner_timeout = transport.handshake_timeout = left + _MARGIN
    over = threading.Event()
    try:
        transport.start_client(over)
        over.wait(left)
    except BaseException:
        wire.close()
        raise
    if not transport.is_active():
        raise transport.get_exception() or paramiko.SSHException("the server ended the key exchange")
    if not transport.initial_kex_done:
        wire.close()
        raise TimeoutError("the ssh handshake did not finish in time")
    return transport


def has_ended(transport: paramiko.Transport) -> bool:
    """Whether a channel ended because of its connection: paramiko wakes channels shortly before it becomes inactive."""
    transport.join(_END_TIMEOUT)
    return not transport.is_active()


def open_tunnel(transport: paramiko.Transport, host: str, port: int, timeout: float) -> paramiko.Channel:
    """Return a TCP connection from the server (direct-tcpip).

    Raises paramiko.ChannelException if the server fails to, TimeoutError; SSHException, EOFError if the server is lost.
    """
    began = time.monotonic()
    try:
        return transport.open_channel("direct-tcpip", (host, port), ("127.0.0.1", 0), timeout=timeout)
    except paramiko.SSHException as error:
        if isinstance(error, paramiko.ChannelException) or has_ended(transport):
            raise
        if time.monotonic() - began >= timeout:
            raise TimeoutError(f"no response within {timeout:g} s") from error
        # paramiko keeps one ChannelException per connection: another channel refused at the same time has taken it
        raise paramiko.ChannelException(_CONNECT_FAILED, "Connect failed") from error


def has_key(stream: Stream, expected: str, timeout: float) -> bool:
    """Whether an ssh server behind this stream has the private half of that host key, as a key exchange proves."""
    blob = base64.b64decode(expected)
    wire = SshSocket(stream)
    try:
        signatures = known_hosts.signatures(known_hosts.type_of(blob))
        transport = handshake(wire, signatures, time.monotonic() + timeout)
        return transport.get_remote_server_key().asbytes() == blob
    except (paramiko.SSHException, EOFError, OSError):
        return False  # no ssh server, or one without this key
    finally:
        wire.close()
