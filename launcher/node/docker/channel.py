"""Connections to a Docker engine: its socket here, or `docker system dial-stdio` as a program or on an ssh channel.

dial-stdio finds the engine as its user's `docker` does: environment, context, certificates.
"""

from __future__ import annotations

import io
import math
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import paramiko
from docker.context.config import get_current_context_name
from urllib3.util import wait_for_read

from launcher.errors import EngineUnavailable
from launcher.node.docker import DIAL_STDIO
from launcher.node.ssh.handshake import has_ended
from launcher.node.ssh.machine import SshStream

CONNECT_TIMEOUT = 60.0  # seconds, until the client sets its own
SOCKET = "/var/run/docker.sock"
_EXIT_TIMEOUT = 5.0
_PIECE = 1 << 16
_UNIX = "unix://"


class DialFailed(ConnectionError):  # noqa: N818 - inside launcher.node only
    """`docker system dial-stdio` ended before the engine answered: its exit code and what it wrote to stderr."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code


class Connection:
    """The engine's socket or a running dial-stdio as the socket that http.client expects.

    `exit_of`: dial-stdio's exit code and stderr, None where it has not ended by itself. `hang_up` may be called twice.
    """

    longest: float = math.inf  # bytes of an answer
    timed = True  # an answer has to end within the time-out
    timeout = CONNECT_TIMEOUT

    def __init__(
        self,
        stream: paramiko.Channel | socket.socket,
        exit_of: Callable[[], tuple[int, bytes] | None],
        hang_up: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._exit_of = exit_of
        self._hang_up = hang_up
        self._answered = False
        self._closing = False
        self._readers = 0

    @property
    def idle(self) -> bool:
        """Still open with nothing unread: fit for another request."""
        stream = self._stream
        if isinstance(stream, socket.socket):
            return not wait_for_read(stream, timeout=0)
        return not (stream.closed or stream.eof_received or stream.recv_ready())

    def sendall(self, data: bytes) -> None:
        """Raises DialFailed, ConnectionResetError, TimeoutError."""
        try:
            # a channel's sendall copies all that is left for every packet: small pieces keep that linear
            for start in range(0, len(data), _PIECE):
                self._stream.sendall(data[start : start + _PIECE])
        except TimeoutError:
            raise
        except (OSError, EOFError) as error:
            raise self._failure(str(error)) from error

    def receive(self, size: int) -> bytes:
        """b"" at the end. Raises DialFailed, ConnectionResetError, TimeoutError."""
        try:
            data = self._stream.recv(size)
        except TimeoutError:
            raise
        except (OSError, EOFError) as error:
            raise self._failure(str(error)) from error
        if not data and not self._answered:
            raise self._failure("no answer")
        self._answered = True
        return data

    def makefile(self, *_: object, **__: object) -> io.BufferedReader:
        """http.client makes and closes one a response; the connection stays for the next request."""
        self._readers += 1
        return io.BufferedReader(_Response(self), _PIECE)

    def settimeout(self, seconds: float | None) -> None:
        self.timeout = seconds or CONNECT_TIMEOUT
        self._stream.settimeout(seconds)

    def shutdown(self, _how: int) -> None:
        self._hang_up()

    def close(self) -> None:
        """Not before the last reader: http.client closes it when a response without a length begins."""
        self._closing = True
        if self._readers <= 0:
            self._hang_up()

    def reader_closed(self) -> None:
        self._readers -= 1
        if self._closing:
            self.close()

    def _failure(self, why: str) -> ConnectionError:
        """DialFailed where dial-stdio ended without an answer; else the connection was lost."""
        ended = None if self._answered else self._exit_of()
        if ended is None:
            return ConnectionResetError(f"the connection to the engine was lost: {why}")
        return DialFailed(ended[0], ended[1].decode(errors="replace").strip())


class _Response(io.RawIOBase):
    def __init__(self, source: Connection) -> None:
        super().__init__()
        self._source = source
        self._length = 0
        self._until = time.monotonic() + source.timeout

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.receive(len(buffer))
        buffer[: len(data)] = data
        self._length += len(data)
        if self._length > (longest := self._source.longest):
            # not a ValueError: http.client takes one for a malformed chunk, and then for a lost connection
            raise OverflowError(f"an answer of over {longest / (1 << 20):.0f} MiB; limits.answer may be raised")
        if self._source.timed and data and time.monotonic() > self._until:
            raise TimeoutError("its answer did not end in time")
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._source.reader_closed()


def dial_over_ssh(command: Callable[[str], SshStream]) -> Connection:
    """`command`: that of a node's SshMachine. Raises NodeUnreachable."""
    stream = command(DIAL_STDIO)
    channel = stream.channel

    def exit_of() -> tuple[int, bytes] | None:
        if not channel.status_event.wait(_EXIT_TIMEOUT) or has_ended(channel.get_transport()):
            return None
        return channel.exit_status, b"".join(iter(partial(channel.recv_stderr, 4096), b""))

    return Connection(channel, exit_of, stream.close)


def dial_local(node: str) -> Connection:
    """To the engine of DOCKER_HOST, else of the docker context in use, else of the usual socket.

    Raises EngineUnavailable for another machine's, PermissionError, FileNotFoundError, ConnectionRefusedError,
    DialFailed.
    """
    host = os.environ.get("DOCKER_HOST", "")
    if host.startswith("ssh://"):
        fix = f"name the node {host[6:]} instead"
        raise EngineUnavailable(node, f"DOCKER_HOST is {host}, but `local` means this machine's own engine", fix)
    if host.startswith(_UNIX):
        return _unix_socket(host.removeprefix(_UNIX))
    context = os.environ.get("DOCKER_CONTEXT") or get_current_context_name()
    return _unix_socket(SOCKET) if not host and context in (None, "", "default") else _program()


def _unix_socket(path: str) -> Connection:
    stream = socket.socket(socket.AF_UNIX)
    try:
        stream.settimeout(CONNECT_TIMEOUT)
        stream.connect(path)
    except BaseException:
        stream.close()
        raise
    return Connection(stream, lambda: None, stream.close)


def _program() -> Connection:
    """Raises DialFailed where there is no docker program."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            program = subprocess.Popen(
                shlex.split(DIAL_STDIO),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C is for us
            )
        except OSError as error:
            ours.close()
            raise DialFailed(127, str(error)) from error

    def exit_of() -> tuple[int, bytes] | None:
        try:
            words = program.communicate(timeout=_EXIT_TIMEOUT)[1]
        except (subprocess.TimeoutExpired, ValueError):  # ValueError: it was closed meanwhile
            return None
        return program.returncode, words

    def hang_up() -> None:
        ours.close()
        with program:  # its end closes stderr and waits
            program.kill()

    return Connection(ours, exit_of, hang_up)
