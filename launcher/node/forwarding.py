"""Forwards a port of a node through its sshd, for a caller that can reach the node only by ssh."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from launcher.errors import LauncherError, UsageError
from launcher.node.machine import Machine, Tunnel

_PIECE = 1 << 16


@contextlib.contextmanager
def forwarded(machine: Machine, port: int, local: int = 0) -> Iterator[int]:
    """Forward a loopback port of this machine to a port of the node; yield its number. local: 0 for any free port.

    Raises UsageError if the local port is in use.
    """
    try:
        listener = socket.create_server(("127.0.0.1", local))
    except OSError as error:
        what = f"cannot listen on port {local} of this machine: {error.strerror}"
        raise UsageError(f"-L {local}:{port}", what, f"choose another local port: -L OTHER:{port}") from error
    with listener:
        threading.Thread(target=_serve, args=(listener, machine, port), daemon=True).start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            with contextlib.suppress(OSError):  # wakes accept() on Linux; elsewhere close() does
                listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, machine: Machine, port: int) -> None:
    with contextlib.suppress(OSError):  # the listener was closed
        while True:
            near = listener.accept()[0]
            try:
                far = machine.tunnel(port)
            except LauncherError:  # refused there: close the connection, so that its client reports an error
                near.close()
                continue
            threading.Thread(target=_pump, args=(far, near), daemon=True).start()
            threading.Thread(target=_pump, args=(near, far), daemon=True).start()


def _pump(source: Tunnel, target: Tunnel) -> None:
    with contextlib.suppress(OSError, EOFError):
        while data := source.recv(_PIECE):
            target.sendall(data)
    with contextlib.suppress(OSError, EOFError):
        target.shutdown(socket.SHUT_WR)
