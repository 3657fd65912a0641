"""The program of the runs: prints numbered lines, writes files, ends as it is told, and writes all of this down itself.

program.py JSON [VARIANT]: see `play.Program`. Its own log is $TRUTH, a JSON object a line.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

RUN, NODE, OUTPUT = (os.environ[f"LAUNCHER_{name}"] for name in ("RUN", "NODE", "OUTPUT"))
IN_CONTAINER = "LAUNCHER_CONTAINER" not in os.environ


def ident() -> int:
    """The process, also for one who looks from outside: containers count their PIDs from 1, so there, when it began."""
    return int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19]) if IN_CONTAINER else os.getpid()


PID = ident()
told: list[int] = []


def note(kind: str, **values: object) -> None:
    line = {"kind": kind, "at": time.monotonic(), "run": RUN, "node": NODE, "pid": PID, **values}
    log = os.open(os.environ["TRUTH"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, (json.dumps(line) + "\n").encode())
    os.close(log)


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
    for number in range(how["lines"]):
        secret = f" {os.environ['TOKEN']}" if number == 1 else ""
        print(f"{NODE} {number}{secret} {'x' * how['wide']}", flush=True)
        if number % 10 == 0:
            note("Alive")
        if told and how["term"] != "ignores":
            time.sleep(how["saving"])
            end(0 if how["term"] == "saves" else 143, number + 1)
        time.sleep(how["pause"])
    code = how["codes"].get(NODE, 0)
    while how["hangs"] and not code and not told:
        time.sleep(0.1)
        note("Alive")
    end(code, how["lines"])


def end(code: int, lines: int) -> None:
    note("Ended", code=code, lines=lines)
    os._exit(code)


try:
    main()
except Exception as error:
    note("Crashed", what=repr(error))
    raise
