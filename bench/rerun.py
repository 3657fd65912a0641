"""From Enter to the first line and the first step after one line was edited: `launcher up` and `docker run` by hand.

    python -m tests.bed up && python -m bench.rerun [--compile] [--far] [--nodes 2] [--repeat 9] [--json FILE]

One line of a program is edited, then it is started again, on all nodes of the test bed, which have the image. By hand
is bench/programs/launch.sh, which sends the code to each node, calls `docker run` there, and then follows the log.
The launcher's earlier runs have ended and are not removed by hand: the next `up` does that; the script's are removed
outside of the time. Two times are measured, from the call:

- until the last rank runs the program's first line, which stands before `import torch`. The ranks report it: the nodes
  of the bed share this machine's clock;
- until the line that rank 0 prints after the first step of all ranks is on this side's standard output.

The methods take turns, and the order changes each time; a ratio is the median over turns.

With --compile, the step calls torch.compile, in an image with a C++ compiler, which is made with this machine's apt
source; the third method is the launcher with `cache: false`. With --far, the nodes have an ssh round trip of 50 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.environment import LAUNCHER, LIMIT, Caller, bed_of
from bench.launch import DELAY, JOB_KEYS, PROGRAMS
from tests.bed.bed import Bed
from tests.bed.delay import delayed
from tests.bed.settings import SITE_PACKAGES_IN_NODE, TRAIN_IMAGE

FIRST_LINE, FIRST_STEP = "first line", "first step"
LAUNCHED, UNCACHED, BY_HAND = "launcher", "launcher, cache: false", "by hand"
COMPILER_IMAGE = "launcher-bench-compiler"
DOCKERFILE = f"""
FROM {TRAIN_IMAGE}
RUN apt-get update -q && apt-get install -qy --no-install-recommends g++ python3-dev && rm -rf /var/lib/apt/lists/*
"""
FIGURES = re.compile(r"edit (?P<edit>\d+): the last rank began at (?P<began>[0-9.]+), first step done")


Rerun = Callable[[], Mapping[str, float]]  # returns seconds by what is waited for


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.rerun", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=9, help="turns, after one warm-up")
    parser.add_argument("--compile", action="store_true", help="the step is compiled")
    parser.add_argument("--far", action="store_true", help="distant nodes")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    call = parser.parse_args()
    machine = report.machine()
    with bed_of(call.nodes) as bed, _config(bed, far=call.far) as config, Caller.at(config) as caller:
        if call.compile:
            _compiler_image(bed, call.nodes)
        reruns = Reruns(bed, caller, call.nodes, compiles=call.compile)
        seconds = measure(reruns.methods(), call.repeat)
    machine["load_after"] = round(os.getloadavg()[0], 2)
    results = [{"what": what, "method": name, **report.summary(values)} for (what, name), values in seconds.items()]
    print()
    print(report.table(list(_rows(seconds))))
    if call.json:
        delay = DELAY if call.far else 0.0
        shape = {"nodes": call.nodes, "compile": call.compile, "delay_each_way_s": delay}
        report.write(call.json, {"machine": machine, **shape, "results": results})
    return 0


def measure(methods: Mapping[str, Rerun], repeat: int) -> dict[tuple[str, str], list[float]]:
    """Return seconds by what is waited for and by method; one turn has one value of each."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(repeat + 1):
        for name in list(methods)[:: 1 if turn % 2 else -1]:
            took = methods[name]()
            for what, value in took.items():
                if turn:  # the first fills caches
                    seconds.setdefault((what, name), []).append(value)
            shown = ", ".join(f"{what} {value:.2f} s" for what, value in took.items())
            print(f"  {turn}/{repeat}  {name:22}  {shown}", flush=True)
    return dict(sorted(seconds.items()))


class Reruns:
    """Each call edits one line of the program, and starts it."""

    def __init__(self, bed: Bed, caller: Caller, nodes: int, *, compiles: bool) -> None:
        self._bed = bed
        self._caller = caller
        self._nodes = bed.nodes[:nodes]
        self._image = COMPILER_IMAGE if compiles else TRAIN_IMAGE
        self._options = ["--compile"] if compiles else []
        self._edits = 0
        self._code = caller.folder / "code"  # without the runs' records
        self._code.mkdir()

    def methods(self) -> dict[str, Rerun]:
        found = {LAUNCHED: self.launcher, BY_HAND: self.by_hand}
        return {**found, UNCACHED: self.uncached} if self._options else found

    def launcher(self) -> Mapping[str, float]:
        return self._up("rerun")

    def uncached(self) -> Mapping[str, float]:
        return self._up("rerun-uncached", cache=False)

    def _up(self, name: str, **more: Any) -> Mapping[str, float]:
        self._edit()
        aliases, run = [node.alias for node in self._nodes], {"script": "code/rerun.py", "args": self._options}
        job = self._caller.job(name, aliases, run, code="code", image={"ref": self._image}, **JOB_KEYS, **more)
        return self._until_first_step([LAUNCHER, "up", job], self._caller.folder, self._caller.environment)

    def by_hand(self) -> Mapping[str, float]:
        self._edit()
        name = f"bench-rerun-{self._edits}"
        given = [name, self._nodes[0].address, self._image, SITE_PACKAGES_IN_NODE]
        argv = ["sh", str(PROGRAMS / "launch.sh"), *given, *(node.alias for node in self._nodes)]
        program = " ".join(["rerun.py", *self._options])
        more = {"SSH": f"ssh -F {self._caller.ssh_config}", "SCRIPT": program}
        took = self._until_first_step(argv, self._code, {**self._caller.environment, **more})
        for node in self._nodes:
            self._bed.ssh(node.alias, f"docker rm -f {name} >/dev/null; rm -rf job")
        return took

    def _edit(self) -> None:
        """Change one line."""
        self._edits += 1
        text = (PROGRAMS / "rerun.py").read_text()
        assert text.count("EDIT = 0\n") == 1
        (self._code / "rerun.py").write_text(text.replace("EDIT = 0\n", f"EDIT = {self._edits}\n"))

    def _until_first_step(self, argv: Sequence[str], folder: Path, variables: Mapping[str, str]) -> Mapping[str, float]:
        """Return both times; wait for the program's end. Raises RuntimeError, also for an earlier edit's line."""
        began, found = time.time(), None
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                argv, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            assert process.stdout is not None
            for line in process.stdout:
                if found is None and (found := FIGURES.search(line)):
                    step = time.time() - began
            code = process.wait(LIMIT)
            if code or found is None or int(found["edit"]) != self._edits:
                errors.seek(0)
                raise RuntimeError(f"{argv[0]}: exit {code}, {found and found[0]}\n{errors.read()}")
        return {FIRST_LINE: float(found["began"]) - began, FIRST_STEP: step}


def _rows(seconds: Mapping[tuple[str, str], Sequence[float]]) -> Iterator[Sequence[str]]:
    yield "until", "method", "median s", "min", "max", "n", "by hand / it"
    for (what, name), values in seconds.items():
        ratios = [theirs / ours for ours, theirs in zip(values, seconds[what, BY_HAND], strict=True)]
        own = report.summary(values)
        cells = (f"{own[key]:.2f}" for key in ("median", "min", "max"))
        yield what, name, *cells, str(len(values)), f"{report.summary(ratios)['median']:.2f}"


@contextlib.contextmanager
def _config(bed: Bed, *, far: bool) -> Iterator[Path]:
    """Yield the ssh config that both use."""
    if far:
        with delayed(bed, DELAY) as config:
            yield config
    else:
        yield bed.ssh_config


def _compiler_image(bed: Bed, nodes: int) -> None:
    """Make the image, and copy it to the nodes; neither is timed."""
    subprocess.run(["docker", "build", "-q", "-t", COMPILER_IMAGE, "-"], input=DOCKERFILE, text=True, check=True)
    for node in bed.nodes[:nodes]:
        bed.preload(node, COMPILER_IMAGE)


if __name__ == "__main__":
    sys.exit(main())
