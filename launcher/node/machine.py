"""Where an engine's node is: what this machine and one behind ssh (node/ssh/machine.py) can both do."""

from __future__ import annotations

import contextlib
import errno
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from launcher.errors import NodeUnfit
from launcher.model.facts import Reach
from launcher.node import terminal as terminals
from launcher.node.ssh.wire import dial
from launcher.node.streams import CommandStream, LocalStream


@dataclass(frozen=True)
class Done:
    """A command that has ended. `code` is -1 where a signal ended it. Times: of time.time(), here."""

    code: int
    out: bytes
    err: bytes
    started: float  # when the server had taken the command
    first: float  # the first byte of output came; the end where there was none

    @property
    def complaint(self) -> str:
        """What it wrote to stderr, else to stdout, short enough for an error message."""
        words = (self.err or self.out).decode(errors="replace").strip()
        return words if len(words) <= 600 else f"{words[:600]}..."


class Machine(Protocol):
    """Commands on a node, connections from it."""

    @property
    def node(self) -> str: ...

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float = 60.0) -> Done: ...

    def open(self, argv: Sequence[str]) -> CommandStream:
        """Start a command whose output is read as it comes."""

    def interact(self, argv: Sequence[str], *, terminal: bool, interrupt: Callable[[], None]) -> int:
        """Run a command joined to the caller's terminal or pipes; its exit code.

        terminal: with one of its own. Without one, Ctrl-C calls `interrupt` instead of ending this.
        """

    def kill_on_disconnect(self, argv: Sequence[str]) -> AbstractContextManager[Callable[[str], None]]:
        """A command that is to clean up when the caller is gone, which is when its stdin ends without a line `done`.

        Yields a function that writes it a line.
        """

    def reach(self, address: str, port: int, timeout: float, expect: str | None = None) -> Reach: ...

    def host_key(self) -> str | None: ...

    def ssh_port(self) -> int | None: ...

    @property
    def user(self) -> str: ...


def run_script(machine: Machine, script: str, *arguments: str, timeout: float = 60.0) -> Done:
    """Of POSIX sh, with its $1, $2, ... Raises what Machine.run raises."""
    return machine.run(["sh", "-c", script, "launcher", *arguments], timeout=timeout)


class LocalMachine:
    """This machine."""

    def __init__(self, node: str, user: str) -> None:
        self.node = node
        self.user = user

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float = 60.0) -> Done:
        """Raises NodeUnfit when it cannot be started or does not end in time."""
        started = time.time()
        try:
            done = subprocess.run(argv, input=stdin, capture_output=True, timeout=timeout, check=False)
        except FileNotFoundError as error:
            raise NodeUnfit(self.node, f"there is no {argv[0]}", "install it") from error
        except subprocess.TimeoutExpired as error:
            raise NodeUnfit(self.node, f"`{argv[0]}` took over {timeout:g} s", "is this machine overloaded?") from error
        return Done(done.returncode, done.stdout, done.stderr, started, time.time())

    def open(self, argv: Sequence[str]) -> CommandStream:
        """Raises OSError when it cannot be started."""
        return LocalStream(argv)

    def interact(self, argv: Sequence[str], *, terminal: bool, interrupt: Callable[[], None]) -> int:
        """Raises NodeUnfit when it cannot be started."""
        try:
            return terminals.here(argv, terminal=terminal, interrupt=interrupt)
        except FileNotFoundError as error:
            raise NodeUnfit(self.node, f"there is no {argv[0]}", "install it") from error

    def kill_on_disconnect(self, argv: Sequence[str]) -> AbstractContextManager[Callable[[str], None]]:
        return terminals.kill_on_disconnect(argv)

    def reach(self, address: str, port: int, timeout: float, expect: str | None = None) -> Reach:
        try:
            connection = dial(address, port, time.monotonic() + timeout)
        except ConnectionRefusedError:
            return Reach.REFUSED
        except PermissionError:
            return Reach.UNKNOWN
        except OSError as error:
            return Reach.UNKNOWN if error.errno in (errno.EINVAL, errno.EAFNOSUPPORT) else Reach.SILENT
        with contextlib.closing(connection):
            if expect is None:
                return Reach.OPEN
            from launcher.node.ssh.handshake import proves  # paramiko, which plain processes do without

            return Reach.OPEN if proves(connection, expect, timeout) else Reach.OTHER

    def host_key(self) -> None:
        return None

    def ssh_port(self) -> None:
        return None
