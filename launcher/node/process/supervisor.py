"""The parent of a node's plain processes: what a container engine is to a container, for one of them.

It starts the program in a session of its own, restarts it after failures, passes a stop on, ends what the program left
behind and keeps `state.json`. It is run as a file (`python -I -S supervisor.py FOLDER`) so that it starts fast and
whatever the caller's PYTHONPATH holds: the standard library only, nothing of this project.

In FOLDER: `spec.json` (read), `state.json`, `stop` (seconds of grace, written by the engine before its SIGTERM), `lock`
(held as long as the supervisor lives: a pid alone proves nothing), `output.log` (the program's stdout and stderr).
"""

# pathlib would be a good part of the time that this takes to start:
# ruff: noqa: PTH105, PTH107, PTH110, PTH118, PTH123, PTH208

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

CONTAINER = "LAUNCHER_CONTAINER"  # in the environment of every process of a node: by it they are found again
LOG, LOCK, SPEC, STATE, STOP = "output.log", "lock", "spec.json", "state.json", "stop"
KEEP = 1 << 20  # bytes of the program's output that stay when output.log has grown to four times as much
_TICK = 1.0  # seconds between looks at what sends no signal: the log's size, whether the folder is still there
_BACKOFF = 0.1  # seconds before the first restart, doubled each time, as Docker does
_LONGEST_BACKOFF = 60.0
_KILL_TIMEOUT = 10.0
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Supervisor:
    def __init__(self, folder: str, ready: int) -> None:
        """ready: a file descriptor that is closed when the first state is on disk."""
        with open(os.path.join(folder, SPEC), "rb") as file:
            spec = json.load(file)["spec"]
        self._folder = folder
        self._ready = ready
        self._name: str = spec["name"]
        self._argv: list[str] = spec["argv"]
        self._cwd: str = spec["layout"]["code"]
        self._allowed: int = spec["restarts"]
        self._asked = False  # SIGTERM came and was not looked at yet
        self._deadline = math.inf  # monotonic: SIGKILL then, and no restart once it is set
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
            signal.signal(number, lambda *_: None)  # wake it, see _pause; the program gets the defaults
        adopt_orphans()

    def run(self) -> None:
        """All attempts, to the end."""
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
        """Raises OSError of chdir and exec."""
        self._started = time.time()
        with open(self._path(LOG), "ab", opener=_private) as log:
            self._program = subprocess.Popen(
                self._argv, cwd=self._cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._child = self._program.pid

    def _monitor(self) -> int:
        """Until the program has ended; its exit code, 128 and the signal for one that was killed."""
        while True:
            for pid, code in reap():
                if pid == self._child:
                    self._program.returncode = code  # or it would wait for that pid when it is freed
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
            if not os.path.exists(self._path(SPEC)):  # the run was removed: nothing may go on without a folder
                self._deadline = 0.0
                continue
            with contextlib.suppress(OSError):  # a full disk: the log stays as it is
                trim(self._path(LOG))

    def _grace(self) -> float:
        try:
            with open(self._path(STOP), encoding="ascii") as file:
                return float(file.read())
        except (OSError, ValueError):  # a SIGTERM not of an engine, say at shutdown
            return 30.0

    def end(self) -> None:
        """SIGKILL to all that the program left running, as at the end of a container."""
        end(self._name, os.getpid())

    def _back_off(self) -> bool:
        """Wait before a restart. False: a stop came."""
        until = time.monotonic() + min(_LONGEST_BACKOFF, _BACKOFF * 2.0**self._restarts)
        while not self._asked and (left := until - time.monotonic()) > 0 and os.path.exists(self._path(SPEC)):
            self._pause(min(_TICK, left))
        return not self._asked and os.path.exists(self._path(SPEC))

    def _pause(self, seconds: float) -> None:
        """Until a signal comes or the time is over. Python writes each signal's number into the pipe."""
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
    """The descriptor that holds the folder's lock. Raises SystemExit when another supervisor has it."""
    lock = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    for _ in range(50):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)  # is_supervised() of another process holds it for a moment
        else:
            return lock
    raise SystemExit(f"{folder} has a supervisor already")


def is_supervised(folder: str) -> bool:
    """Whether a supervisor lives. The kernel lets go of its lock however it ends."""
    with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, LOCK), "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def restore_defaults() -> None:
    """The default action for every signal that the caller ignores, as a container begins.

    A shell without job control ignores SIGINT and SIGQUIT in its background jobs, and nohup ignores SIGHUP. Processes
    inherit that, and a shell script cannot trap a signal that was ignored when it started. SIGPIPE and SIGXFSZ are
    ignored by Python itself; Popen restores them.
    """
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended, so that processes() finds them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> Iterator[tuple[int, int]]:
    """Children that have ended: pid, exit code as a shell tells it."""
    with contextlib.suppress(ChildProcessError):
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(result[1])
            yield result[0], code if code >= 0 else 128 - code


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if pid:  # 0 is "none" here, and the caller's own group for kill()
            os.kill(pid, number)


def end(name: str, supervisor: int = 0) -> None:
    """SIGKILL to every process of this container but the caller, until none is left.

    supervisor: its descendants too, which may have cleared their environment.
    """
    until = time.monotonic() + _KILL_TIMEOUT
    while (found := processes(name, supervisor)) and time.monotonic() < until:
        for pid in found:
            send(pid, signal.SIGKILL)
        if supervisor == os.getpid():
            list(reap())
        time.sleep(0.002)  # there is no event for the end of a process that is not a child


def processes(name: str, supervisor: int = 0) -> set[int]:
    """Pids of living processes that carry the container's name, and of the supervisor's descendants; not the caller."""
    mark = f"{CONTAINER}={name}".encode()
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
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
    return found - {os.getpid()}


def trim(log: str) -> None:
    """Keep the end of a log that has grown too long. Its writers append, so they continue behind that end."""
    with open(log, "ab+") as file:
        if file.tell() > 4 * KEEP:
            file.seek(-KEEP, os.SEEK_END)
            rest = file.read().partition(b"\n")[2]
            file.truncate(0)
            file.write(rest)


def write_whole(path: str, data: bytes) -> None:
    """All or nothing; on a full disk in place, which needs no new room. Raises OSError."""
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
        with open(path, "wb", opener=_private) as file:
            file.write(data)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def main() -> None:
    """The supervisor is a child; this process ends when the first state is on disk or the supervisor has failed."""
    told, tell = os.pipe()
    if os.fork():
        os.close(tell)
        os.read(told, 1)  # ends when the supervisor closes the other side
        os._exit(0)
    os.close(told)
    supervisor = Supervisor(sys.argv[1], tell)
    try:
        supervisor.run()
    finally:  # nothing that it started outlives it, even if this fails
        supervisor.end()


if __name__ == "__main__":
    main()
