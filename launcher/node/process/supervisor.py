"""The parent of a node's plain processes: does for them what a container engine does for a container.

It starts the program in a new session, restarts it after failures, forwards a stop, kills processes that the program
left running and maintains `state.json`. It runs as a file (`python -I -S supervisor.py FOLDER`) to start fast and
independently of the caller's PYTHONPATH: it imports only the standard library, nothing of this project.

In FOLDER: `spec.json` (read), `state.json`, `stop` (seconds of grace, written by the engine before its SIGTERM), `lock`
(held while the supervisor lives: a pid may be reused), `output.log` (the program's stdout and stderr).
"""

# importing pathlib would noticeably slow the start down:
# ruff: noqa: PTH105, PTH107, PTH110, PTH118, PTH123, PTH208

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import json
import math
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator

CONTAINER = "LAUNCHER_CONTAINER"  # in the environment of all processes of a node, to find them
LOG, LOCK, SPEC, STATE, STOP = "output.log", "lock", "spec.json", "state.json", "stop"
KEEP = 1 << 20  # bytes of the program's output that are kept once output.log has grown to four times this size
GRACE = 45.0  # seconds from SIGTERM to SIGKILL, unless the engine wrote others: that of `launcher down`
_ROOM = 4096  # bytes; a state file is smaller
_TICK = 1.0  # seconds between checks without an event: size of the log, existence of the folder
_BACKOFF = 0.1  # seconds before the first restart, doubled each time, as in Docker
_LONGEST_BACKOFF = 60.0
_KILL_TIMEOUT = 10.0
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Supervisor:
    def __init__(self, folder: str, ready: int) -> None:
        """ready: a file descriptor to close once the first state is on disk."""
        with open(os.path.join(folder, SPEC), "rb") as file:
            spec = json.load(file)["spec"]
        self._folder = folder
        self._ready = ready
        self._name: str = spec["name"]
        self._argv: list[str] = spec["argv"]
        self._cwd: str = spec["layout"]["code"]
        self._allowed: int = spec["restarts"]
        self._asked = False  # SIGTERM was received and is not handled yet
        self._deadline = math.inf  # monotonic time of SIGKILL; no restart once it is set
        self._child = 0
        self._restarts = 0
        self._started = 0.0
        self._lock = take_lock(folder)
        self._wake, wake = os.pipe()
        for end in (self._wake, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        restore_defaults()
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # wake _pause(); the program gets the defaults
        adopt_orphans()

    def run(self) -> None:
        """Run all attempts. Raises OSError, before the program starts, if the disk has no room for its state."""
        write_whole(self._path(STATE), b" " * _ROOM)
        while True:
            try:
                self._start()
            except OSError as error:
                code = 127 if isinstance(error, FileNotFoundError) else 126
                self._record("exited", exit_code=code, finished=time.time(), error=str(error))
                return
            self._record("running")
            code = self._monitor()
            self.end()
            if code == 0 or self._deadline < math.inf or self._restarts >= self._allowed:
                break
            self._record("restarting", exit_code=code, finished=time.time())
            if not self._back_off():
                break
            self._restarts += 1
        self._record("exited", exit_code=code, finished=time.time())

    def _start(self) -> None:
        """Start the program. Raises OSError from chdir and exec."""
        self._started = time.time()
        with open(self._path(LOG), "ab", opener=_private) as log:
            self._program = subprocess.Popen(
                self._argv, cwd=self._cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._child = self._program.pid

    def _monitor(self) -> int:
        """Wait until the program exits; return its exit code, 128 + signal if it was killed."""
        while True:
            for pid, code in reap():
                if pid == self._child:
                    self._program.returncode = code  # already reaped: Popen must not wait for this pid
                    return code
            if self._asked:
                self._asked = False
                self._deadline = min(self._deadline, time.monotonic() + self._grace())
                send(self._child, signal.SIGTERM)
            left = self._deadline - time.monotonic()
            if left <= 0:
                send(self._child, signal.SIGKILL)
                left = _TICK
            self._pause(min(_TICK, left))
            if not os.path.exists(self._path(SPEC)):  # the run was removed: stop the program
                self._deadline = 0.0
                continue
            with contextlib.suppress(OSError):  # disk full: leave the log unchanged
                trim(self._path(LOG))

    def _grace(self) -> float:
        try:
            return float(read_whole(self._path(STOP)))
        except (OSError, ValueError):  # SIGTERM from another sender, for example at shutdown
            return GRACE

    def end(self) -> None:
        """Kill all processes that the program left running, as when a container exits."""
        end(self._name, os.getpid())

    def _back_off(self) -> bool:
        """Wait before a restart; return False if the container was stopped or removed."""
        until = time.monotonic() + min(_LONGEST_BACKOFF, _BACKOFF * 2.0**self._restarts)
        while not self._asked and (left := until - time.monotonic()) > 0 and os.path.exists(self._path(SPEC)):
            self._pause(min(_TICK, left))
        return not self._asked and os.path.exists(self._path(SPEC))

    def _pause(self, seconds: float) -> None:
        """Sleep until a signal arrives or `seconds` have passed. Python writes each signal's number into the pipe."""
        if select.select([self._wake], [], [], max(0.0, seconds))[0]:
            self._asked |= signal.SIGTERM in os.read(self._wake, 4096)

    def _record(self, phase: str, exit_code: int | None = None, finished: float = 0.0, error: str = "") -> None:
        state = {
            "phase": phase,
            "supervisor": os.getpid(),
            "pid": self._child,
            "exit_code": exit_code,
            "restarts": self._restarts,
            "started": self._started,
            "finished": finished,
            "error": error,
        }
        with contextlib.suppress(FileNotFoundError):  # the folder was removed
            write_whole(self._path(STATE), json.dumps(state).encode())
        if self._ready >= 0:
            os.close(self._ready)
            self._ready = -1

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)


def take_lock(folder: str) -> int:
    """Lock the folder; return the descriptor. Raises SystemExit if another supervisor holds the lock."""
    lock = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    for _ in range(50):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)  # is_supervised() of another process holds it for a moment
        else:
            return lock
    raise SystemExit(f"{folder} already has a supervisor")


def is_supervised(folder: str) -> bool:
    """Whether the folder has a live supervisor. The kernel releases its lock on any exit."""
    with contextlib.suppress(FileNotFoundError), open_regular(os.path.join(folder, LOCK)) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def restore_defaults() -> None:
    """Restore the default action of all signals that the caller ignores, as in a new container.

    A shell without job control ignores SIGINT and SIGQUIT in its background jobs, and nohup ignores SIGHUP. Processes
    inherit that, and a shell script cannot trap a signal that was ignored when it started. SIGPIPE and SIGXFSZ are
    ignored by Python itself; Popen restores them.
    """
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that processes() finds them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> Iterator[tuple[int, int]]:
    """Yield children that have exited: pid, exit code as in a shell."""
    with contextlib.suppress(ChildProcessError):
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(result[1])
            yield result[0], code if code >= 0 else 128 - code


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if pid:  # 0 means none here, but the caller's process group for kill()
            os.kill(pid, number)


def end(name: str, supervisor: int = 0) -> None:
    """Send SIGKILL to all processes of this container except the caller, until none is left.

    supervisor: also kill its descendants, which may have cleared their environment.
    """
    until = time.monotonic() + _KILL_TIMEOUT
    while (found := processes(name, supervisor)) and time.monotonic() < until:
        for pid in found:
            send(pid, signal.SIGKILL)
        if supervisor == os.getpid():
            list(reap())
        time.sleep(0.002)  # no event signals the exit of a process that is not a child


def processes(name: str, supervisor: int = 0) -> set[int]:
    """Return pids of live processes with the container's name, and of the supervisor's descendants; not the caller.

    Nor, for the supervisor, its parent: the process that started it bears the name and may not have exited yet.
    """
    mark = f"{CONTAINER}={name}".encode()
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has exited, or belongs to another user
            with open(f"/proc/{entry}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state in (b"Z", b"X"):
                continue
            parents[int(entry)] = int(parent)
            with open(f"/proc/{entry}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.add(int(entry))
    for pid in parents:
        above = pid
        while supervisor and above in parents:
            above = parents[above]
            if above == supervisor:
                found.add(pid)
    return found - {os.getpid(), os.getppid() if supervisor == os.getpid() else 0}


def trim(log: str) -> None:
    """Keep only the end of a log that is too long. Its writers use append mode, so they continue after it."""
    with open(log, "ab+") as file:
        if file.tell() > 4 * KEEP:
            file.seek(-KEEP, os.SEEK_END)
            rest = file.read().partition(b"\n")[2]
            file.truncate(0)
            file.write(rest)


def open_regular(path: str) -> io.BufferedReader:
    """Open a regular file; raise FileNotFoundError for anything else.

    A program may put a link, or a FIFO, which would block, in place of any file of the output folder.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise FileNotFoundError(path) from error
        raise
    if stat.S_ISREG(os.fstat(file).st_mode):
        return os.fdopen(file, "rb")
    os.close(file)
    raise FileNotFoundError(path)


def read_whole(path: str) -> bytes:
    """Return the content of a regular file. Raises FileNotFoundError."""
    with open_regular(path) as file:
        return file.read()


def write_whole(path: str, data: bytes) -> None:
    """Write a file atomically; on a full disk, overwrite it in place, which needs no extra space. Raises OSError."""
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "wb", opener=_private) as file:
            file.write(data)
        os.replace(temporary, path)
    except FileNotFoundError:
        raise
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)  # before it is truncated: its space would be gone
            file.truncate()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def main() -> None:
    """Fork the supervisor; exit once the first state is on disk or the supervisor has failed."""
    ready, signal_ready = os.pipe()
    if os.fork():
        os.close(signal_ready)
        os.read(ready, 1)  # returns when the supervisor closes the other end
        os._exit(0)
    os.close(ready)
    supervisor = Supervisor(sys.argv[1], signal_ready)
    try:
        supervisor.run()
    finally:  # kill everything it started, even if this fails
        supervisor.end()


if __name__ == "__main__":
    main()
