"""One curve of a run whose rank 0 moves: what each generation has written, joined by step.

The members of a generation write the same points, each below a folder of its own, so that none is lost with a node:
`generations/0003-1/` is that of node rank 1 in generation 3, with metrics.jsonl and tensorboard/. A generation begins
at the step of its checkpoint, so what older ones have beyond that is superseded, whenever it comes here.
"""

from __future__ import annotations

import os
import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from launcher.local_files import write_atomic
from launcher.records.files import APPEND, open_regular
from launcher.records.paths import GENERATIONS, RunPaths
from launcher.records.store import parse_object
from launcher.records.writer import locked

Position = tuple[int, int]  # a step; and 1: of the validation after it
FOLDER = re.compile(r"(\d{1,9})-(\d{1,9})")  # generation, node rank in it
TEXT = re.compile(r"metrics\.jsonl|rank-\d{1,9}\.log")
_BEFORE, _HEADER, _END = (-2, 0), (-1, 0), (1 << 62, 0)
_EVENTS, _JOINED = "*.tfevents.*", re.compile(r"\d{4,}-\d{4}-\d{12}-")
_VALIDATION = re.compile(rb"/[vV]al|/misclassified")  # in the name of a curve
_POINT = re.compile(rb"(?:\x09.{8})?\x10([\x80-\xff]{0,9}[\x00-\x7f])\x2a", re.DOTALL)
CLOCK_TICK = 10**9  # nanoseconds: how coarse a disk's times of writing may be
_HEAD = 200  # bytes of an event that have its step and the name of its curve


def spans(copies: Sequence[Sequence[Position]], end: Position) -> list[range]:
    """Which points of each copy make a generation's curve up to `end`: all that any copy has, each once.

    Positions never fall. Where a copy ends before another one, its last point may lack some of its curves: it is taken
    from the other.
    """
    kept = [copy[: bisect_right(copy, end)] for copy in copies]
    found, done = [], _BEFORE
    for place, mine in enumerate(kept):
        last = mine[-1] if mine else done
        longer = any(other and other[-1] > last for other in kept[place + 1 :])
        stop = bisect_left(mine, last) if longer else len(mine)
        start = min(bisect_right(mine, done), stop)
        found.append(range(start, stop))
        done = mine[stop - 1] if start < stop else done
    return found


def join(root: Path) -> None:
    """Make metrics.jsonl and tensorboard/ of a run's folder here from what has been brought to its generations/.

    One at a time, while the files in generations/ may grow. Raises OSError.
    """
    with locked(root / GENERATIONS / ".joining"):
        _join(RunPaths(root), _copies(root / GENERATIONS))


def _join(paths: RunPaths, copies: Mapping[int, Sequence[Path]]) -> None:
    newest = max((file.stat().st_mtime_ns for file in (paths.root / GENERATIONS).rglob("*")), default=0)
    if paths.metrics.exists() and paths.metrics.stat().st_mtime_ns == newest:
        return
    settled = time.time_ns() - newest > CLOCK_TICK  # else a file may change once more and keep its time
    lines: list[bytes] = []
    events: set[Path] = set()
    end = _END
    for generation in sorted(copies, reverse=True):
        folders = copies[generation]
        metrics = [_metrics(folder / paths.metrics.name) for folder in folders]
        positions = [[position for position, _ in own] for own in metrics]
        kept = zip(metrics, spans(positions, end), strict=True)
        lines[:0] = [own[place][1] for own, span in kept for place in span]
        # While a generation goes on, one copy: TensorBoard may be reading it, and the others are as far a moment later.
        events |= _join_events(folders[:1] if end == _END else folders, paths.tensorboard, f"{generation:04}", end)
        end = min([end, *(_begin(*own[0]) for own in metrics if own)])
    if lines:
        write_atomic(paths.metrics, b"".join(lines))
        joined = newest if settled else newest - 1
        os.utime(paths.metrics, ns=(joined, joined))
    for file in paths.tensorboard.rglob(_EVENTS):
        if _JOINED.match(file.name) and file not in events:
            file.unlink()


def _copies(folder: Path) -> dict[int, list[Path]]:
    """Each generation's folders, by node rank."""
    named = [(match, path) for path in folder.iterdir() if (match := FOLDER.fullmatch(path.name))]
    ranked = sorted((int(match[1]), int(match[2]), path) for match, path in named)
    return {number: [path for *_, path in copies] for number, copies in groupby(ranked, key=itemgetter(0))}


def _metrics(file: Path) -> list[tuple[Position, bytes]]:
    """The lines of a metrics.jsonl. Programs may write others than the trainer's: these stay where they are."""
    found: list[tuple[Position, bytes]] = []
    last = _HEADER
    for text in file.read_bytes().splitlines(keepends=True) if file.is_file() else ():
        line = parse_object(text)
        if line is None or not text.endswith(b"\n"):  # torn
            continue
        step, kind = line.get("step"), line.get("kind", "step")
        validated = bool(line.get("validated", True)) if kind == "start" else kind != "step"
        if isinstance(step, int):
            last = max(last, (step, int(validated)))
        found.append((last, text))
    return found


def _begin(first: Position, line: bytes) -> Position:
    """What a generation has gone on from: its line of kind "start" says it; without one, the step before its first."""
    return first if (parse_object(line) or {}).get("kind") == "start" else (first[0] - 1, 1)


def _join_events(folders: Sequence[Path], board: Path, name: str, end: Position) -> set[Path]:
    """A file in `board` for each that has a part of the curve; they are named in the order of the curve."""
    found = set()
    roots = [folder / "tensorboard" for folder in folders]
    for inner in {file.parent.relative_to(root) for root in roots for file in root.rglob(_EVENTS)}:
        files = [(place, file) for place, root in enumerate(roots) for file in sorted((root / inner).glob(_EVENTS))]
        events = [list(_events(file)) for _, file in files]
        kept = spans([[position for position, _ in own] for own in events], end)
        for (place, file), own, span in zip(files, events, kept, strict=True):
            if span:
                start, stop = own[span.start][1].start, own[span.stop - 1][1].stop
                target = board / inner / f"{name}-{place:04}-{start:012}-{file.name}"
                _copy(file, range(start, stop), target)
                found.add(target)
    return found


def _copy(source: Path, part: range, target: Path) -> None:
    """Bytes of `source`, of which `target` has some from the first one on: it may be open, and grows in place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_regular(source) as file, open_regular(target, APPEND) as out:
        here = min(out.seek(0, 2), len(part))
        out.truncate(here)
        file.seek(part.start + here)
        out.write(file.read(len(part) - here))


def _events(file: Path) -> Iterator[tuple[Position, range]]:
    """Each event of a TensorBoard file and its bytes: a length (8 bytes), its checksum (4), the event, its checksum."""
    last, start, size = _HEADER, 0, file.stat().st_size
    with open_regular(file) as stream:
        while len(header := stream.read(12)) == 12:
            stop = start + 16 + int.from_bytes(header[:8], "little")
            if stop > size:  # torn
                return
            event = stream.read(min(_HEAD, stop - start - 16))
            if step := _step(event):
                last = max(last, (step, int(_VALIDATION.search(event) is not None)))
            yield last, range(start, stop)
            start = stream.seek(stop)


def _step(event: bytes) -> int:
    """Of an Event that has a point of a curve, else 0.

    Its fields are wall_time (the key 0x09, 8 bytes), step (the key 0x10, a varint) and, of a point, summary (0x2a).
    """
    match = _POINT.match(event)
    return sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(match[1])) if match else 0
