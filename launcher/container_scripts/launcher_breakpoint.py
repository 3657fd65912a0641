"""breakpoint() in a process of a run: it waits for `launcher debug`, whose terminal is then pdb's.

PYTHONBREAKPOINT names wait(), or skip() for a run that nobody watches. wait() listens at a socket in the kit's folder
home/.debug: RANK.PID.THREAD, beside RANK.PID.THREAD.python with the path of this Python, for debug_client.py. What it
sends is text; a prompt is between two NUL bytes, and is answered by a line. The line INTERRUPT, at any time, is Ctrl-C.
For launchers, it notes `waits RANK PID EPOCH PLACE`, `taken ...` (it has a terminal), `busy ...` (a command runs),
`goes RANK PID EPOCH` and `skips RANK PID EPOCH PLACE` in state/NODE.attempts. While it waits, it extends
state/NODE.alive, so that it does not count as hanging; on other nodes than that of rank 0, an attached launcher does.

Runs in the program's own Python, 3.7 or newer (older ones have no breakpoint()).
"""

# ruff: noqa: SLF001 - frames, and what torch has no public name for

from __future__ import annotations

import atexit
import bdb
import contextlib
import os
import pdb
import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, Callable  # noqa: UP035 - Python 3.7

LIMIT = 600.0  # seconds for a connection: a forgotten breakpoint() must not hold the GPUs
BEAT = 1.0  # seconds
INTERRUPT = b"\x03"
LONGEST_PLACE = 200
OF_TORCH = "torch.distributed."  # of its breakpoint(), which stops in a frame of torch

_own = threading.local()  # `debugger`: of this thread
_skipped: set[str] = set()  # places that were named
_unanswered: list[int] = []  # pids of processes in which nobody has come in time


def wait(*_: Any, frame: FrameType | None = None, what: str = "breakpoint()", **__: Any) -> None:
    """Wait for `launcher debug`, and stop at the next line of this frame: the caller's. what: the call."""
    frame = frame or sys._getframe(1)
    if _stopped_elsewhere(frame):
        return
    place = _place(frame)
    if os.getpid() in _unanswered:
        _skip(place, f"nobody came to an earlier one within {LIMIT:.0f} s")
        return
    debugger = getattr(_own, "debugger", None)
    if debugger is None or debugger.line.pid != os.getpid():  # a forked process has that of its parent
        debugger = _own.debugger = Debugger(FarTerminal())
    if debugger.line.connected or debugger.line.connect(f"{place}, {what}"):
        debugger.set_trace(frame)


def skip(*_: Any, frame: FrameType | None = None, **__: Any) -> None:
    """Go on, and name the place once."""
    frame = frame or sys._getframe(1)
    if not _stopped_elsewhere(frame):
        _skip(_place(frame))


def _stopped_elsewhere(frame: FrameType) -> bool:
    """Stop in the caller's own terminal or in its editor, if it has one; else return False."""
    if "LAUNCHER_JOB" not in os.environ or os.isatty(0):  # in `launcher exec` or `launcher shell`
        pdb.Pdb().set_trace(frame)
        return True
    debugpy: Any = sys.modules.get("debugpy")
    if debugpy is None or not debugpy.is_client_connected():
        return False
    debugpy.breakpoint()
    return True


class Debugger(pdb.Pdb):
    """pdb at the other end of a connection."""

    allow_kbdint: bool  # of pdb: whether it is at its prompt or runs a statement that was typed

    def __init__(self, line: FarTerminal) -> None:
        super().__init__(stdin=line, stdout=line, nosigint=True, skip=[__name__])  # type: ignore[arg-type]  # what pdb uses of a file
        self.line = line
        line.on_return = self._show_place
        line.command.on_interrupt = self._interrupted
        self.prompt = f"(Pdb rank {line.rank}) "

    def _show_place(self) -> None:
        self.print_stack_entry(self.stack[self.curindex])

    def _interrupted(self, _: int, frame: FrameType | None) -> None:
        """Ctrl-C: end a statement that was typed; stop the program where it is, without an exception in it."""
        if self.allow_kbdint:
            raise KeyboardInterrupt
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        if any(each.f_code is bdb.Bdb.trace_dispatch.__code__ for each in frames):  # it is about to stop
            return
        sys.settrace(None)
        for each in frames:
            each.f_trace = self.trace_dispatch
        self.botframe = frames[-1]
        self.message("interrupted; n or c goes on with this line")
        self.interaction(frames[0], None)
        if self.line.connected:
            sys.settrace(self.trace_dispatch)

    def set_continue(self) -> None:
        if self.line.pid in _unanswered:
            self.clear_all_breaks()
        super().set_continue()
        if not self.breaks:
            self.line.end(f"rank {self.line.rank} goes on")

    def do_quit(self, arg: str) -> bool | None:  # noqa: ARG002 - as in pdb
        """End the rank, as pdb does, but without a traceback of bdb."""
        _say(f"rank {self.line.rank} was ended by `q` in launcher debug")
        self.line.end(f"rank {self.line.rank} ends")
        if threading.current_thread() is not threading.main_thread():
            os._exit(1)  # SystemExit would end this thread only
        raise SystemExit(1)

    do_q = do_exit = do_quit

    def do_run(self, arg: str) -> bool | None:  # noqa: ARG002 - as in pdb
        self.message("to run it again: launcher up")
        return None

    do_restart = do_run


class FarTerminal:
    """stdin and stdout of pdb: a connection of `launcher debug`. If it is lost, the next prompt waits for another."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self) -> None:
        self.rank = _rank()
        self.pid = os.getpid()
        self._node = os.environ["LAUNCHER_NODE"]
        self._state = Path(os.environ["LAUNCHER_OUTPUT"], "state")
        self._folder = Path(__file__).resolve().parents[1] / "home" / ".debug"
        self._link: socket.socket | None = None
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # received; None: the connection has ended
        self._text = ""  # not sent: the last line, which may become a prompt
        self._what = ""
        self._waits: threading.Event | None = None  # set when the beat ends
        self._noted = ""  # the last event
        self.command = PdbCommand()
        self.on_return: Callable[[], None] | None = None  # shows another terminal where the rank is
        atexit.register(self.end)

    @property
    def connected(self) -> bool:
        return self._link is not None

    def connect(self, what: str) -> bool:
        """Wait for a connection; return False after LIMIT. what: where it waits, and for what."""
        self._what = what
        name = f"{self.rank}.{self.pid}.{threading.get_ident()}"
        try:
            self._link = self._accept(name)
        except OSError as error:
            _say(f"rank {self.rank} on {self._node} goes on at {what}: it cannot wait for `launcher debug`: {error}")
        else:
            if self._link is not None:
                self._note("taken", what)
                self._lines = queue.SimpleQueue()
                threading.Thread(target=self._receive, args=(self._link, self._lines), daemon=True).start()
                up = "u: up to your own frame, " if OF_TORCH in what else ""
                keys = f"{up}c: go on, q: end the rank, Ctrl-D: leave it waiting, h: help"
                self._send(f"rank {self.rank} on {self._node} stopped in {what}\n{keys}\n")
                return True
            _say(f"rank {self.rank} on {self._node} goes on: nobody came within {LIMIT:.0f} s")
            _unanswered.append(self.pid)
        self._done()
        return False

    def _accept(self, name: str) -> socket.socket | None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            with socket.socket(socket.AF_UNIX) as server:
                file, python = self._folder / name, self._folder / f"{name}.python"
                with contextlib.suppress(FileNotFoundError):
                    file.unlink()
                python.write_text(sys.executable or "python3")
                server.bind(f"/proc/self/fd/{folder}/{name}")  # a socket's path has at most 107 bytes
                server.listen(1)
                self._announce()
                server.settimeout(LIMIT)
                try:
                    return server.accept()[0]
                except socket.timeout:  # noqa: UP041 - another class before Python 3.10
                    return None
                finally:
                    file.unlink()
                    python.unlink()
        finally:
            os.close(folder)

    def _announce(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the program may have closed or replaced it
                stream.flush()
        limit = _time_limit()
        others = "" if limit is None else f"; a collective of other ranks fails after {limit:.0f} s"
        at_most, command = f"it goes on after {LIMIT:.0f} s", f"launcher debug {os.environ['LAUNCHER_RUN']}"
        _say(f"rank {self.rank} on {self._node} waits in {self._what}: {command} ({at_most}{others})")
        if self._waits is None:
            self._waits = threading.Event()
            threading.Thread(target=self._beat, args=(self._waits,), daemon=True).start()
        self._note("waits", self._what)

    def _beat(self, done: threading.Event) -> None:
        """Extend this node's file, if its entry script has made it, as long as the rank waits or is debugged."""
        while not done.wait(BEAT):
            with self.command.lock:
                since = self.command.since
                if since is not None and time.monotonic() - since >= BEAT and self._noted != "busy":
                    self._note("busy", self._what)
            with contextlib.suppress(OSError):  # no hang_timeout here
                file = os.open(self._state / f"{self._node}.alive", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
                try:
                    os.write(file, b".")
                finally:
                    os.close(file)

    def _note(self, event: str, what: str = "") -> None:
        self._noted = event
        _note(event, self.rank, self.pid, what)

    def _done(self) -> None:
        if self._waits is not None:
            self._waits.set()
            self._waits = None
            self._note("goes")

    def end(self, text: str = "") -> None:
        """Close the connection. text: is sent before."""
        if self.pid != os.getpid():  # at the exit of a forked process
            return
        self.command.end()
        self._done()  # first: `launcher debug` then looks for the next rank
        self._send(f"{self._text}{text}\n" if text else self._text)
        self._drop()
        self._text = ""

    def _drop(self) -> None:
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)  # _receive() ends
            self._link.close()
        self._link = None

    def _send(self, text: str) -> None:
        if self._link is not None:
            try:
                self._link.sendall(text.encode("utf-8", "replace"))
            except OSError:
                self._drop()  # the next prompt waits for another one

    def _receive(self, link: socket.socket, lines: queue.SimpleQueue[bytes | None]) -> None:
        rest = b""
        while True:
            try:
                received = link.recv(65536)
            except OSError:
                received = b""
            if not received:
                lines.put(None)
                return
            *whole, rest = (rest + received).split(b"\n")
            for line in whole:
                if line != INTERRUPT:
                    lines.put(line)
                elif not self.command.interrupt():
                    with contextlib.suppress(OSError):
                        link.sendall(f"rank {self.rank} stopped in a thread, which cannot be interrupted\n".encode())

    # --- what pdb calls

    def write(self, text: str) -> int:
        whole, end, self._text = (self._text + text.replace("\0", "")).rpartition("\n")
        self._send(whole + end)
        return len(text)

    def flush(self) -> None:
        """The last line stays: only readline() shows whether it is a prompt."""

    def readline(self) -> str:
        """Return the answer to a prompt; if nobody comes after a lost connection, that to go on."""
        self.command.end()
        if self._noted == "busy":
            self._note("taken", self._what)
        prompt, self._text = self._text, ""
        while True:
            self._send(f"\0{prompt}\0")
            line = None if self._link is None else self._lines.get()
            if line is not None:
                self.command.begin()
                return line.decode("utf-8", "replace") + "\n"
            self._drop()
            if not self.connect(self._what):
                return "continue\n"
            if self.on_return is not None:
                self.on_return()


class PdbCommand:
    """What pdb runs between two prompts. SIGINT interrupts it in the main thread: only there Python handles signals."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.since: float | None = None  # by time.monotonic(); None: none runs
        self.on_interrupt: Callable[[int, FrameType | None], None] | None = None
        self._previous: Any = None  # the program's handler of SIGINT, while that is ours

    def begin(self) -> None:
        here = threading.current_thread() is threading.main_thread()
        if here and self.on_interrupt is not None and signal.getsignal(signal.SIGINT) is not None:
            self._previous = signal.signal(signal.SIGINT, self.on_interrupt)
        self.since = time.monotonic()

    def end(self) -> None:
        with self.lock:
            self.since = None  # no SIGINT comes later
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def interrupt(self) -> bool:
        """Called by another thread. Return whether it can be interrupted."""
        with self.lock:
            if self.since is not None and self._previous is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return self.since is None or self._previous is not None


def _place(frame: FrameType) -> str:
    """Return `train.py:87`, printable, of the first frame that is not torch's own breakpoint()."""
    if frame.f_globals.get("__name__") == "torch.distributed" and frame.f_back is not None:
        frame = frame.f_back
    file = frame.f_code.co_filename
    with contextlib.suppress(OSError):  # the working directory was removed
        here = f"{Path.cwd()}{os.sep}"
        file = file[len(here) :] if file.startswith(here) else file
    name = "".join(char if char.isprintable() else "?" for char in file)
    return f"{name[-LONGEST_PLACE:]}:{frame.f_lineno}"


def _skip(place: str, why: str = "nobody watches a run on a cluster, of a sweep or with CI=true") -> None:
    if place not in _skipped:
        _skipped.add(place)
        rank = _rank()
        _say(f"rank {rank} on {os.environ.get('LAUNCHER_NODE', '')} skips breakpoint() in {place}: {why}")
        _note("skips", rank, os.getpid(), f"{place}: {why}")


def _rank() -> str:
    return os.environ.get("RANK") or os.environ.get("LAUNCHER_NODE_RANK") or "0"


def _note(event: str, rank: str, pid: int, what: str) -> None:
    attempts = Path(os.environ["LAUNCHER_OUTPUT"], "state", f"{os.environ['LAUNCHER_NODE']}.attempts")
    line = f"{event} {rank} {pid} {int(time.time())} {what}".rstrip()
    with contextlib.suppress(OSError), attempts.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")  # a full disk must not stop the job


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(2, f"launcher: {text}\n".encode())  # not sys.stderr, which a program may replace


def _time_limit() -> float | None:
    """Return the seconds after which a collective of the default process group fails; None: not known."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    group = getattr(getattr(c10d, "GroupMember", None), "WORLD", None)
    for device in ("cuda", "cpu"):
        with contextlib.suppress(Exception):  # private, and each torch has its own
            backend = group._get_backend(sys.modules["torch"].device(device))  # type: ignore[union-attr]
            return float(backend.options._timeout.total_seconds())
    return None
