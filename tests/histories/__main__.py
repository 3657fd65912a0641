"""Histories: `python -m tests.histories --seed N --minutes M [--bed]`, `--replay FILE`, `--shrink FILE`.

Each history that breaks a sentence is written to a file, with its plan, and can be replayed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.bed import cluster
from tests.bed.bed import Bed
from tests.bed.settings import Settings
from tests.bed.shell import output
from tests.histories import aim, play
from tests.histories.bed import BedWorld
from tests.histories.checker import Broken, check
from tests.histories.history import Asked, History, dump, read
from tests.histories.table import Cell, count, rows

One = Callable[[Sequence[play.Step]], tuple[History, list[Broken]]]


def one(make: Callable[[Path, str], play.World], steps: Sequence[play.Step]) -> tuple[History, list[Broken]]:
    with tempfile.TemporaryDirectory(prefix="histories-", ignore_cleanup_errors=True) as root:
        history = play.play(steps, Path(root), make)
    return history, check(history)


@contextlib.contextmanager
def worlds(bed: bool) -> Iterator[Callable[[Path, str], play.World]]:
    """How a world is made: of plain processes, or on the bed of LAUNCHER_BED_NAME, as one test session uses it."""
    if not bed:
        yield play.World
        return
    settings = Settings.from_environment()
    with cluster.locked(settings, "session"):
        cluster.up(settings, 2)
        yield functools.partial(BedWorld, Bed.attach(settings))


def shrink(one: One, steps: list[play.Step], sentences: set[int], tries: int) -> list[play.Step]:
    """Leave out halves, then quarters, ..., without which the same sentence is still broken in one of some tries."""
    size = len(steps) // 2
    while size:
        for start in range(0, len(steps), size):
            fewer = [*steps[:start], *steps[start + size :]]
            if any(sentences & {each.sentence for each in one(fewer)[1]} for _ in range(tries)):
                steps = fewer
                print(f"{len(steps)} steps are enough", flush=True)
                break
        else:
            size //= 2
    return steps


def save(file: Path, steps: Sequence[play.Step], history: History) -> None:
    file.write_text(play.dump(steps) + dump(history.records), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.histories")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--histories", type=int, default=1 << 30, help="at most so many")
    parser.add_argument("--into", type=Path, default=Path(), help="folder for histories that break a sentence")
    parser.add_argument("--bed", action="store_true", help="on the test bed")
    parser.add_argument("--stop", action="store_true", help="at the first broken sentence")
    parser.add_argument("--counts", type=Path, metavar="FILE", help="has the table's numbers; aims at the least")
    parser.add_argument("--played", type=Path, metavar="FILE", help="appends a row of what was played, and on what")
    parser.add_argument("--replay", type=Path, metavar="FILE")
    parser.add_argument("--check", type=Path, metavar="FILE", help="check a written history again")
    parser.add_argument("--shrink", type=Path, metavar="FILE")
    parser.add_argument("--tries", type=int, default=3)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ctrl-C: no process and no disk is left
    if asked.check:
        broken = check(read(asked.check))
        print(*broken, sep="\n")
        return bool(broken)
    with worlds(asked.bed) as make:
        played = functools.partial(one, make)
        return _again(asked, played) if asked.replay or asked.shrink else _play(asked, played)


def _again(asked: argparse.Namespace, one: One) -> int:
    file = asked.replay or asked.shrink
    steps, sentences = play.load(file.read_text().splitlines()), {each.sentence for each in check(read(file))}
    if asked.shrink:
        steps = shrink(one, steps, sentences, asked.tries)
    again = [one(steps) for _ in range(asked.tries)]
    failed = [(history, broken) for history, broken in again if broken]
    for history, broken in failed:
        print(*broken, sep="\n")
        save(file.with_suffix(".again"), steps, history)
    print(f"{len(failed)} of {asked.tries} replays break a sentence")
    return bool(failed)


def _play(asked: argparse.Namespace, one: One) -> int:
    start, number, bad, counted = time.monotonic(), 0, list[str](), Counter[Cell]()
    until, place = start + asked.minutes * 60, play.BED if asked.bed else play.PLAIN
    if asked.counts and asked.counts.exists():
        counted.update({tuple(cell): times for *cell, times in json.loads(asked.counts.read_text())})
    while number < asked.histories and time.monotonic() < until and not (asked.stop and bad):
        name = f"{asked.seed}-{number}"
        steps = aim.plan(name, counted, place) if asked.counts else play.plan(name, place=place)
        began = time.monotonic()
        history, broken = one(steps)
        number += 1
        print(f"{name}: {len(history.all(Asked))} commands in {time.monotonic() - began:.0f} s", flush=True)
        counted += count(history)
        if broken:
            bad.append(name)
            file = asked.into / f"history-{name}.jsonl"
            save(file, steps, history)
            print(f"{file}:", *broken, sep="\n  ", flush=True)
        if asked.counts:
            asked.counts.write_text(json.dumps([[*cell, times] for cell, times in counted.items()]))
    print(rows(counted))
    minutes = (time.monotonic() - start) / 60
    print(f"seed {asked.seed}: {number} histories in {minutes:.0f} minutes, {len(bad)} with a broken sentence")
    if asked.played:
        where, commit = "bed" if asked.bed else "plain", output(["git", "log", "-1", "--format=%h"])
        cells = (asked.seed, where, f"{minutes:.0f}", number, ", ".join(bad) or "none", commit)
        with asked.played.open("a", encoding="utf-8") as file:
            file.write(f"| {' | '.join(map(str, cells))} |\n")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
