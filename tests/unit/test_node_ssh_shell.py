"""The shell that stays open on a node, here a real one behind a socket: exact bytes, codes, and its death."""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.node.ssh.session import Done, Session
from launcher.node.ssh.shell import NotBegun, Shell


class Channel:
    """As much of paramiko's as a Shell uses, over a socket."""

    closed = eof_received = False
    connected = True

    def __init__(self, stream: socket.socket, piece: int = 1 << 16) -> None:
        self.sendall = stream.sendall
        self.settimeout = stream.settimeout
        self.close = stream.close
        self._stream = stream
        self._piece = piece

    def recv(self, size: int) -> bytes:
        try:
            return self._stream.recv(min(size, self._piece))
        except ConnectionResetError:  # the shell died with more to read; of a channel it is just the end
            return b""

    def get_transport(self) -> Any:
        return SimpleNamespace(is_active=lambda: self.connected)


@pytest.fixture(params=["sh", "bash"])
def process(request: pytest.FixtureRequest) -> Iterator[tuple[Shell, subprocess.Popen[bytes]]]:
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen([request.param], stdin=theirs, stdout=theirs) as running:
        theirs.close()
        yield Shell(Session(Channel(ours, 7), lambda: None)), running  # type: ignore[arg-type]
        running.kill()


@pytest.fixture
def shell(process: tuple[Shell, subprocess.Popen[bytes]]) -> Shell:
    return process[0]


def run(shell: Shell, *argv: str, timeout: float = 20) -> Done:
    return shell.run(shlex.join(argv), time.monotonic() + timeout)


def test_one_after_another_each_with_its_own_end(shell: Shell) -> None:
    first = run(shell, "sh", "-c", "echo out; echo err >&2; exit 44")
    assert (first.code, first.out, first.err) == (44, b"out\n", b"err")
    assert first.started <= first.first <= time.time()
    quiet = run(shell, "true")
    assert (quiet.code, quiet.out, quiet.err) == (0, b"", b"")
    assert run(shell, "no-such-program").code == 127
    assert b"no-such-program" in run(shell, "no-such-program").err


def test_a_command_reads_nothing_of_what_the_shell_is_told_next(shell: Shell) -> None:
    assert run(shell, "cat").out == b""
    assert run(shell, "sh", "-c", "exit 3").code == 3
    assert run(shell, "sh", "-c", "read line || echo end").out == b"end\n"


def test_much_on_both_streams_at_once(shell: Shell) -> None:
    much = "head -c 200000 /dev/zero | tr '\\0' "
    done = run(shell, "sh", "-c", f"{much} e >&2; {much} o; {much} e >&2")
    assert done.out == b"o" * 200_000
    assert done.err == b"e" * 400_000


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(data=st.binary(max_size=300), words=st.lists(st.text(st.characters(blacklist_characters="\0", codec="utf-8"))))
def test_every_byte_and_every_word_arrives_as_it_is(
    shell: Shell, tmp_path: Path, data: bytes, words: list[str]
) -> None:
    file = tmp_path / "data"
    file.write_bytes(data)
    done = run(shell, "sh", "-c", 'file=$1; shift; cat -- "$file"; printf "<%s>" "$@"', "x", str(file), *words)
    assert done.out == data + b"".join(f"<{word}>".encode() for word in words or [""])


def test_a_command_that_does_not_end_in_time(shell: Shell) -> None:
    with pytest.raises(TimeoutError):
        run(shell, "sleep", "30", timeout=0.2)


def test_a_shell_that_dies_under_a_command(process: tuple[Shell, subprocess.Popen[bytes]]) -> None:
    shell, running = process
    with pytest.raises(EOFError):
        run(shell, "sh", "-c", "kill -9 $1; sleep 0.5", "x", str(running.pid))


def test_in_a_shell_that_has_died_nothing_begins(process: tuple[Shell, subprocess.Popen[bytes]]) -> None:
    shell, running = process
    running.kill()
    running.wait()
    with pytest.raises(NotBegun):
        run(shell, "true")


def test_with_the_connection_gone_nobody_knows_how_far_it_came() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours)
        channel.connected = False
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            run(Shell(Session(channel, lambda: None)), "true")  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=40)))
def test_no_answer_breaks_it(pieces: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        shell = Shell(Session(Channel(ours), lambda: None))  # type: ignore[arg-type]
        theirs.sendall(b"".join(pieces))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(NotBegun):
            run(shell, "true")
