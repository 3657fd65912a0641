"""The path of a job through the modules of the launcher in `launcher up`, of a log line through functions, of a step.

    python -m bench.path JOB [--ssh-config FILE] [--line WORD]
    python -m bench.path --train [OPTION OF THE TRAINER ...]

Traces `launcher.up(job).wait()`. A module is counted when one of its functions is first called with the job or a value
derived from it (VALUES). The path turns back if such a module is not called by the previous one, directly or
indirectly, but by a module further up. Calls in a thread are attributed to the caller that started the thread.

With --line, the job is run by `launcher up` in the terminal. A function is counted when it takes or returns a line that
contains WORD, in order of first occurrence: from the channel of the node to the screen and to the file in runs/.

With --train, a run on the digits of `jobs/data` is traced from its third step to its fourth, without an interval's
report: the functions of `train/` that its main thread calls, in the order of their first calls. A change of file is
between a function and the next one of this list.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import launcher
from launcher.cli.main import main as launcher_command
from launcher.run.watch.messages import Output
from train.config import parse
from train.distributed.world import StopSignal, start
from train.trainer import Trainer

VALUES = {
    *("Job", "Snapshot", "NodeFacts", "ImageFacts", "ImageOnNodes", "Rendezvous", "Plan", "NodePlan", "ContainerSpec"),
    *("Record", "Attached", "Outcome"),
}
NO_STEPS = ("launcher.model.", "launcher.job.models")  # values that are passed between modules
DIGITS = Path(__file__).parents[1] / "jobs" / "data" / "digits.tar"
START, PARALLEL = "launcher.api.up", "launcher.node.parallel"


class JobPath:
    """The modules in order of their first call, each with its callers."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}
        self._started: dict[int, list[str]] = {}  # by task: the modules that started it
        self._lock = threading.Lock()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        module = str(frame.f_globals.get("__name__", ""))
        if event != "call" or not module.startswith("launcher.") or module.startswith(NO_STEPS):
            return
        if (module, frame.f_code.co_name) == (PARALLEL, "__init__"):
            self._started[id(frame.f_locals["self"])] = self._above(frame)
        if any(_belongs_to_job(value) for value in frame.f_locals.values()):
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
        """Return each module from which the path turned back, and the next one."""
        names = list(self.found)
        return [(one, two) for one, two in pairwise(names) if one not in self.found[two]]


class LinePath:
    """The functions that take or return a line with `word`: (module, function), in order of first occurrence."""

    def __init__(self, word: str) -> None:
        self.found: dict[tuple[str, str], None] = {}
        self._word = word

    def __call__(self, frame: FrameType, event: str, returned: Any) -> None:
        module = str(frame.f_globals.get("__name__", ""))
        own = module.startswith("launcher.") and not frame.f_code.co_name.startswith(("<", "__init__"))
        if own and event in ("call", "return"):
            values = frame.f_locals.values() if event == "call" else [returned]
            if any(self._contains_word(value) for value in list(values)):
                self.found.setdefault((module, frame.f_code.co_name))

    def _contains_word(self, value: object) -> bool:
        if isinstance(value, bytes):
            return self._word.encode() in value
        if isinstance(value, str):
            return self._word in value
        if isinstance(value, (list, tuple)):
            return any(self._contains_word(part) for part in value[:10])
        return isinstance(value, Output) and self._contains_word(vars(value).get("data"))


class StepPath:
    """The trainer's functions in one step of a run: (file, first line, name), in order of their first calls."""

    STEP = 3  # the first ones create what later ones use again

    def __init__(self) -> None:
        self.found: dict[tuple[str, int, str], None] = {}
        self._steps = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        main = threading.current_thread() is threading.main_thread()
        if event != "call" or not main or not str(frame.f_globals.get("__name__", "")).startswith("train."):
            return
        code = frame.f_code
        self._steps += code is Trainer.train_step.__code__
        if self._steps == self.STEP and not code.co_name.startswith(("<", "__init__")):
            file = code.co_filename.rpartition("/train/")[2]
            self.found.setdefault((file, code.co_firstlineno, code.co_name))


def _belongs_to_job(value: object) -> bool:
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    return type(value).__name__ in VALUES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.path", description=__doc__.splitlines()[0])
    parser.add_argument("job", type=Path, nargs="?")
    parser.add_argument("--ssh-config", type=Path)
    parser.add_argument("--line", metavar="WORD", help="trace a line of output that is not in the job file")
    parser.add_argument("--train", nargs=argparse.REMAINDER, metavar="OPTION", help="trace a step of the trainer")
    call = parser.parse_args()
    if call.train is not None:
        return trace_step(call.train)
    if not call.job:
        parser.error("JOB or --train is missing")
    if call.line:
        return trace_line(call.job, call.ssh_config, call.line)
    path = JobPath()
    job = launcher.load(call.job)
    with _traced(path), launcher.up(job, ssh_config=call.ssh_config) as run:
        run.wait()
    for module in path.found:
        print(module.removeprefix("launcher."))
    for one, two in path.turns():
        print(f"turned back from {one} before {two}")
    print(f"{len(path.found)} modules, {len(path.turns())} turns back")
    return None


def trace_line(job: Path, ssh_config: Path | None, word: str) -> None:
    path = LinePath(word)
    sys.argv = ["launcher", "up", str(job), *(["--ssh-config", str(ssh_config)] if ssh_config else [])]
    with _traced(path), suppress(SystemExit):
        launcher_command()
    for module, function in path.found:
        print(f"{module.removeprefix('launcher.')}  {function}")
    print(f"{len(path.found)} functions in {len({module for module, _ in path.found})} modules")


def trace_step(options: list[str]) -> None:
    path = StepPath()
    with tempfile.TemporaryDirectory() as output:
        run = ["--arch", "smallcnn", "--image-size", "16", "--batch-size", "256", "--epochs", "1", "--workers", "1"]
        config = parse(["--data", str(DIGITS), "--output", output, *run, *options])
        world = start(config)
        with _traced(path):
            Trainer(config, world).train(StopSignal(world))
    for file, _, name in path.found:
        print(f"{file}  {name}")
    files = [file for file, *_ in path.found]
    changes = sum(one != two for one, two in pairwise(files))
    print(f"{len(files)} functions in {len(set(files))} files, {changes} changes of file")


@contextmanager
def _traced(path: JobPath | LinePath | StepPath) -> Iterator[None]:
    sys.setprofile(path)
    threading.setprofile(path)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


if __name__ == "__main__":
    main()
