"""A history: what was asked, hit, answered and true, each a small record with its time; as JSON lines in a file.

Times are of the machine's monotonic clock, which all of its processes share, in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar


@dataclass(frozen=True)
class Record:
    at: float
    kinds: ClassVar[dict[str, type[Record]]] = {}

    def __init_subclass__(cls) -> None:
        Record.kinds[cls.__name__] = cls


# --- what users and faults did


@dataclass(frozen=True)
class Asked(Record):
    """A command was started. job: of which `up` was asked; that of no other call, but of the sweep's --resume."""

    call: int
    folder: str
    argv: tuple[str, ...]
    job: str = ""
    nodes: int = 0  # of the job
    sweep: bool = False
    again: str = ""  # the job's key by which a program may begin again: restarts, min_nodes

    @property
    def command(self) -> str:
        return self.argv[0]

    @property
    def target(self) -> str:
        """RUN, as it was given; "" for none."""
        first = self.argv[1] if len(self.argv) > 1 else ""
        return "" if self.command == "up" or first.startswith("-") else first

    def __str__(self) -> str:
        return f"{self.command}, call {self.call},"

    def has(self, *options: str) -> bool:
        return any(option in self.argv for option in options)

    @property
    def follows(self) -> bool:
        """Whether it is attached to a run, until that ends."""
        return (self.command == "up" and not self.has("-d")) or (self.command == "logs" and not self.has("--no-follow"))


@dataclass(frozen=True)
class Hit(Record):
    """A signal was sent to a command that had not ended. moment: what it had done by then (MOMENTS)."""

    call: int
    how: str
    moment: str


@dataclass(frozen=True)
class Exited(Record):
    """code: negative after a signal."""

    call: int
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Fault(Record):
    """Something was done to a node of a run by hand, to a whole machine, or to the disk of a folder."""

    how: str
    where: str  # the run, "" for a machine, or the folder
    node: str = ""  # "" for a folder's disk


# --- what programs have written down themselves


@dataclass(frozen=True)
class Began(Record):
    """A program began. variant: of a sweep."""

    run: str
    node: str
    pid: int
    port: int
    variant: str = ""


@dataclass(frozen=True)
class Alive(Record):
    run: str
    node: str
    pid: int


@dataclass(frozen=True)
class Told(Record):
    """It got SIGTERM."""

    run: str
    node: str
    pid: int


@dataclass(frozen=True)
class Kept(Record):
    """It has written a file. path: below the output folder."""

    run: str
    node: str
    pid: int
    path: str
    text: str


@dataclass(frozen=True)
class Ended(Record):
    """It is about to exit, and has printed so many lines."""

    run: str
    node: str
    pid: int
    code: int
    lines: int
    lost: bool = False  # it ends because it has lost its peer


@dataclass(frozen=True)
class Crashed(Record):
    """It met an error: something was not there that it needs."""

    run: str
    node: str
    pid: int
    what: str


# --- what was seen from outside: /proc and files


@dataclass(frozen=True)
class Seen(Record):
    """A look at the machine, which began at `at`.

    running: run, node and pid of the runs' processes. containers: run and node. outputs: runs with an output folder.
    """

    running: tuple[tuple[str, str, int], ...]
    containers: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Found(Record):
    """What a folder has of a run, or the machine (folder: ""), at the end.

    state, failed: what was recorded, and of which node. logs: the collected output by node. files: the text of each
    file that a program has written, by its path. secret: files with a secret.
    """

    folder: str
    run: str
    state: str = ""
    failed: str = ""
    logs: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    secret: tuple[str, ...] = ()


R = TypeVar("R", bound=Record)
AT_ONCE, SILENT, SPOKE = "at once", "silent", "spoke"
MOMENTS = (AT_ONCE, SILENT, SPOKE)  # as soon as it had a process; before its first word; after it
HEALED = "healed"  # a fault: of a machine, which works again
HITS = ("kill", "interrupt", "interrupt twice", "suspend")


@dataclass(frozen=True)
class History:
    records: tuple[Record, ...]

    def all(self, kind: type[R]) -> list[R]:
        return [record for record in self.records if isinstance(record, kind)]

    def exit_of(self, call: int) -> Exited | None:
        return next((each for each in self.all(Exited) if each.call == call), None)

    def hits(self, call: int) -> list[Hit]:
        return [each for each in self.all(Hit) if each.call == call]

    def runs(self) -> list[str]:
        """Every run of which anything was seen."""
        seen = [each.run for each in self.records if isinstance(each, (Began, Found))]
        seen += [run for each in self.all(Seen) for run in (*each.outputs, *(run for run, _ in each.containers))]
        return list(dict.fromkeys(seen))

    def ups_of(self, run: str) -> list[Asked]:
        """The calls that may have started a run."""
        return [each for each in self.all(Asked) if each.job and job_of(run) == each.job]


def job_of(run: str) -> str:
    return run.rsplit("-", 3)[0]


def dump(records: Iterable[Record]) -> str:
    return "".join(json.dumps({"kind": type(each).__name__, **asdict(each)}) + "\n" for each in records)


def load(lines: Iterable[str]) -> Iterator[Record]:
    for line in lines:
        values = json.loads(line)
        if (kind := Record.kinds.get(values.pop("kind", ""))) is not None:
            yield kind(**{name: _tuples(value) for name, value in values.items()})


def read(path: Path) -> History:
    with path.open(encoding="utf-8") as file:
        return History(tuple(load(file)))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
