"""The caller's terminal, or pipes, joined to a command on a node: keys, output, size, Ctrl-C and exit code."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Sequence

import paramiko

from launcher.node.parallel import in_background
from launcher.node.ssh.commands import Ssh
from launcher.node.ssh.handshake import has_ended
from launcher.node.terminal import wait_through_interrupts

_PIECE = 1 << 15
_STDIN, _STDOUT, _STDERR = 0, 1, 2
_NO_STATUS = 255  # what OpenSSH says when the command left no exit status
_EXIT_TIMEOUT = 10.0  # seconds


def run(ssh: Ssh, argv: Sequence[str], *, terminal: bool, interrupt: Callable[[], None]) -> int:
    """Run a command on the node to its end; its exit code.

    terminal: with one of its own there, of the caller's size and kind. Without one, Ctrl-C calls `interrupt` instead of
    ending this. Raises NodeUnreachable, also when the connection is lost meanwhile; BrokenPipeError.
    """

    def begin(channel: paramiko.Channel) -> None:
        if terminal:
            columns, lines = os.get_terminal_size(_STDOUT)
            channel.get_pty(os.environ.get("TERM", "xterm"), columns, lines)
        channel.exec_command(shlex.join(argv))

    session, _ = ssh.session(begin)
    channel = session.channel
    channel.settimeout(None)
    try:
        with _raw_mode(terminal), _feeding(channel, terminal):
            errors = in_background(lambda: _copy(channel.recv_stderr, _STDERR))
            wait_through_interrupts(lambda: _copy(channel.recv, _STDOUT), interrupt)
            wait_through_interrupts(errors, interrupt)
        channel.status_event.wait(_EXIT_TIMEOUT)
        if channel.exit_status == -1 and has_ended(channel.get_transport()):
            raise ssh.lost(EOFError(f"while `{shlex.join(argv[-3:])}` ran"))
        return channel.exit_status if channel.exit_status >= 0 else _NO_STATUS
    finally:
        session.close()


@contextlib.contextmanager
def kill_on_disconnect(ssh: Ssh, argv: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """As launcher.node.terminal's, on the node: its stdin ends with this process or the connection."""
    session, _ = ssh.session(lambda channel: channel.exec_command(shlex.join(argv)))

    def send(line: str) -> None:
        with contextlib.suppress(OSError, EOFError):  # gone with the connection: then it has seen the end
            session.channel.sendall(f"{line}\n".encode())

    try:
        yield send
    finally:
        send("done")
        session.close()


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
def _feeding(channel: paramiko.Channel, terminal: bool) -> Iterator[None]:
    """Our stdin into the channel, and each new size of our terminal, until the command has ended."""
    awake, wake = os.pipe()
    before = signal.signal(signal.SIGWINCH, lambda *_: os.write(wake, b"w")) if terminal else None
    feeder = threading.Thread(target=_feed, args=(channel, awake), daemon=True)
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


def _feed(channel: paramiko.Channel, awake: int) -> None:
    sources = [awake] if sys.stdin is None else [awake, _STDIN]
    try:
        while True:
            ready, _, _ = select.select(sources, [], [])
            if awake in ready:
                if b"q" in os.read(awake, 64):
                    return
                columns, lines = os.get_terminal_size(_STDOUT)
                channel.resize_pty(columns, lines)
            if _STDIN in ready:
                piece = os.read(_STDIN, _PIECE)
                if piece:
                    channel.sendall(piece)
                else:
                    channel.shutdown_write()
                    sources = [awake]
    except (OSError, EOFError, paramiko.SSHException):
        return  # the command has ended; its exit code says more


def _copy(receive: Callable[[int], bytes], target: int) -> None:
    while piece := receive(_PIECE):
        while piece:
            piece = piece[os.write(target, piece) :]
