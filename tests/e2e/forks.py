"""`python -m launcher ARGS`, forked from a process that has imported the launcher: most of a command's cost is imports.

The process is one as any other, with its own arguments, variables, folder and streams; the interpreter starts once. Its
end is left out, after all threads and handlers: it touches all memory, which a forked process then copies.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
MESSAGE = 1 << 18  # bytes; above what the arguments and variables of a call take
INTERPRETER = ("PYTHON", "LANG", "LC_")  # variables that Python reads when it starts begin like this
HANDLERS: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL}
NOT_IMPORTED = ("launcher.__main__", "launcher.features.slurm.oci_bundle")  # programs, as those of container_scripts/


def interpreter(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in which a forked process cannot differ from the one that it is forked from."""
    return {name: value for name, value in env.items() if name.startswith(INTERPRETER)}


_STARTING = threading.Lock()  # two threads would start two, and one of them ends with its socket


class Forked:
    """The part of Popen's interface that tests use. stdout: PIPE, DEVNULL or an open file."""

    def __init__(self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], stdout: int | IO[bytes]) -> None:
        self.args = list(argv)
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None
        if stdout == subprocess.PIPE:
            self.stdout, out = _pipe()
        else:
            out = os.open(os.devnull, os.O_WRONLY) if isinstance(stdout, int) else os.dup(stdout.fileno())
        self.stderr, err = _pipe()
        self._answers, answer = _pipe()
        ignored = [number for number in HANDLERS if signal.getsignal(number) is signal.SIG_IGN]
        call = json.dumps([self.args, str(cwd), dict(env), ignored]).encode()
        with _STARTING:
            server = _server()
        socket.send_fds(server, [call], [out, err, answer])
        for descriptor in (out, err, answer):
            os.close(descriptor)
        self.pid = int(self._answers.readline())
        self._read: dict[IO[str], str] = {}
        self._readers: list[threading.Thread] = []

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while it runs."""
        if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
            self.returncode = int(self._answers.readline())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None and not select.select([self._answers], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return the rest of both streams. Raises subprocess.TimeoutExpired, and can then be called again."""
        until = None if timeout is None else time.monotonic() + timeout
        streams = [stream for stream in (self.stdout, self.stderr) if stream]
        if not self._readers:
            self._readers = [threading.Thread(target=self._drain, args=(stream,), daemon=True) for stream in streams]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(None if until is None else max(0.0, until - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        return self._read[self.stdout] if self.stdout else "", self._read[self.stderr]

    def _drain(self, stream: IO[str]) -> None:
        self._read[stream] = stream.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _pipe() -> tuple[IO[str], int]:
    reads, writes = os.pipe()
    return os.fdopen(reads, encoding="utf-8"), writes


@functools.cache
def variables() -> dict[str, str]:
    """Return the variables of the process that all are forked from, as they are at the first call."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@functools.cache
def _server() -> socket.socket:
    """Start it; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE)
    with theirs:
        argv = [sys.executable, "-m", __name__, str(theirs.fileno())]
        null = subprocess.DEVNULL
        subprocess.Popen(argv, cwd=ROOT, env=variables(), pass_fds=[theirs.fileno()], stdin=null, stdout=null)
    return ours


def serve(calls: socket.socket) -> None:
    """Fork a process for each call, and report its id and its exit code, one line each. Never returns in those."""
    running: dict[int, tuple[int, int]] = {}  # by a descriptor of the process: its id, and where its end is reported
    while True:
        waits: list[socket.socket | int] = [calls, *running]
        for ready in select.select(waits, [], [])[0]:
            if isinstance(ready, int):
                pid, answer = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _report(answer, code)
                os.close(answer)
                os.close(ready)
                continue
            call, descriptors, _, _ = socket.recv_fds(calls, MESSAGE, 3)
            if not call:
                return
            *streams, answer = descriptors
            pid = os.fork()
            if pid == 0:
                for descriptor in (answer, *running, *(each for _, each in running.values())):
                    os.close(descriptor)
                calls.close()
                argv, cwd, env, ignored = json.loads(call)
                become(argv, cwd, env, ignored, streams)
            _report(answer, pid)
            running[os.pidfd_open(pid)] = pid, answer
            for stream in streams:
                os.close(stream)


def _report(answer: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the test has ended
        os.write(answer, b"%d\n" % number)


def become(argv: list[str], cwd: str, env: dict[str, str], ignored: list[int], streams: list[int]) -> None:
    """Be `python -m launcher ARGV`, with these streams as stdout and stderr, whose caller ignores these signals."""
    for number, handler in HANDLERS.items():
        signal.signal(number, signal.SIG_IGN if number in ignored else handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLERS)
    for place, stream in enumerate(streams, 1):
        os.dup2(stream, place)
        os.close(stream)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", closefd=False)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[0] = cwd
    sys.argv = ["launcher", *argv]
    try:
        runpy.run_module("launcher", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        codes.append(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
        raise
    sys.exit()


codes: list[int] = []  # with which this process exits


def leave() -> None:
    """If a stream cannot be written, the interpreter ends as usual, with its message."""
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


def main() -> None:
    atexit.register(leave)  # before all others, so that it is called after them
    import launcher

    for module in pkgutil.walk_packages(launcher.__path__, "launcher."):
        if not module.name.startswith(NOT_IMPORTED) and ".container_scripts" not in module.name:
            importlib.import_module(module.name)
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLERS)  # until a forked process has its handlers
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
