"""A port of a node, reached through its sshd: for a caller whom the node's network lets in by ssh alone."""

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
    """A port of this machine's loopback interface that leads to that port of the node, one connection at a time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_serve, args=(listener, machine, port), daemon=True).start()
        yield int(listener.getsockname()[1])


def _serve(listener: socket.socket, machine: Machine, port: int) -> None:
    with contextlib.suppress(OSError):  # the listener is closed at the end of the transfer
        while True:
            near = listener.accept()[0]
            try:
                far = machine.tunnel(port)
            except LauncherError:  # its sshd allows none: the process that connected is sent away, and says so
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
