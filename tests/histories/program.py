"""The program of the runs: prints numbered lines, writes files, ends as it is told, and writes all of this down itself.

program.py JSON [VARIANT]: see `play.Program`. Its own log is $TRUTH, a JSON object a line.
"""

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

RUN, NODE, OUTPUT = (os.environ[f"LAUNCHER_{name}"] for name in ("RUN", "NODE", "OUTPUT"))
IN_CONTAINER = "LAUNCHER_CONTAINER" not in os.environ


def ident() -> int:
    """The process, also for one who looks from outside: containers count their PIDs from 1, so there, when it began."""
    return int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19]) if IN_CONTAINER else os.getpid()


PID = ident()
LOST = """Traceback (most recent call last):
  File "program.py", line 1, in <module>
RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:12345"""
told: list[int] = []


def note(kind: str, **values: object) -> None:
    line = {"kind": kind, "at": time.monotonic(), "run": RUN, "node": NODE, "pid": PID, **values}
    log = os.open(os.environ["TRUTH"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, (json.dumps(line) + "\n").encode())
    os.close(log)


class Peer:
    """The other one of two nodes, over TCP, which is lost if its end comes without a word."""

    def __init__(self) -> None:
        self.master = os.environ["LAUNCHER_NODE_RANK"] == "0"
        self.address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.listening: socket.socket | None = None
        self.connection: socket.socket | None = None
        self.left = False  # without being lost
        if self.master:
            with suppress(OSError):
                self.listening = socket.create_server(self.address, backlog=1)

    def is_lost(self) -> bool:
        if self.left:
            return False
        if self.connection is None:
            with suppress(OSError):
                if self.listening and select.select([self.listening], [], [], 0)[0]:
                    self.connection = self.listening.accept()[0]
                elif not self.master:
                    self.connection = socket.create_connection(self.address, timeout=1)
        elif select.select([self.connection], [], [], 0)[0]:
            try:
                self.left = bool(self.connection.recv(1))
            except OSError:
                return True
            return not self.left
        return False

    def leave(self) -> None:
        with suppress(OSError):
            if self.connection:
                self.connection.sendall(b"bye")


def stop(number: int, frame: Any) -> None:
    told.append(number)
    note("Told")


def main() -> None:
    how = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, stop)
    note("Began", port=int(os.environ.get("MASTER_PORT", "0")), variant=" ".join(sys.argv[2:]))
    if how["forks"] and os.fork() == 0:  # a child that outlives it, and holds its output open
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        os._exit(0)
    for place in (Path(OUTPUT) / f"kept-{NODE}-{PID}", Path(f"made-{PID}")):
        if how["files"]:
            place.write_text(RUN)
            below = f"workdir/{NODE}/{place}" if not place.is_absolute() else place.name
            note("Kept", path=below, text=RUN)
    peer = Peer() if how["meets"] else None
    for number in range(how["lines"]):
        secret = f" {os.environ['TOKEN']}" if number == 1 else ""
        print(f"{NODE} {number}{secret} {'x' * how['wide']}", flush=True)
        if number % 10 == 0:
            note("Alive")
        if told and how["term"] != "ignores":
            time.sleep(how["saving"])
            if peer and how["term"] == "saves":
                peer.leave()
            end(0 if how["term"] == "saves" else 143, number + 1)
        if peer and not told and peer.is_lost():
            raise_lost(number + 1)
        time.sleep(how["pause"])
    code = how["codes"].get(NODE, 0)
    while how["hangs"] and not code and not told:
        if peer and peer.is_lost():
            raise_lost(how["lines"])
        time.sleep(0.1)
        note("Alive")
    if peer and not code:
        peer.leave()
    end(code, how["lines"])


def raise_lost(lines: int) -> None:
    """As torch's gloo says it."""
    print(LOST, file=sys.stderr, flush=True)
    end(1, lines, lost=True)


def end(code: int, lines: int, *, lost: bool = False) -> None:
    note("Ended", code=code, lines=lines, lost=lost)
    os._exit(code)


try:
    main()
except Exception as error:
    note("Crashed", what=repr(error))
    raise
