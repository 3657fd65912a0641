"""The caller's terminal, or pipes, joined to a command on a node: keys, output, size, Ctrl-C and exit code."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Sequence

import paramiko

from launcher.node.ssh.node import Ssh

_PIECE = 1 << 15
_STDIN, _STDOUT, _STDERR = 0, 1, 2
_NO_STATUS = 255  # what OpenSSH says when the command left no exit status


def is_terminal() -> bool:
    """Whether a person sits in front of this process."""
    return os.isatty(_STDIN) and os.isatty(_STDOUT)


def over_ssh(ssh: Ssh, argv: Sequence[str], *, terminal: bool, interrupt: Callable[[], None]) -> int:
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
            errors = threading.Thread(target=_copy, args=(channel.recv_stderr, _STDERR), daemon=True)
            errors.start()
            _until_end(lambda: _copy(channel.recv, _STDOUT), interrupt)
            _until_end(errors.join, interrupt)
        channel.status_event.wait(10)
        if channel.exit_status == -1 and not channel.get_transport().is_active():
            raise ssh.lost(EOFError(f"while `{shlex.join(argv[-3:])}` ran"))
        return channel.exit_status if channel.exit_status >= 0 else _NO_STATUS
    finally:
        session.close()


def here(
    argv: Sequence[str],
    *,
    terminal: bool,
    interrupt: Callable[[], None] | None = None,
    env: dict[str, str] | None = None,
    cwd: str | None = None,
) -> int:
    """Run a command of this machine to its end, on our own terminal or pipes; its exit code. Raises OSError.

    interrupt: what Ctrl-C does; None: the command gets it itself, as every program in the foreground does.
    """
    apart = interrupt is not None and not terminal
    with subprocess.Popen(argv, env=env, cwd=cwd, start_new_session=apart) as process:
        if apart and interrupt is not None:
            _until_end(process.wait, interrupt)
        else:
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the command's
            try:
                process.wait()
            finally:
                signal.signal(signal.SIGINT, before)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


@contextlib.contextmanager
def leash_over_ssh(ssh: Ssh, argv: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """A command on the node whose stdin ends when this process or the connection does, whatever ends them.

    Yields a function that writes it a line. It is told `done` at the end, so that it knows one end from the other.
    """
    session, _ = ssh.session(lambda channel: channel.exec_command(shlex.join(argv)))

    def tell(line: str) -> None:
        with contextlib.suppress(OSError, EOFError):  # gone with the connection: then it has seen the end
            session.channel.sendall(f"{line}\n".encode())

    try:
        yield tell
    finally:
        tell("done")
        session.close()


@contextlib.contextmanager
def leash_here(argv: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """The same on this machine."""
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        assert process.stdin is not None
        pipe = process.stdin

        def tell(line: str) -> None:
            with contextlib.suppress(BrokenPipeError):
                pipe.write(f"{line}\n".encode())
                pipe.flush()

        try:
            yield tell
        finally:
            tell("done")


def _until_end(wait: Callable[[], object], interrupt: Callable[[], None]) -> None:
    """Wait, and go on waiting after a Ctrl-C: a program may handle it."""
    while True:
        try:
            wait()
        except KeyboardInterrupt:
            interrupt()
        else:
            return


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
