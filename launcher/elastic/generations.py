"""Join the metrics of all generations of an elastic run, by step, into one curve.

The members of a generation write the same points, each to a separate folder, so that no point is lost with a node:
`generations/0003-1/` belongs to node rank 1 in generation 3 and has metrics.jsonl and tensorboard/. A generation starts
at the step of its checkpoint, which supersedes later steps of older generations, even if they are collected later.
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

from launcher.event_files import records
from launcher.local_files import APPEND, locked, open_regular, parse_object, write_atomic

GENERATIONS, METRICS, TENSORBOARD = "generations", "metrics.jsonl", "tensorboard"
Position = tuple[int, int]  # a step; and 1 for the validation after it, else 0
FOLDER = re.compile(r"(\d{1,9})-(\d{1,9})")  # generation, node rank in it
TEXT = re.compile(r"metrics\.jsonl|rank-\d{1,9}\.log")
_BEFORE, _HEADER, _END = (-2, 0), (-1, 0), (1 << 62, 0)
_EVENTS, _JOINED = "*.tfevents.*", re.compile(r"\d{4,}-\d{4}-\d{12}-")
_VALIDATION = re.compile(rb"/[vV]al|/misclassified")  # in the name of a curve
_POINT = re.compile(rb"(?:\x09.{8})?\x10([\x80-\xff]{0,9}[\x00-\x7f])\x2a", re.DOTALL)
CLOCK_TICK = 10**9  # nanoseconds: resolution of a file system's modification times
_HEAD = 200  # bytes of an event, enough for its step and the name of its curve


def spans(copies: Sequence[Sequence[Position]], end: Position) -> list[range]:
    """Return the points of each copy that form a generation's curve up to `end`: the union, each point once.

    Positions never decrease. If a copy ends before another one, its last point may be incomplete, so that point is
    taken from the other copy.
    """
    kept = [copy[: bisect_right(copy, end)] for copy in copies]
    found, done = [], _BEFORE
    for index, mine in enumerate(kept):
        last = mine[-1] if mine else done
        longer = any(other and other[-1] > last for other in kept[index + 1 :])
        stop = bisect_left(mine, last) if longer else len(mine)
        start = min(bisect_right(mine, done), stop)
        found.append(range(start, stop))
        done = mine[stop - 1] if start < stop else done
    return found


def join(root: Path) -> None:
    """Create metrics.jsonl and tensorboard/ of a run's local folder from the files collected in its generations/.

    One caller at a time; the files in generations/ may grow at the same time. Raises OSError.
    """
    with locked(root / GENERATIONS / ".joining"):
        _join(root, _copies(root / GENERATIONS))


def _join(root: Path, copies: Mapping[int, Sequence[Path]]) -> None:
    joined, board = root / METRICS, root / TENSORBOARD
    newest = max((file.stat().st_mtime_ns for file in (root / GENERATIONS).rglob("*")), default=0)
    if joined.exists() and joined.stat().st_mtime_ns == newest:
        return
    settled = time.time_ns() - newest > CLOCK_TICK  # else a file may still change without a new modification time
    lines: list[bytes] = []
    events: set[Path] = set()
    end = _END
    for generation in sorted(copies, reverse=True):
        folders = copies[generation]
        metrics = [_metrics(folder / METRICS) for folder in folders]
        positions = [[position for position, _ in own] for own in metrics]
        kept = zip(metrics, spans(positions, end), strict=True)
        lines[:0] = [own[index][1] for own, span in kept for index in span]
        # Of the current generation use one copy: TensorBoard may be reading it, and the others differ only briefly.
        events |= _join_events(folders[:1] if end == _END else folders, board, f"{generation:04}", end)
        end = min([end, *(_begin(*own[0]) for own in metrics if own)])
    if lines:
        write_atomic(joined, b"".join(lines))
        changed = newest if settled else newest - 1
        os.utime(joined, ns=(changed, changed))
    for file in board.rglob(_EVENTS):
        if _JOINED.match(file.name) and file not in events:
            file.unlink()


def _copies(folder: Path) -> dict[int, list[Path]]:
    """Return the folders of each generation, by node rank."""
    named = [(match, path) for path in folder.iterdir() if (match := FOLDER.fullmatch(path.name))]
    ranked = sorted((int(match[1]), int(match[2]), path) for match, path in named)
    return {number: [path for *_, path in copies] for number, copies in groupby(ranked, key=itemgetter(0))}


def _metrics(file: Path) -> list[tuple[Position, bytes]]:
    """Return the lines of a metrics.jsonl with their positions. Unknown lines keep the position of the line before."""
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
    """Return the position a generation resumed from: that of its "start" line, else the step before its first."""
    return first if (parse_object(line) or {}).get("kind") == "start" else (first[0] - 1, 1)


def _join_events(folders: Sequence[Path], board: Path, name: str, end: Position) -> set[Path]:
    """Write a file in `board` for each file with a part of the curve, named in the curve's order; return them."""
    found = set()
    roots = [folder / TENSORBOARD for folder in folders]
    for inner in {file.parent.relative_to(root) for root in roots for file in root.rglob(_EVENTS)}:
        files = [(index, file) for index, root in enumerate(roots) for file in sorted((root / inner).glob(_EVENTS))]
        events = [list(_events(file)) for _, file in files]
        kept = spans([[position for position, _ in own] for own in events], end)
        for (index, file), own, span in zip(files, events, kept, strict=True):
            if span:
                start, stop = own[span.start][1].start, own[span.stop - 1][1].stop
                target = board / inner / f"{name}-{index:04}-{start:012}-{file.name}"
                _copy(file, range(start, stop), target)
                found.add(target)
    return found


def _copy(source: Path, part: range, target: Path) -> None:
    """Append to `target`, which has the first bytes of this part of `source`, the rest: a reader may have it open."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_regular(source) as file, open_regular(target, APPEND) as out:
        here = min(out.seek(0, 2), len(part))
        out.truncate(here)
        file.seek(part.start + here)
        out.write(file.read(len(part) - here))


def _events(file: Path) -> Iterator[tuple[Position, range]]:
    """Yield the position and byte range of each event of a TensorBoard file."""
    last = _HEADER
    with open_regular(file) as stream:
        for span, event in records(stream, _HEAD):
            if step := _step(event):
                last = max(last, (step, int(_VALIDATION.search(event) is not None)))
            yield last, span


def _step(event: bytes) -> int:
    """Return the step of an Event that has a point of a curve, else 0.

    Its fields are wall_time (key 0x09, 8 bytes), step (key 0x10, a varint) and, for a point, summary (key 0x2a).
    """
    match = _POINT.match(event)
    return sum((byte & 0x7F) << (7 * index) for index, byte in enumerate(match[1])) if match else 0
