"""Connections to a Docker engine: its local socket, or `docker system dial-stdio` as a subprocess or over ssh.

dial-stdio finds the engine as the user's `docker` does: by environment, context and certificates.
"""

from __future__ import annotations

import io
import math
import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import paramiko
from docker.context.config import get_current_context_name
from urllib3.util import wait_for_read

from launcher.errors import EngineAbsent, EngineUnavailable
from launcher.node.docker import DIAL_STDIO
from launcher.node.ssh.handshake import has_ended
from launcher.node.ssh.machine import SshStream

CONNECT_TIMEOUT = 60.0  # seconds, until the client calls settimeout()
SOCKET = "/var/run/docker.sock"
_EXIT_TIMEOUT = 5.0
_PIECE = 1 << 16
_UNIX = "unix://"


class DialFailed(ConnectionError):  # noqa: N818 - inside launcher.node only
    """`docker system dial-stdio` exited before the engine answered: its exit code and stderr."""

    def __init__(self, code: int, stderr: str) -> None:
        super().__init__(stderr)
        self.code = code


class EngineConnection:
    """The engine's socket or a running dial-stdio, with the socket interface that http.client expects.

    `exit_of`: returns the exit code and stderr of dial-stdio, or None if it has not exited. `hang_up` may be called
    twice.
    """

    longest: float = math.inf  # bytes of a response
    timed = True  # the whole response must arrive within the timeout
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
        """Whether the connection is open with nothing unread, so that it can be reused."""
        stream = self._stream
        if isinstance(stream, socket.socket):
            return not wait_for_read(stream, timeout=0)
        return not (stream.closed or stream.eof_received or stream.recv_ready())

    def sendall(self, data: bytes) -> None:
        """Raises DialFailed, ConnectionResetError, TimeoutError."""
        try:
            # Channel.sendall copies all remaining data for every packet: small pieces keep this linear
            for start in range(0, len(data), _PIECE):
                self._stream.sendall(data[start : start + _PIECE])
        except TimeoutError:
            raise
        except (OSError, EOFError) as error:
            raise self._failure(str(error)) from error

    def receive(self, size: int) -> bytes:
        """Return b"" at the end. Raises DialFailed, ConnectionResetError, TimeoutError."""
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
        """Return a reader for one response; closing it leaves the connection open for the next request."""
        self._readers += 1
        return io.BufferedReader(_Response(self), _PIECE)

    def settimeout(self, seconds: float | None) -> None:
        self.timeout = seconds or CONNECT_TIMEOUT
        self._stream.settimeout(seconds)

    def shutdown(self, _how: int) -> None:
        self._hang_up()

    def close(self) -> None:
        """Wait for the last reader: http.client calls this when a response without a length starts."""
        self._closing = True
        if self._readers <= 0:
            self._hang_up()

    def reader_closed(self) -> None:
        self._readers -= 1
        if self._closing:
            self.close()

    def _failure(self, why: str) -> ConnectionError:
        """Return DialFailed if dial-stdio exited without an answer, else an error for a lost connection."""
        ended = None if self._answered else self._exit_of()
        if ended is None:
            return ConnectionResetError(f"the connection to the engine was lost: {why}")
        return DialFailed(ended[0], ended[1].decode(errors="replace").strip())


class _Response(io.RawIOBase):
    def __init__(self, source: EngineConnection) -> None:
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
            # not a ValueError: http.client reports that as a malformed chunk, which counts as a lost connection
            raise OverflowError(f"the response is over {longest / (1 << 20):.0f} MiB; raise limits.answer if needed")
        if self._source.timed and data and time.monotonic() > self._until:
            raise TimeoutError("the response did not end in time")
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._source.reader_closed()


def dial_over_ssh(command: Callable[[str], SshStream]) -> EngineConnection:
    """Connect through ssh. `command`: SshMachine.command of the node. Raises NodeUnreachable."""
    stream = command(DIAL_STDIO)
    channel = stream.channel

    def exit_of() -> tuple[int, bytes] | None:
        if not channel.status_event.wait(_EXIT_TIMEOUT) or has_ended(channel.get_transport()):
            return None
        return channel.exit_status, b"".join(iter(partial(channel.recv_stderr, 4096), b""))

    return EngineConnection(channel, exit_of, stream.close)


def dial_local(node: str) -> EngineConnection:
    """Connect to the engine of DOCKER_HOST, else of the current docker context, else at the default socket.

    Raises EngineAbsent, EngineUnavailable if DOCKER_HOST is another machine, PermissionError, FileNotFoundError,
    ConnectionRefusedError, DialFailed.
    """
    host = os.environ.get("DOCKER_HOST", "")
    if host.startswith("ssh://"):
        fix = f"name the node {host[6:]} instead"
        raise EngineUnavailable(node, f"DOCKER_HOST is {host}, but `local` means this machine's own engine", fix)
    if host.startswith(_UNIX):
        return _unix_socket(host.removeprefix(_UNIX))
    asked_for = host or os.environ.get("DOCKER_CONTEXT")
    context = asked_for or get_current_context_name()
    try:
        return _unix_socket(SOCKET) if context in (None, "", "default") else _program()
    except (FileNotFoundError, DialFailed) as error:
        if asked_for or shutil.which("docker"):
            raise
        fix = "install Docker Engine 20.10 or newer; runtime: process needs none"
        raise EngineAbsent(node, "no container engine is installed on this machine", fix) from error


def _unix_socket(path: str) -> EngineConnection:
    stream = socket.socket(socket.AF_UNIX)
    try:
        stream.settimeout(CONNECT_TIMEOUT)
        stream.connect(path)
    except BaseException as error:
        stream.close()
        if isinstance(error, OSError) and error.errno:  # the system does not say which socket
            raise OSError(error.errno, f"{error.strerror}: {_UNIX}{path}") from error
        raise
    return EngineConnection(stream, lambda: None, stream.close)


def _program() -> EngineConnection:
    """Run dial-stdio as a subprocess. Raises DialFailed if `docker` is not installed."""
    near, far = socket.socketpair()
    with far:
        try:
            program = subprocess.Popen(
                shlex.split(DIAL_STDIO),
                stdin=far.fileno(),
                stdout=far.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,  # not interrupted by Ctrl-C
            )
        except OSError as error:
            near.close()
            raise DialFailed(127, str(error)) from error

    def exit_of() -> tuple[int, bytes] | None:
        try:
            stderr = program.communicate(timeout=_EXIT_TIMEOUT)[1]
        except (subprocess.TimeoutExpired, ValueError):  # ValueError: stderr was closed by hang_up()
            return None
        return program.returncode, stderr

    def hang_up() -> None:
        near.close()
        with program:  # on exit: closes stderr and waits
            program.kill()

    return EngineConnection(near, exit_of, hang_up)
