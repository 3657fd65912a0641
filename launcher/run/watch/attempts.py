"""Parser of a node's attempts file: every start of its processes and its exit, the ranks that wait in breakpoint(),
the generations of a job with min_nodes in which the node took part, which nodes ended them, and who stopped the run.
The scripts in the container write the file; `launcher down` appends a line, which attached launchers read.

Unlike the engine's restart counter, this file survives a reboot of the node.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from launcher.local_files import read_end
from launcher.node.ends import ATTEMPTS
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, Record
from launcher.run.state import HANG_CODE, SIGKILL_CODE, SIGTERM_CODE, TIMEOUT_CODE

_ATTEMPT = re.compile(
    r"^(start|left|oom|exit \d{1,15}|(?:halted|killed) \d{1,15}|failed \d{1,9} -?\d{1,9}) (\d{1,15})$", re.MULTILINE
)
_PLACE = r"(?P<place>[^\x00-\x1f\x7f-\x9f]{1,400})"
_WAITS = re.compile(
    r"^(?P<what>waits|taken|busy|goes) (?P<rank>\d{1,9}) (?P<pid>\d{1,15}) (?P<since>\d{1,15})"
    rf"(?: {_PLACE})?$",
    re.MULTILINE,
)
_SKIPS = re.compile(rf"^skips (?P<rank>\d{{1,9}}) \d{{1,15}} \d{{1,15}} {_PLACE}$", re.MULTILINE)
_STOPPED = re.compile(rb"^stopped ([!-~]{1,400}) \d+$", re.MULTILINE)  # the format of locate.caller()
_BEGINS = re.compile(r"^begins (?P<size>\d{1,15})(?: (?P<rank>\d{1,9}))?$", re.MULTILINE)
_BUDGET = re.compile(rb"^budget \d{1,15}$", re.MULTILINE)
_START = re.compile(rb"^start ", re.MULTILINE)  # anchored: a node may be called kickstart
_GENERATION = re.compile(
    r"^generation (?P<number>\d{1,9}) (?P<offset>\d{1,15}) (?P<members>[!-~]{1,99999}) (?P<text>rank 0 [ -~]{1,9999})$",
    re.MULTILINE,
)
_ENDED = re.compile(r"^ended (?P<number>\d{1,9}) (?P<nodes>[!-~]{1,99999}) [ -~]{1,9999}$", re.MULTILINE)
_OVER = re.compile(r"^over (?P<why>[ -~]{1,9999})$", re.MULTILINE)
LIMIT = ATTEMPTS  # bytes read from the end of the file, which has the last attempt
_MEANINGS = {SIGKILL_CODE: "SIGKILL", SIGTERM_CODE: "SIGTERM", TIMEOUT_CODE: "time limit", HANG_CODE: "hung"}


@dataclass(frozen=True)
class Attempt:
    """One start of a node's processes. Times are seconds since the epoch by the node's clock.

    ended and exit_code are None while it runs, and if its container was killed or its node went down.
    """

    started: float
    ended: float | None = None
    exit_code: int | None = None
    halted: frozenset[int] = frozenset()  # ranks that were suspended when the others were stopped
    killed: frozenset[int] = frozenset()  # ranks that did not exit in time when they were stopped
    failed: tuple[tuple[int, int], ...] = ()  # rank and exit code (negative: signal) of each, the first one first
    ranks_had_exited: bool = False  # all of them, and torchrun was waiting for the other nodes, when it was stopped
    memory_ran_out: bool = False  # the kernel killed one of its processes

    def why(self) -> str:
        """Return why a restart was needed."""
        if self.ended is None:
            return "killed together with its container, its engine or its node"
        meaning = f" ({_MEANINGS[self.exit_code]})" if self.exit_code in _MEANINGS else ""
        return f"exit code {self.exit_code}{meaning} after {self.ended - self.started:.0f} s"


@dataclass(frozen=True)
class AtBreakpoint:
    """A rank that waits in breakpoint(), or is debugged. place: `train.py:87, breakpoint()`."""

    rank: int
    pid: int
    since: int  # when it began to do so: seconds since the epoch by the node's clock
    place: str
    doing: str = "waits"  # "waits", "taken": it has a terminal, "busy": it runs a command of that

    @property
    def waits(self) -> bool:
        return self.doing == "waits"

    def sentence(self, node: str) -> str:
        who = f"rank {self.rank} on {node}"
        since = f"since {datetime.fromtimestamp(self.since, timezone.utc):%H:%M:%S} UTC"
        if self.doing == "busy":
            return f"{who} runs a command of `launcher debug` {since}; stopped in {self.place}"
        if self.doing == "taken":
            return f"{who} has the terminal of a `launcher debug` {since}; stopped in {self.place}"
        return f"{who} waits in {self.place}"


@dataclass(frozen=True)
class Generation:
    """A generation: the nodes that train together until one of them is lost."""

    number: int
    offset: int  # size of the node's log when the generation started
    members: tuple[str, ...]  # by node rank; the first has rank 0
    text: str  # to display: `rank 0 is now on gpu-c, world 3 of 4: gpu-a lost at 12:03 UTC`


@dataclass(frozen=True)
class EndedGeneration:
    """The last generation that ended on a node, and the nodes that ended it, as seen by this node."""

    number: int
    nodes: tuple[str, ...]  # () if unknown


@dataclass(frozen=True)
class Segment:
    """The part of a node's log printed while the node had rank 0: from `start` to `stop` (None: to the end)."""

    generation: Generation
    node: NodeOfRun
    start: int
    stop: int | None


def parse(text: bytes) -> tuple[Attempt, ...]:
    """Return the attempts; other lines and incomplete ones are ignored."""
    found: list[Attempt] = []
    for entry, timestamp in _ATTEMPT.findall(text.decode("utf-8", "replace")):
        event, _, number = entry.partition(" ")
        if event == "start":
            found.append(Attempt(int(timestamp)))
        elif found and event == "exit" and found[-1].ended is None:
            found[-1] = replace(found[-1], ended=int(timestamp), exit_code=int(number))
        elif found and event == "halted":
            found[-1] = replace(found[-1], halted=found[-1].halted | {int(number)})
        elif found and event == "killed":
            found[-1] = replace(found[-1], killed=found[-1].killed | {int(number)})
        elif found and event == "failed":
            rank, _, code = number.partition(" ")
            found[-1] = replace(found[-1], failed=(*found[-1].failed, (int(rank), int(code))))
        elif found and event == "left":
            found[-1] = replace(found[-1], ranks_had_exited=True)
        elif found and event == "oom":
            found[-1] = replace(found[-1], memory_ran_out=True)
    return tuple(found)


def last_start(text: bytes) -> float:
    """Return when the last attempt started, 0 if it is not known."""
    return max((attempt.started for attempt in parse(text)), default=0.0)


def started(root: Path, node: NodeOfRun) -> float:
    """Return when a node's last attempt started, from its collected file; 0 if it is not known."""
    return last_start(read_end(NodePaths(str(root), node.name).attempts, LIMIT))


def begun(text: bytes) -> dict[int | None, int]:
    """Return the sizes in bytes that the logs had when the last attempt began: by rank, and of the node's own by None.

    Without None the node had printed nothing before, or its scripts are of an earlier version.
    """
    found = _BEGINS.finditer(_of_last_attempt(text).decode("utf-8", "replace"))
    return {None if match["rank"] is None else int(match["rank"]): int(match["size"]) for match in found}


def reasons(attempts: Sequence[Attempt]) -> list[str]:
    """Return why each restart was needed, in order."""
    return [attempt.why() for attempt in attempts[:-1]]


def stop_line(by: str) -> str:
    """Return the line that is appended to the file before a running container is stopped. by: user@host."""
    return f"stopped {by} {int(time.time())}"


def stopped_by(text: bytes) -> str | None:
    """Return who stopped the last attempt, or None if nobody did."""
    found = _STOPPED.search(_of_last_attempt(text))
    return found.group(1).decode() if found else None


def reached_budget(text: bytes) -> bool:
    """Return whether the node, that of rank 0, has ended the run at its budget."""
    return _BUDGET.search(text) is not None


def ended_by_budget(root: Path, nodes: Iterable[NodeOfRun]) -> bool:
    """The same, of the nodes whose file was collected."""
    return any(reached_budget(read_end(NodePaths(str(root), node.name).attempts, LIMIT)) for node in nodes)


def waiting(text: bytes) -> tuple[AtBreakpoint, ...]:
    """Return the ranks of the last attempt that wait in breakpoint() or are debugged, the first one first."""
    found: dict[tuple[str, str], AtBreakpoint] = {}
    for match in _WAITS.finditer(_of_last_attempt(text).decode("utf-8", "replace")):
        key = match["rank"], match["pid"]
        found.pop(key, None)
        rank, pid, since, place, doing = (match[name] or "" for name in ("rank", "pid", "since", "place", "what"))
        if doing != "goes":
            found[key] = AtBreakpoint(int(rank), int(pid), int(since), _printable(place), doing)
    return tuple(found.values())


def skipping(text: bytes) -> tuple[tuple[int, str], ...]:
    """Return the ranks of the last attempt that skipped a breakpoint(), where, and why: `train.py:87: nobody ...`."""
    found = _SKIPS.finditer(_of_last_attempt(text).decode("utf-8", "replace"))
    return tuple((int(match["rank"]), _printable(match["place"])) for match in found)


def _printable(place: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in place)


def parse_generations(text: bytes) -> tuple[Generation, ...]:
    """Return the generations in order; other lines are ignored."""
    found = _GENERATION.finditer(text.decode("utf-8", "replace"))
    return tuple(
        Generation(int(m["number"]), int(m["offset"]), tuple(m["members"].split(",")), m["text"]) for m in found
    )


def current_generation(text: bytes) -> int:
    """Return the generation in which the node's last attempt takes part, or 0 if none."""
    generations = parse_generations(_of_last_attempt(text))
    return generations[-1].number if generations else 0


def parse_ended_generation(text: bytes) -> EndedGeneration | None:
    """Return the last generation that ended on the node, or None."""
    found = [*_ENDED.finditer(text.decode("utf-8", "replace"))]
    nodes = found[-1]["nodes"] if found else ""
    return EndedGeneration(int(found[-1]["number"]), () if nodes == "-" else tuple(nodes.split(","))) if found else None


def give_up_reason(text: bytes) -> str:
    """Return why the nodes of a job with min_nodes do not restart its program, or "" if they do."""
    found = _OVER.search(text.decode("utf-8", "replace"))
    return found["why"] if found else ""


def _of_last_attempt(text: bytes) -> bytes:
    return text[max((found.start() for found in _START.finditer(text)), default=0) :]


def newest(generations: Mapping[str, tuple[Generation, ...]]) -> Generation | None:
    """Return the newest generation of all. generations: by node name."""
    return max((own[-1] for own in generations.values() if own), key=lambda each: each.number, default=None)


def collected(root: Path, nodes: Iterable[NodeOfRun]) -> dict[str, tuple[Generation, ...]]:
    """Return the generations of each node whose attempts file has been collected."""
    files = {node.name: Path(NodePaths(str(root), node.name).attempts) for node in nodes}
    return {name: parse_generations(file.read_bytes()) for name, file in files.items() if file.is_file()}


def segments(record: Record) -> list[Segment]:
    """Return rank 0's output across the nodes' logs; the first segment includes what its node printed before."""
    nodes = {node.name: node for node in record.nodes()}
    found = [
        Segment(generation, nodes[name], generation.offset, own[index + 1].offset if index + 1 < len(own) else None)
        for name, own in collected(record.paths.root, nodes.values()).items()
        for index, generation in enumerate(own)
        if generation.members[0] == name
    ]
    found.sort(key=lambda segment: segment.generation.number)
    return [replace(segment, start=0) if segment is found[0] else segment for segment in found]
