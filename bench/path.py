"""Through which modules of the launcher a job passes in `launcher up`, and how often its way turns back up; and through
which functions a line of the log passes.

    python -m bench.path JOB [--ssh-config FILE] [--line WORD]

Runs the job by `launcher.up(job).wait()`, traced. A module counts when a function of it is first called with the job or
with what is made of it (VALUES). The way turns back up where such a module is not called from the one that came before
it, directly or through others, but from one above. A job that a thread works on was called where that was started.

With --line the job runs by `launcher up`, on the screen. A function counts when it takes or returns a line that
contains WORD, in the order of the first time: from the channel of the node to the screen and to the file in runs/.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import launcher
from launcher.cli.main import main as launcher_command
from launcher.run.messages import Output

VALUES = {
    *("Job", "Snapshot", "NodeFacts", "ImageFacts", "ImageOnNodes", "Rendezvous", "Plan", "NodePlan", "ContainerSpec"),
    *("Record", "Attached", "Outcome"),
}
NO_STEPS = ("launcher.model.", "launcher.job.models")  # values: what the others pass on
START, PARALLEL = "launcher.api.up", "launcher.node.parallel"


class Way:
    """The modules in the order of their first call, each with those above it."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}
        self._started: dict[int, list[str]] = {}  # by thread's job: the modules that started it
        self._lock = threading.Lock()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        module = str(frame.f_globals.get("__name__", ""))
        if event != "call" or not module.startswith("launcher.") or module.startswith(NO_STEPS):
            return
        if (module, frame.f_code.co_name) == (PARALLEL, "__init__"):
            self._started[id(frame.f_locals["self"])] = self._above(frame)
        if any(_is_of_the_job(value) for value in frame.f_locals.values()):
            above = self._above(frame.f_back)
            with self._lock:
                if module not in self.found and START in [module, *above]:
                    self.found[module] = above

    def _above(self, frame: FrameType | None) -> list[str]:
        modules = []
        while frame is not None:
            modules.append(str(frame.f_globals.get("__name__", "")))
            if (modules[-1], frame.f_code.co_name) == (PARALLEL, "_run"):
                modules += self._started.get(id(frame.f_locals["self"]), [])
            frame = frame.f_back
        return modules

    def turns(self) -> list[tuple[str, str]]:
        """Each module from which the way turned back up, and the one that came next."""
        names = list(self.found)
        return [(one, two) for one, two in pairwise(names) if one not in self.found[two]]


class LineWay:
    """The functions that take or return a line with `word`: (module, function), in the order of the first time."""

    def __init__(self, word: str) -> None:
        self.found: dict[tuple[str, str], None] = {}
        self._word = word

    def __call__(self, frame: FrameType, event: str, returned: Any) -> None:
        module = str(frame.f_globals.get("__name__", ""))
        own = module.startswith("launcher.") and not frame.f_code.co_name.startswith(("<", "__init__"))
        if own and event in ("call", "return"):
            values = frame.f_locals.values() if event == "call" else [returned]
            if any(self._has_it(value) for value in list(values)):
                self.found.setdefault((module, frame.f_code.co_name))

    def _has_it(self, value: object) -> bool:
        if isinstance(value, bytes):
            return self._word.encode() in value
        if isinstance(value, str):
            return self._word in value
        if isinstance(value, (list, tuple)):
            return any(self._has_it(part) for part in value[:10])
        return isinstance(value, Output) and self._has_it(vars(value).get("data"))


def _is_of_the_job(value: object) -> bool:
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    return type(value).__name__ in VALUES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.path", description=__doc__.splitlines()[0])
    parser.add_argument("job", type=Path)
    parser.add_argument("--ssh-config", type=Path)
    parser.add_argument("--line", metavar="WORD", help="trace a line that the job prints, and not in the job file")
    call = parser.parse_args()
    if call.line:
        return trace_line(call.job, call.ssh_config, call.line)
    way = Way()
    job = launcher.load(call.job)
    with _traced(way), launcher.up(job, ssh_config=call.ssh_config) as run:
        run.wait()
    for module in way.found:
        print(module.removeprefix("launcher."))
    for one, two in way.turns():
        print(f"back up from {one} before {two}")
    print(f"{len(way.found)} modules, {len(way.turns())} turns back up")
    return None


def trace_line(job: Path, ssh_config: Path | None, word: str) -> None:
    way = LineWay(word)
    sys.argv = ["launcher", "up", str(job), *(["--ssh-config", str(ssh_config)] if ssh_config else [])]
    with _traced(way), suppress(SystemExit):
        launcher_command()
    for module, function in way.found:
        print(f"{module.removeprefix('launcher.')}  {function}")
    print(f"{len(way.found)} functions in {len({module for module, _ in way.found})} modules")


@contextmanager
def _traced(way: Way | LineWay) -> Iterator[None]:
    sys.setprofile(way)
    threading.setprofile(way)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


if __name__ == "__main__":
    main()
