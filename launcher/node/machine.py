"""Machines that engines run on: the interface of this machine and of machines over ssh (node/ssh/machine.py)."""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from launcher.errors import NodeUnfit, NodeUnreachable
from launcher.model.facts import Reach
from launcher.model.forward import Forward
from launcher.model.home import with_home
from launcher.model.limits import DEFAULT_LIMITS, AnswerLimits
from launcher.node import terminal as terminals
from launcher.node.parallel import in_background
from launcher.node.ssh.wire import dial

PIECE = 1 << 16
OPEN_TIMEOUT = 30.0  # seconds to start a command
_CLOSE_TIMEOUT = 5.0  # seconds for a command to exit on its own, and then after each signal
# $1: an address, $2: a port, $3: seconds. The output is marked, because a login shell may print other lines.
_CONNECT = r"""
output=$(LC_ALL=C timeout "$3" bash -c ': </dev/tcp/$1/$2' bash "$1" "$2" 2>&1)
echo "@@connect $? $output"
"""
_TIMED_OUT = (124, 143)  # exit codes of `timeout`: coreutils, busybox
_SILENT = ("timed out", "no route", "unreachable", "host is down")


@dataclass(frozen=True)
class Done:
    """A command that has exited. `code` is negative if a signal killed it. Times are time.time() of this machine."""

    code: int
    out: bytes
    err: bytes
    started: float  # when the server had accepted the command
    first: float  # when the first byte of output arrived; the end if there was none

    @property
    def message(self) -> str:
        """Its stderr, or its stdout if stderr is empty, shortened for an error message."""
        text = (self.err or self.out).decode(errors="replace").strip()
        return text if len(text) <= 600 else f"{text[:600]}..."


class CommandStream(Protocol):
    """A running command with its three streams. Not thread-safe, except for end()."""

    def send(self, data: bytes) -> None:
        """Write to its stdin. Does nothing if it has exited, or the connection is lost; receive() reports that."""

    def end_input(self) -> None: ...

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        """Return new output on stdout and stderr; both empty if none came within `timeout` seconds; None at the end.

        Raises NodeUnreachable if the connection is lost.
        """

    def exit_code(self) -> int:
        """To call once receive() has returned None; negative if a signal killed the command. Raises NodeUnreachable."""

    def end(self) -> None:
        """Stop it: receive() returns the output written so far, and then None."""

    def close(self) -> None:
        """Close its streams: a script that reads its stdin, or writes to its stdout, exits then."""


class Tunnel(Protocol):
    """A connection with the methods of a socket."""

    def recv(self, nbytes: int, /) -> bytes: ...

    def sendall(self, data: bytes, /) -> None: ...

    def shutdown(self, how: int, /) -> None: ...


class Machine(Protocol):
    """Commands on a node and connections from it. A base class."""

    node: str
    user: str
    limits: AnswerLimits

    def start(self, argv: Sequence[str], *, stdin: bool, timeout: float) -> CommandStream:
        """Start a command, within `timeout` seconds. stdin: it will get input. Raises NodeUnreachable, NodeUnfit."""

    def open(self, argv: Sequence[str], *, lasting: bool = False) -> CommandStream:  # noqa: ARG002 - for some machines
        """Start a command whose output is read as it arrives.

        lasting: it runs as long as the run; a machine with few concurrent sessions may refuse it.
        """
        return self.start(argv, stdin=True, timeout=OPEN_TIMEOUT)

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Done:
        """Run a command and return its output. timeout: seconds; None: that of `limits`.

        Raises NodeUnreachable, also if it takes longer; NodeUnfit if it prints more than `limits` allow.
        """
        seconds = timeout or self.limits.seconds
        deadline = time.monotonic() + seconds
        stream = self.start(argv, stdin=bool(stdin), timeout=seconds)

        def feed() -> None:
            stream.send(stdin)
            stream.end_input()

        try:
            if stdin:
                in_background(feed)  # in parallel, otherwise both sides could block
            return self._read_all(stream, abbreviate(argv), seconds, deadline)
        except BaseException:
            stream.end()
            raise
        finally:
            stream.close()

    def typed(self, command: str) -> str:
        """Return the command line with which a user runs a command there, for messages. command: of the shell there."""
        return command

    def script(self, text: str, *arguments: str, stdin: bytes = b"", timeout: float | None = None) -> Done:
        """Run a POSIX shell script, whose exit code the caller judges; Files.run is for those that must succeed.

        arguments: its $1, $2, ...; input of a user must only be in these. Raises the errors of run().
        """
        return self.run(shell(text, *arguments), stdin, timeout)

    def _read_all(self, stream: CommandStream, command: str, seconds: float, deadline: float) -> Done:
        began, first = time.time(), 0.0
        out, err = bytearray(), bytearray()
        while (found := stream.receive(max(0.0, deadline - time.monotonic()))) is not None:
            out += found[0]
            err += found[1]
            if any(found):
                first = first or time.time()
            if len(out) + len(err) > self.limits.size:
                fix = "check its login shell and its output folder, or raise limits.answer in your settings file"
                raise NodeUnfit(self.node, f"`{command}` printed over {self.limits.size >> 20} MiB", fix)
            if time.monotonic() >= deadline:  # even if output still arrives slowly
                fix = "check the load of the node and of its disk, or raise limits.wait in your settings file"
                raise NodeUnreachable(self.node, f"`{command}` did not exit within {seconds:.0f} s", fix)
        return Done(stream.exit_code(), bytes(out), bytes(err), began, first or time.time())

    def interact(
        self, argv: Sequence[str], *, terminal: bool, interrupt: Callable[[], None], ports: Sequence[Forward] = ()
    ) -> int:
        """Run a command attached to the caller's terminal or pipes and return its exit code.

        terminal: allocate one. Without one, Ctrl-C calls `interrupt` instead of interrupting this process. ports:
        forwarded while it runs, if the machine is remote.
        """

    def reach(self, address: str, port: int, timeout: float) -> Reach:
        """Try a TCP connection from the node with bash; UNKNOWN if it has none. Raises NodeUnreachable, NodeUnfit."""
        seconds = math.ceil(timeout)
        done = self.script(_CONNECT, address, str(port), str(seconds), timeout=seconds + OPEN_TIMEOUT)
        return outcome(done.out.decode(errors="replace"))

    def has_host_key(self, address: str, port: int, host_key: str, timeout: float) -> bool | None:
        """Whether the sshd at this address, seen from the node, has that ssh host key (base64); None if unknown."""

    def tunnel(self, port: int) -> Tunnel:
        """Return a connection to a port of the node's loopback interface. Raises NodeUnreachable if that fails."""
        raise NodeUnreachable(self.node, f"has no ssh connection to forward its port {port}")

    def host_key(self) -> str | None:
        """Return the verified ssh host key of this node (base64); None if it is not reached over ssh."""
        return None

    def most_sessions(self) -> int | None:
        """Return how many sessions its sshd allows on a connection (MaxSessions); None if enough for a run."""
        return None


def shell(script: str, *arguments: str) -> list[str]:
    """Return the argv of a POSIX shell script with its $1, $2, ..."""
    return ["sh", "-c", script, "launcher", *arguments]


def outcome(printed: str) -> Reach:
    """Parse the output of _CONNECT: bash prints the messages of strerror(), in English."""
    found = re.search(r"@@connect (\d+) (.*)", printed, re.DOTALL)
    if found is None:
        return Reach.UNKNOWN
    code, message = int(found[1]), found[2].lower()
    if code == 0:
        return Reach.OPEN
    if code in _TIMED_OUT or any(text in message for text in _SILENT):
        return Reach.SILENT
    return Reach.REFUSED if "connection refused" in message else Reach.UNKNOWN


def abbreviate(argv: Sequence[str]) -> str:
    """Return the start of a command, for error messages."""
    return shlex.join(argv[:3])[:60]


@contextlib.contextmanager
def kill_on_disconnect(machine: Machine, argv: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """Run a command that cleans up if this process exits: if its stdin ends without a line `done`.

    stdin ends with this process, even if it is killed, or with the connection. Yields a function that sends it a line.
    Raises NodeUnreachable.
    """
    stream = machine.open(argv)

    def send(line: str) -> None:
        stream.send(f"{line}\n".encode())

    try:
        yield send
    finally:
        send("done")
        stream.close()


class LocalStream:
    """Implements CommandStream with a local process in a new session, so that Ctrl-C does not reach it."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Raises OSError if it cannot be started."""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True, env=with_home(os.environ)
        )
        self._stdin, *self._outputs = filter(None, (self._process.stdin, self._process.stdout, self._process.stderr))
        self._selector = selectors.DefaultSelector()
        for index, stream in enumerate(self._outputs):
            self._selector.register(stream, selectors.EVENT_READ, index)

    def send(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: closed by another thread
            while data:
                data = data[self._stdin.write(data) or 0 :]

    def end_input(self) -> None:
        self._stdin.close()

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        if not self._selector.get_map():
            return None
        found = [b"", b""]
        for key, _ in self._selector.select(timeout):
            piece = os.read(key.fd, PIECE)
            if not piece:
                self._selector.unregister(key.fileobj)
            found[key.data] = piece
        if not any(found) and not self._selector.get_map():
            return None
        return found[0], found[1]

    def exit_code(self) -> int:
        """A process that has closed its outputs but is still running is terminated."""
        return self._wait()

    def _wait(self) -> int:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                return self._process.wait(_CLOSE_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._signal(number)
        return self._process.wait()

    def end(self) -> None:
        self._stdin.close()
        self._signal(signal.SIGTERM)

    def close(self) -> None:
        self._selector.close()
        for stream in (self._stdin, *self._outputs):
            stream.close()
        self._wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:  # else its number may be another process's
            with contextlib.suppress(ProcessLookupError):  # the process group includes its children
                os.killpg(self._process.pid, number)


class LocalMachine(Machine):
    """This machine."""

    def __init__(self, node: str, user: str, limits: AnswerLimits = DEFAULT_LIMITS) -> None:
        self.node = node
        self.user = user
        self.limits = limits

    def start(self, argv: Sequence[str], *, stdin: bool, timeout: float) -> CommandStream:  # noqa: ARG002 - immediate
        """Raises NodeUnfit if the program is not installed."""
        try:
            stream = LocalStream(argv)
        except FileNotFoundError as error:
            raise NodeUnfit(self.node, f"{argv[0]} is not installed", "install it") from error
        if not stdin:
            stream.end_input()
        return stream

    def interact(
        self,
        argv: Sequence[str],
        *,
        terminal: bool,
        interrupt: Callable[[], None],
        ports: Sequence[Forward] = (),  # noqa: ARG002 - local ports need no forwarding
    ) -> int:
        """Raises NodeUnfit if the program is not installed."""
        try:
            return terminals.run_attached(argv, terminal=terminal, interrupt=interrupt, env=with_home(os.environ))
        except FileNotFoundError as error:
            raise NodeUnfit(self.node, f"{argv[0]} is not installed", "install it") from error

    def has_host_key(self, address: str, port: int, host_key: str, timeout: float) -> bool | None:
        from launcher.node.ssh.handshake import has_key  # loads paramiko, which plain processes do not need

        try:
            connection = dial(address, port, time.monotonic() + timeout)
        except OSError:
            return None
        with contextlib.closing(connection):
            return has_key(connection, host_key, timeout)
