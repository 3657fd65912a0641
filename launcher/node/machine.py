"""Where an engine's node is: what this machine and one behind ssh (node/ssh/machine.py) can both do."""

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
from launcher.model.limits import DEFAULT_LIMITS, AnswerLimits
from launcher.node import terminal as terminals
from launcher.node.parallel import in_background
from launcher.node.ssh.wire import dial

PIECE = 1 << 16
OPEN_TIMEOUT = 30.0  # seconds to start a command
_CLOSE_TIMEOUT = 5.0  # seconds for a command to end by itself, and then for each signal to end it
# $1: an address, $2: a port, $3: seconds. Marked: a login shell may print lines of its own.
_CONNECT = r"""
said=$(LC_ALL=C timeout "$3" bash -c ': </dev/tcp/$1/$2' bash "$1" "$2" 2>&1)
echo "@@connect $? $said"
"""
_TIMED_OUT = (124, 143)  # of `timeout`: coreutils, busybox
_SILENT = ("timed out", "no route", "unreachable", "host is down")


@dataclass(frozen=True)
class Done:
    """A command that has ended. `code` is negative where a signal ended it. Times: of time.time(), here."""

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


class CommandStream(Protocol):
    """A running command with its three streams. Not for several threads at once, but for end()."""

    def send(self, data: bytes) -> None:
        """Write to its stdin. When it has ended, or the connection is lost, nothing happens: receive() tells."""

    def end_input(self) -> None: ...

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        """What came on stdout and on stderr; both empty when nothing did within `timeout` seconds; None at the end.

        Raises NodeUnreachable when the connection is lost.
        """

    def exit_code(self) -> int:
        """Once receive() has returned None; negative where a signal ended it. Raises NodeUnreachable."""

    def end(self) -> None:
        """End it: receive() returns what it wrote until then, and None."""

    def close(self) -> None:
        """Close its streams: a script that reads its stdin, or writes to its stdout, ends then."""


class Tunnel(Protocol):
    """A connection as a socket has it."""

    def recv(self, nbytes: int, /) -> bytes: ...

    def sendall(self, data: bytes, /) -> None: ...

    def shutdown(self, how: int, /) -> None: ...


class Machine(Protocol):
    """Commands on a node, connections from it. To be inherited from."""

    node: str
    user: str
    limits: AnswerLimits

    def start(self, argv: Sequence[str], *, stdin: bool, timeout: float) -> CommandStream:
        """Start a command, within `timeout` seconds. stdin: it is sent something. Raises NodeUnreachable, NodeUnfit."""

    def open(self, argv: Sequence[str], *, lasting: bool = False) -> CommandStream:  # noqa: ARG002 - for some machines
        """Start a command whose output is read as it comes.

        lasting: for as long as a run; a machine that can run a few commands at once only may refuse it.
        """
        return self.start(argv, stdin=True, timeout=OPEN_TIMEOUT)

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Done:
        """timeout: seconds, None: those of `limits`.

        Raises NodeUnreachable, also where it takes longer; NodeUnfit where it prints more.
        """
        seconds = timeout or self.limits.seconds
        deadline = time.monotonic() + seconds
        stream = self.start(argv, stdin=bool(stdin), timeout=seconds)

        def feed() -> None:
            stream.send(stdin)
            stream.end_input()

        try:
            if stdin:
                in_background(feed)  # neither side may wait for the other
            return self._read_all(stream, first_words(argv), seconds, deadline)
        except BaseException:
            stream.end()
            raise
        finally:
            stream.close()

    def _read_all(self, stream: CommandStream, words: str, seconds: float, deadline: float) -> Done:
        began, first = time.time(), 0.0
        out, err = bytearray(), bytearray()
        while (found := stream.receive(max(0.0, deadline - time.monotonic()))) is not None:
            out += found[0]
            err += found[1]
            if any(found):
                first = first or time.time()
            if len(out) + len(err) > self.limits.size:
                fix = "look at its login shell and its output folder, or raise limits.answer of your settings file"
                raise NodeUnfit(self.node, f"`{words}` printed over {self.limits.size >> 20} MiB", fix)
            if time.monotonic() >= deadline:  # also where something still comes, a byte a second
                fix = "is the node overloaded, or its disk? or raise limits.wait of your settings file"
                raise NodeUnreachable(self.node, f"`{words}` did not end in {seconds:.0f} s", fix)
        return Done(stream.exit_code(), bytes(out), bytes(err), began, first or time.time())

    def interact(
        self, argv: Sequence[str], *, terminal: bool, interrupt: Callable[[], None], ports: Sequence[Forward] = ()
    ) -> int:
        """Run a command joined to the caller's terminal or pipes; its exit code.

        terminal: with one of its own. Without one, Ctrl-C calls `interrupt` instead of ending this. ports: forwarded
        meanwhile to a machine that is not this one.
        """

    def reach(self, address: str, port: int, timeout: float) -> Reach:
        """Try a TCP connection from the node, by its bash; UNKNOWN without. Raises NodeUnreachable, NodeUnfit."""
        seconds = math.ceil(timeout)
        done = run_script(self, _CONNECT, address, str(port), str(seconds), timeout=seconds + OPEN_TIMEOUT)
        return outcome(done.out.decode(errors="replace"))

    def has_host_key(self, address: str, port: int, host_key: str, timeout: float) -> bool | None:
        """Whether the sshd at this address, seen from the node, proves that ssh host key (base64); None: not known."""

    def tunnel(self, port: int) -> Tunnel:
        """A connection to a port of the node's own loopback interface. Raises NodeUnreachable where none is made."""
        raise NodeUnreachable(self.node, f"has no ssh connection that could lead to its port {port}")

    def host_key(self) -> str | None:
        """The ssh host key that this node proved (base64); None where it is not reached over ssh."""
        return None

    def most_sessions(self) -> int | None:
        """How many commands its sshd runs at once on a connection (MaxSessions); None where a run needs no more."""
        return None


def shell(script: str, *arguments: str) -> list[str]:
    """The argv of a POSIX shell script with its $1, $2, ..."""
    return ["sh", "-c", script, "launcher", *arguments]


def run_script(machine: Machine, script: str, *arguments: str, timeout: float | None = None) -> Done:
    """Raises what Machine.run raises."""
    return machine.run(shell(script, *arguments), timeout=timeout)


def outcome(printed: str) -> Reach:
    """Of a connection that _CONNECT tried: bash's messages are strerror()'s, in English."""
    found = re.search(r"@@connect (\d+) (.*)", printed, re.DOTALL)
    if found is None:
        return Reach.UNKNOWN
    code, said = int(found[1]), found[2].lower()
    if code == 0:
        return Reach.OPEN
    if code in _TIMED_OUT or any(words in said for words in _SILENT):
        return Reach.SILENT
    return Reach.REFUSED if "connection refused" in said else Reach.UNKNOWN


def first_words(argv: Sequence[str]) -> str:
    """Of a command, for error messages."""
    return shlex.join(argv[:3])[:60]


@contextlib.contextmanager
def kill_on_disconnect(machine: Machine, argv: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """A command that is to clean up when the caller is gone: when its stdin ends without a line `done`.

    stdin ends with this process, whatever ends it, or with the connection. Yields a function that writes it a line.
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
    """Implements CommandStream, in a session of its own: a Ctrl-C is not for it."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Raises OSError when it cannot be started."""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)
        self._stdin, *self._outputs = filter(None, (self._process.stdin, self._process.stdout, self._process.stderr))
        self._selector = selectors.DefaultSelector()
        for place, stream in enumerate(self._outputs):
            self._selector.register(stream, selectors.EVENT_READ, place)

    def send(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: it was closed meanwhile
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
        """One that has closed its outputs and runs on is ended."""
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
        with contextlib.suppress(ProcessLookupError):  # its own children are in its group
            os.killpg(self._process.pid, number)


class LocalMachine(Machine):
    """This machine."""

    def __init__(self, node: str, user: str, limits: AnswerLimits = DEFAULT_LIMITS) -> None:
        self.node = node
        self.user = user
        self.limits = limits

    def start(self, argv: Sequence[str], *, stdin: bool, timeout: float) -> CommandStream:  # noqa: ARG002 - at once
        """Raises NodeUnfit when it cannot be started."""
        try:
            stream = LocalStream(argv)
        except FileNotFoundError as error:
            raise NodeUnfit(self.node, f"there is no {argv[0]}", "install it") from error
        if not stdin:
            stream.end_input()
        return stream

    def interact(
        self,
        argv: Sequence[str],
        *,
        terminal: bool,
        interrupt: Callable[[], None],
        ports: Sequence[Forward] = (),  # noqa: ARG002 - they are here
    ) -> int:
        """Raises NodeUnfit when it cannot be started."""
        try:
            return terminals.here(argv, terminal=terminal, interrupt=interrupt)
        except FileNotFoundError as error:
            raise NodeUnfit(self.node, f"there is no {argv[0]}", "install it") from error

    def has_host_key(self, address: str, port: int, host_key: str, timeout: float) -> bool | None:
        from launcher.node.ssh.handshake import proves  # paramiko, which plain processes do without

        try:
            connection = dial(address, port, time.monotonic() + timeout)
        except OSError:
            return None
        with contextlib.closing(connection):
            return proves(connection, host_key, timeout)
