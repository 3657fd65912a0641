"""What only a GPU can show, in one command: the trainer's speed, its loader's, and the checks of its numerics.

    python -m bench.gpu [--minutes 8] [--json FILE] [--only NAME ...] [--dry]

Requires one GPU and no network; uses the installed torch and torchvision. What tells most comes first (SECTIONS). Every
row is written to the file, then printed, as soon as it is known. --minutes leaves out what does not fit, and says so.
One process runs everything (tests/gpu/worker.py); a row that fails keeps its whole output and costs a new process.
`--dry` runs the same with a small model on a simulated GPU on the CPU (tests/gpu/pretend.py). The exit code is 1 if a
row failed.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bench import gpu_keeper, report

Figures = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """Rows that are computed together."""

    seconds: float  # on an H100
    limit: float  # seconds
    extra: bool = False  # the first to be left out


SECTIONS = {  # in this order; tests/gpu/checks.py has the functions
    "machine": Section(15, 60),
    "step": Section(20, 120),
    "fp16": Section(20, 120),
    "compile": Section(75, 240),
    "batch": Section(20, 120),
    "graph": Section(10, 90),
    "autotune": Section(110, 240, extra=True),
    "profile": Section(20, 120),
    "loader": Section(65, 150),
    "files": Section(25, 120),
    "slots": Section(6, 60),
    "syncbn": Section(5, 60),
    "ddp": Section(4, 60),
    "fsdp": Section(6, 60),
    "fsdp_options": Section(60, 240),
    "loss_scale": Section(4, 60),
    "ema": Section(4, 60),
    "amp": Section(70, 180),
    "launcher": Section(40, 120),
    "decode_jpeg": Section(15, 90),
    "channels_last": Section(15, 90, extra=True),
    "options": Section(30, 120, extra=True),
    "short": Section(60, 240, extra=True),
}
START = 15.0  # seconds until a worker is ready
WIDTH = 130  # of a printed line of a list; the file has all
PATIENCE = 5  # factor of the limits on a CPU
WORKER = (sys.executable, "-m", "tests.gpu.worker")
ROOT = Path(__file__).resolve().parents[1]


class FailedError(Exception):
    """A section has ended early: why, and all that it printed."""

    def __init__(self, why: str, output: str) -> None:
        super().__init__(why)
        self.why, self.output = why, output


class Worker:
    """The process that runs the sections. Whatever it starts ends with it, or with this process (gpu_keeper.py)."""

    def __init__(self, dry: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-gpu-")
        self._log = Path(self._folder.name) / "output"
        self._results, results = os.pipe()
        lifeline, self._lifeline = os.pipe()
        command = [sys.executable, "-m", "bench.gpu_keeper", str(lifeline), *WORKER, str(results)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *(["--dry"] if dry else [])],
                cwd=ROOT,
                env=os.environ | {"TMPDIR": self._folder.name, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(lifeline, results),
                start_new_session=True,
            )
        os.close(lifeline)
        os.close(results)
        self._lines, self._start = Lines(self._results), 0

    def run(self, name: str, limit: float) -> Iterator[tuple[str, Figures]]:
        """Yield the rows of a section, each as soon as it is known.

        Raises:
            FailedError: it failed, took longer than `limit` seconds, or has ended the process; use another worker.
        """
        self._start, until = self._log.stat().st_size, time.monotonic() + limit
        commands: BinaryIO = self._process.stdin  # type: ignore[assignment]
        with suppress(BrokenPipeError):
            commands.write(f"{name}\n".encode())
            commands.flush()
        while True:
            try:
                line = self._lines.next(until)
            except TimeoutError:
                raise FailedError(f"ended after {limit:.0f} s", self.output()) from None
            if not line:  # with an unfinished line, it was killed while it wrote it
                code = self.end()
                text = self.output()
                last = [line for line in text.splitlines() if line.strip()] or ["no output"]
                raise FailedError(f"ended by signal {code - 128}" if code > 128 else last[-1].strip(), text)
            found = json.loads(line)
            if "end" in found:
                return
            yield found["row"], found["figures"]

    def output(self) -> str:
        """Return what the last section has printed."""
        with self._log.open("rb") as log:
            log.seek(self._start)
            return log.read().decode(errors="replace")

    def end(self) -> int:
        """End the process and all that it started; return its exit code."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(2 * gpu_keeper.GRACE)
        print(f"process {self._process.pid} or one that it started does not end", file=sys.stderr)
        return 128 + signal.SIGKILL

    def close(self) -> None:
        """End it, and remove its files."""
        self.end()
        self._process.stdin.close()  # type: ignore[union-attr]
        os.close(self._results)
        self._folder.cleanup()


class Lines:
    """Reads lines from a pipe, with a time limit."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._rest = pipe, b""

    def next(self, until: float) -> bytes:
        """Return the next line, empty at the end of the pipe. Raises TimeoutError."""
        while b"\n" not in self._rest:
            if not select.select([self._pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError
            piece = os.read(self._pipe, 1 << 16)
            if not piece:
                return b""
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line


class Results:
    """The rows so far, in a file."""

    def __init__(self, path: Path | None, dry: bool, planned: Sequence[str]) -> None:
        self._path = path
        self.rows: dict[str, Figures] = {}
        self.left_out: dict[str, str] = {}
        self._all = {"machine": report.machine(), "dry": dry, "planned": list(planned), "left out": self.left_out}
        self._all |= {"rows": self.rows}
        self.write()

    def add(self, name: str, figures: Figures) -> None:
        """Write a row, then print it."""
        self.rows[name] = figures
        self.write()
        print(shown(name, figures), flush=True)

    def leave_out(self, name: str, why: str) -> None:
        self.left_out[name] = why
        self.write()
        print(f"{name}: left out: {why}", flush=True)

    def write(self) -> None:
        """Replace the file, so that it is complete at any moment."""
        if self._path:
            part = self._path.with_name(f"{self._path.name}.part")
            part.write_text(json.dumps(self._all, indent=2) + "\n")
            part.replace(self._path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help="do what fits into this time; default: everything")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS))
    parser.add_argument("--dry", action="store_true", help="small models on a CPU")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    chosen, rest = plan([name for name in SECTIONS if name in options.only], options.minutes)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _interrupt)
    results = Results(options.json, options.dry, chosen)
    print(f"planned, {START + sum(SECTIONS[name].seconds for name in chosen):.0f} s: {' '.join(chosen)}")
    if rest:
        print(f"does not fit, comes last if time is left: {' '.join(rest)}", flush=True)
    code = measure(results, chosen + rest, until, options.dry)
    if results.left_out:
        print(f"\nnot measured: {', '.join(results.left_out)}")
    print(f"\n{row(results.rows)}")
    return code


def _interrupt(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # the clean-up has begun
    raise KeyboardInterrupt(number)


def plan(wanted: Sequence[str], minutes: float | None) -> tuple[list[str], list[str]]:
    """Return what fits, and what comes after it if time is left: first what is extra, then the last ones."""
    chosen = list(wanted)
    expendable = sorted(wanted, key=lambda name: (not SECTIONS[name].extra, -wanted.index(name)))
    for name in expendable if minutes else ():
        if START + sum(SECTIONS[each].seconds for each in chosen) <= 60 * minutes:
            break
        chosen.remove(name)
    return chosen, [name for name in wanted if name not in chosen]


def measure(results: Results, chosen: Sequence[str], until: float, dry: bool = False) -> int:
    """Run the sections; return the exit code."""
    worker, waiting = None, list(chosen)
    begun = time.monotonic()
    try:
        while waiting:
            name, section = waiting[0], SECTIONS[waiting[0]]
            begun, left = time.monotonic(), until - time.monotonic()
            if left < section.seconds:
                results.leave_out(
                    waiting.pop(0), f"{max(left, 0):.0f} s are left, it takes about {section.seconds:g} s"
                )
                continue
            worker = worker or Worker(dry)
            try:
                for found, figures in worker.run(name, min(left, section.limit * (PATIENCE if dry else 1))):
                    results.add(found, {"ok": None, "seconds": round(time.monotonic() - begun, 1)} | figures)
                    begun = time.monotonic()
            except FailedError as error:
                worker.close()
                worker = None
                results.add(name if name not in results.rows else f"{name}, then", failed(begun, error))
            waiting.pop(0)
    except KeyboardInterrupt as interrupt:
        number = signal.Signals(interrupt.args[0])
        if worker:
            error = FailedError(f"ended by {number.name}", worker.output())
            results.add(waiting[0] if waiting[0] not in results.rows else f"{waiting[0]}, then", failed(begun, error))
            waiting.pop(0)
        for name in waiting:
            results.leave_out(name, number.name)
        return 128 + number
    finally:
        if worker:
            worker.close()
    return int(any(figures["ok"] is False for figures in results.rows.values()))


def failed(begun: float, error: FailedError) -> Figures:
    """Return the row of what has ended early."""
    return {"ok": False, "seconds": round(time.monotonic() - begun, 1), "why": error.why, "output": error.output}


def shown(name: str, figures: Figures) -> str:
    """Return a row as text: one line, or a line for each figure that is a list, long, or has lines of its own."""
    verdict = {True: "ok", False: "FAILED", None: "-"}[figures["ok"]]
    line, below = f"{name:<22} {verdict:<7} {figures['seconds']:5.1f} s", list[str]()
    for key, value in figures.items():
        if key in ("ok", "seconds"):
            continue
        texts = value if isinstance(value, list) else str(value).splitlines()
        if isinstance(value, list) or len(texts) > 1:
            below += [f"    {key}:", *(f"      {str(text)[:WIDTH]}" for text in texts)]
        elif len(str(value)) > 50:
            below.append(f"    {key}: {value}")
        else:
            line += f"  {key} {value},"
    return "\n".join([line.rstrip(","), *below])


def row(rows: dict[str, Figures]) -> str:
    """Return a row of the table in docs/internals/benchmarks.md with the table's head."""
    cells = {
        "GPU": ("step", "device"),
        "torch": ("step", "torch"),
        "images/s": ("step", "images/s"),
        "bare loop": ("step", "bare images/s"),
        "ratio": ("step", "ratio"),
        "MFU": ("step", "MFU"),
        "peak MB": ("step", "peak MB"),
        "fp16": ("fp16", "ours fp16"),
        "compile": ("compile", "compiled"),
        "CUDA graph": ("graph", "graph"),
        "from files": ("files", "loaded"),
        "data wait": ("files", "data wait"),
    }
    values = {head: str(rows.get(name, {}).get(key, "")) for head, (name, key) in cells.items()}
    bad = [name for name, found in rows.items() if found["ok"] is False]
    values["checks"] = f"failed: {', '.join(bad)}" if bad else "all ok"
    lines = (values, ["---"] * len(values), values.values())
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
