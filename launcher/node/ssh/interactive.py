"""The caller's terminal, or pipes, joined to a command over ssh: keys, output, size, Ctrl-C and exit code."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator

import paramiko

from launcher.node.ssh.stream import SshStream
from launcher.node.terminal import wait_through_interrupts

_PIECE = 1 << 15
_STDIN, _STDOUT, _STDERR = 0, 1, 2
_NO_STATUS = 255  # what OpenSSH says when a signal ended the command
_LONG = 3600.0  # seconds a wait for output


def request_terminal(channel: paramiko.Channel) -> None:
    """A terminal on the node, of the size and kind of the caller's."""
    columns, lines = os.get_terminal_size(_STDOUT)
    channel.get_pty(os.environ.get("TERM", "xterm"), columns, lines)


def join(stream: SshStream, *, terminal: bool, interrupt: Callable[[], None]) -> int:
    """Wait for the end of a command; its exit code. Without a terminal, Ctrl-C calls `interrupt`, and the wait goes on.

    Raises NodeUnreachable, also when the connection is lost meanwhile; BrokenPipeError.
    """
    stream.channel.settimeout(None)  # a command may leave its input unread for long
    with _raw_mode(terminal), _feeding(stream, terminal):
        wait_through_interrupts(lambda: _copy(stream), interrupt)
    code = stream.exit_code()
    return code if code >= 0 else _NO_STATUS


@contextlib.contextmanager
def _raw_mode(terminal: bool) -> Iterator[None]:
    """Every key goes to the node, Ctrl-C too, and nothing is echoed here."""
    if not terminal:
        yield
        return
    before = termios.tcgetattr(_STDIN)
    try:
        tty.setraw(_STDIN)
        yield
    finally:
        termios.tcsetattr(_STDIN, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _feeding(stream: SshStream, terminal: bool) -> Iterator[None]:
    """The caller's stdin into the command, and each new size of the terminal, until the command has ended."""
    awake, wake = os.pipe()
    before = signal.signal(signal.SIGWINCH, lambda *_: os.write(wake, b"w")) if terminal else None
    feeder = threading.Thread(target=_feed, args=(stream, awake), daemon=True)
    feeder.start()
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGWINCH, before)
        os.write(wake, b"q")
        feeder.join()
        os.close(wake)
        os.close(awake)


def _feed(stream: SshStream, awake: int) -> None:
    sources = [awake] if sys.stdin is None else [awake, _STDIN]
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):  # it has ended: its exit code says more
        while True:
            ready, _, _ = select.select(sources, [], [])
            if awake in ready:
                if b"q" in os.read(awake, 64):
                    return
                stream.channel.resize_pty(*os.get_terminal_size(_STDOUT))
            if _STDIN in ready:
                piece = os.read(_STDIN, _PIECE)
                if piece:
                    stream.send(piece)
                else:
                    stream.end_input()
                    sources = [awake]


def _copy(stream: SshStream) -> None:
    while (found := stream.receive(_LONG)) is not None:
        for piece, target in zip(found, (_STDOUT, _STDERR), strict=True):
            rest = piece
            while rest:
                rest = rest[os.write(target, rest) :]
