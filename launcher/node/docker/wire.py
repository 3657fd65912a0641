"""Connections to this machine's own engine: its socket, or what `docker` here is set to instead."""

from __future__ import annotations

import json
import select
import shlex
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from launcher.node.docker import DIAL_STDIO
from launcher.node.docker.dialstdio import DialFailed

_SOCKET = "/var/run/docker.sock"
_UNIX = "unix://"


class SocketWire:
    """The engine's own socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    @property
    def idle(self) -> bool:
        look = select.poll()  # select() knows no descriptor above 1023, and every node has one
        look.register(self._socket, select.POLLIN)
        return not look.poll(0)

    def sendall(self, data: bytes, /) -> None:
        self._socket.sendall(data)

    def recv(self, size: int, /) -> bytes:
        return self._socket.recv(size)

    def settimeout(self, seconds: float | None, /) -> None:
        self._socket.settimeout(seconds)

    def close(self) -> None:
        self._socket.close()


class ProgramWire(SocketWire):
    """`docker system dial-stdio` on this machine, which knows contexts, hosts and certificates."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._program = subprocess.Popen(
                    shlex.split(DIAL_STDIO),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # a Ctrl-C is for us
                )
            except OSError as error:
                ours.close()
                raise DialFailed(127, str(error)) from error
        super().__init__(ours)
        self._heard = False

    def sendall(self, data: bytes, /) -> None:
        """Raises DialFailed."""
        try:
            super().sendall(data)
        except ConnectionError as error:
            raise self._failure() from error

    def recv(self, size: int, /) -> bytes:
        """Raises DialFailed where it ended instead of answering."""
        try:
            data = super().recv(size)
        except ConnectionError as error:
            raise self._failure() from error
        if not data and not self._heard:
            raise self._failure()
        self._heard = True
        return data

    def _failure(self) -> DialFailed:
        assert self._program.stderr is not None
        words = self._program.stderr.read().decode(errors="replace").strip()
        return DialFailed(self._program.wait(), words)

    def close(self) -> None:
        super().close()
        self._program.kill()
        self._program.wait()
        assert self._program.stderr is not None
        self._program.stderr.close()


def dial(environment: Mapping[str, str]) -> SocketWire:
    """To the engine of DOCKER_HOST, else of the docker context in use, else of the usual socket.

    Raises PermissionError, FileNotFoundError, ConnectionRefusedError, DialFailed.
    """
    host = environment.get("DOCKER_HOST", "")
    if host.startswith(_UNIX):
        return _socket(host.removeprefix(_UNIX))
    if host or _context(environment):
        return ProgramWire()
    return _socket(_SOCKET)


def _socket(path: str) -> SocketWire:
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.connect(path)
    except BaseException:
        connected.close()
        raise
    return SocketWire(connected)


def _context(environment: Mapping[str, str]) -> str:
    """Of DOCKER_CONTEXT or of docker's own settings; "" for the default."""
    name = environment.get("DOCKER_CONTEXT", "")
    if not name:
        folder = environment.get("DOCKER_CONFIG") or Path("~/.docker").expanduser()
        try:
            settings = json.loads(Path(folder, "config.json").read_bytes())
            name = str(settings.get("currentContext") or "")
        except (OSError, ValueError, AttributeError):  # docker, too, goes on without them
            return ""
    return "" if name == "default" else name
