"""The curves of a run, from what is collected of it here, whoever wrote them: TensorBoard's files, the metrics.jsonl of
docs/your-program.md, Lightning's metrics.csv, and the trainer_state.json of transformers.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from math import isfinite, isnan
from pathlib import Path
from typing import Any

from launcher.event_files import Point, points
from launcher.local_files import open_regular, parse_object
from launcher.model.plan import RunId
from launcher.records.measured import number
from launcher.records.paths import RunPaths, as_shown
from launcher.records.store import read_json_lines
from launcher.records.wanted import EVENTS, is_ours, is_saved

_LARGEST = 1 << 26  # bytes of a csv or json file
_PLACES = ("time", "step", "steps", "epoch", "epochs", "kind", "global_step")  # in a line: not figures of it
# Folders that SummaryWriter and Lightning make anew for each start: a restart continues the curve
_OF_A_START = re.compile(r"[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d_.*|version_\d+|tensorboard|lightning_logs|runs|workdir")
_OF_A_PART = re.compile(r"\d+[-_]of[-_]\d+|rank[-_]?\d+")
_NUMBER = re.compile(r"\d+")
_VALIDATION = re.compile("(?<![a-z])(val|valid|validation|eval|test)(?![a-z])", re.IGNORECASE)
_INTERESTING = re.compile("val|eval|test|acc|loss", re.IGNORECASE)


@dataclass(frozen=True)
class Curve:
    """The points of a tag, by step, each step once: of a step that was repeated after a restart, the last one."""

    points: Sequence[Point]

    @property
    def last(self) -> Point:
        return self.points[-1]

    def best(self, *, lowest: bool = False) -> Point | None:
        """The first of the highest points, or of the lowest; None if all are nan."""
        known = [point for point in self.points if not isnan(point.value)]
        return min(known, key=lambda point: point.value if lowest else -point.value, default=None)


def files_of(root: Path) -> list[Path]:
    """Return the files below a folder, in order, without links. A run may have many, so this is done once for it."""
    every = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    return sorted(path for path in every if path.is_file() and not path.is_symlink())


def curves(paths: RunPaths, files: Sequence[Path]) -> dict[str, Curve]:
    """Return the curves of a run, by tag. A tag that several folders have is preceded by their names.

    files: of its folder, as `files_of`.
    """
    found: dict[tuple[str, str], dict[int, Point]] = {}
    for folder, point in _every_point(paths, files):
        found.setdefault((folder, point.tag), {})[point.step] = point
    tags = [tag for _, tag in found]
    return {
        (tag if tags.count(tag) == 1 or not folder else f"{folder}/{tag}"): Curve([steps[at] for at in sorted(steps)])
        for (folder, tag), steps in found.items()
    }


def _every_point(paths: RunPaths, files: Sequence[Path]) -> Iterator[tuple[str, Point]]:
    """Yield each point with its folder: "" unless the program tells curves of one tag apart by folders."""
    board = (file for file in files if fnmatch(file.name, EVENTS) and file.is_relative_to(paths.tensorboard))
    for file in board:
        with suppress(OSError), open_regular(file) as stream:
            folder = _folder(file.relative_to(paths.tensorboard))
            yield from ((folder, point) for point in points(stream))
    yield from (("", point) for point in _of_lines(read_json_lines(paths.metrics)))
    for file in (file for file in files if file.name == "metrics.csv"):
        lines = csv.DictReader(io.StringIO(_text(file)))
        yield from ((_folder(file.relative_to(paths.root)), point) for point in _of_lines(map(_parsed, lines)))
    states = [parse_object(_text(file)) for file in files if file.name == "trainer_state.json"]
    logs = [log for state in states if state and isinstance(log := state.get("log_history"), list)]
    if logs:  # each checkpoint has the log up to it
        lines_ = [line for line in max(logs, key=len) if isinstance(line, dict)]
        yield from (("", point) for point in _of_lines(lines_))


def _folder(path: Path) -> str:
    return "/".join(part for part in path.parent.parts if not _OF_A_START.fullmatch(part))


def _text(file: Path) -> str:
    with suppress(OSError), open_regular(file) as stream:
        return stream.read(_LARGEST).decode(errors="replace").replace("\0", "")
    return ""


def _parsed(row: Mapping[str | None, Any]) -> dict[str, Any]:
    """Return a row of a CSV file with its numbers; empty cells are left out."""
    found = {}
    for key, value in row.items():
        with suppress(TypeError, ValueError):
            if isinstance(key, str):
                found[key] = float(value)
    return found


def _of_lines(lines: Iterator[dict[str, Any]] | Sequence[dict[str, Any]]) -> Iterator[Point]:
    """Yield the figures of lines that have a step, or follow one that has it, or count epochs."""
    step = 0.0
    for line in lines:
        if line.get("kind") in ("start", "end"):
            continue
        given = next((at for key in ("step", "global_step") if (at := number(line.get(key))) is not None), None)
        step = step if given is None else given
        at = step or number(line.get("epoch")) or 0.0
        for tag, value in _figures(line):
            yield Point(tag, int(at), number(line.get("time")) or 0.0, value)


def _figures(line: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for key, value in line.items():
        if isinstance(value, dict) and not before:
            yield from _figures(value, f"{key}/")
        elif key not in _PLACES and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{before}{key}", float(value)


def json_number(value: float) -> float | str:
    """Return a number as JSON has it, which knows no nan."""
    return value if isfinite(value) else str(value)


@dataclass(frozen=True)
class Best:
    """The best point of a tag in a run. checkpoint: the program's file that belongs to it; why: or why none is known.

    None without a reason: no checkpoint is here.
    """

    tag: str
    run: RunId  # that has made the point: the latest of its variant, or one from which that goes on
    point: Point
    checkpoint: Path | None = None
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        checkpoint = self.checkpoint and str(as_shown(self.checkpoint))
        return {
            "tag": self.tag,
            "run": self.run,
            "step": self.point.step,
            "value": json_number(self.point.value),
            "checkpoint": checkpoint,
        }


@dataclass(frozen=True)
class Piece:
    """What one run has of the curves of its variant, which has several if it was resumed. files: of its folder."""

    run: RunId
    root: Path
    files: Sequence[Path]
    curves: Mapping[str, Curve]


def joined(pieces: Sequence[Piece]) -> dict[str, Curve]:
    """Return the curves of a variant; of an earlier run, the points before those that the next one has."""
    found: dict[str, Curve] = {}
    for piece in pieces:
        for tag, curve in piece.curves.items():
            before = found[tag].points if tag in found else ()
            found[tag] = Curve([*(point for point in before if point.step < curve.points[0].step), *curve.points])
    return found


def best_of(tag: str, pieces: Sequence[Piece], *, lowest: bool) -> Best | None:
    """Return the best point of the joined curves of a variant, with the checkpoint of the run that has made it."""
    curve = joined(pieces).get(tag)
    if curve is None or (point := curve.best(lowest=lowest)) is None:
        return None
    made = next(piece for piece in reversed(pieces) if tag in piece.curves and point in piece.curves[tag].points)
    return Best(tag, made.run, point, *checkpoint_of(point, made.root, made.files))


def saved_in(root: Path, files: Sequence[Path]) -> dict[Path, str]:
    """Return the program's checkpoints among these files of a folder, with their names there."""
    names = {path: path.relative_to(root).as_posix() for path in files}
    return {path: name for path, name in names.items() if is_saved(name) and not is_ours(name)}


def checkpoint_of(point: Point, root: Path, files: Sequence[Path]) -> tuple[Path | None, str]:
    """Return the checkpoint below `root` that belongs to a point: the one with its step in its name, else the one that
    was written nearest to it in time; with the reason. None without a reason: there is none. files: those below `root`.
    """
    saved = saved_in(root, files)
    named = [path for path, name in saved.items() if str(point.step) in _numbers(name)]
    if named:
        return max(named, key=_size), f"has step {point.step} in its name"
    if not saved:
        return None, ""
    if not point.time:
        what = f"no name has step {point.step}, and its line of the metrics has no `time`"
        return None, f"{what}; the newest is {as_shown(newest_of(saved))}"
    nearest = min(saved, key=lambda path: (round(abs(path.stat().st_mtime - point.time), 1), -_size(path)))
    apart = nearest.stat().st_mtime - point.time
    return nearest, f"was written {abs(apart):.0f} s {'after' if apart >= 0 else 'before'} it"


def newest_of(saved: Iterable[Path]) -> Path:
    return max(saved, key=lambda path: (path.stat().st_mtime, path))


def _numbers(name: str) -> set[str]:
    """Return the numbers in the names of a file and of its folder, without those of its rank or part."""
    parts = [_OF_A_PART.sub("", part) for part in name.split("/")[-2:]]
    return {str(int(found)) for part in parts for found in _NUMBER.findall(part) if len(found) < 18}


def _size(path: Path) -> int:
    return path.stat().st_size


def tags_of(known: Sequence[Mapping[str, Curve]], most: int) -> list[str]:
    """Return the tags that most runs have; among these, validation, accuracy and loss come first."""
    every = dict.fromkeys(tag for one in known for tag in one)
    key: Callable[[str], tuple[int, bool, str]] = lambda tag: (  # noqa: E731
        -sum(tag in one for one in known),
        _INTERESTING.search(tag) is None,
        tag,
    )
    return sorted(every, key=key)[:most]


def of_validation(tags: Sequence[str]) -> str | None:
    """Return the first of these tags that is one of a validation."""
    return next((tag for tag in tags if _VALIDATION.search(tag)), None)


def in_order(tags: Sequence[str]) -> list[str]:
    """Return tags as a table shows them: in an order that does not change while the runs write more."""
    return sorted(tags, key=lambda tag: (_INTERESTING.search(tag) is None, tag))
