"""Forwards a port of a node through its sshd, for a caller that can reach the node only by ssh."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from launcher.errors import LauncherError
from launcher.node.machine import Machine, Tunnel

_PIECE = 1 << 16


@contextlib.contextmanager
def tunnel(machine: Machine, port: int) -> Iterator[int]:
    """Forward a loopback port of this machine to a port of the node; yield its number."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_serve, args=(listener, machine, port), daemon=True).start()
        yield int(listener.getsockname()[1])


def _serve(listener: socket.socket, machine: Machine, port: int) -> None:
    with contextlib.suppress(OSError):  # the listener is closed at the end of the transfer
        while True:
            near = listener.accept()[0]
            try:
                far = machine.tunnel(port)
            except LauncherError:  # refused by its sshd: close the connection, so that the process reports an error
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
