"""Reading and writing runs/<run id>/: the plan, events, the result; finding a run by what a user types."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError, RunUnknown
from launcher.job.files import known_secrets
from launcher.job.loader import parse_job
from launcher.local_files import write_atomic
from launcher.model import checked, labels
from launcher.model.plan import Plan, RunId, is_run_id, plain
from launcher.records.files import APPEND, not_a_folder, open_regular, require_folder
from launcher.records.masking import Masker
from launcher.records.paths import RUNS, RunPaths

_LARGEST = 1 << 20  # bytes of job.yaml; larger is none that was loaded
_LONGEST_LINE = 1 << 20  # of metrics.jsonl and events.jsonl; longer is no line of ours or of a trainer


@dataclass(frozen=True)
class NodeOfRun:
    """Where a run's node is and how it is reached, by the run's record or by labels."""

    name: str
    host: str
    rank: int
    container: str  # container name
    output: str  # the run's output folder on the node
    ranks: range  # global ranks of its workers


@dataclass(frozen=True)
class Record:
    """A run's own folder on the caller's side, for the caller alone: what programs print may hold anything.

    secrets: the values of the job's; None: those that this caller still has.
    """

    paths: RunPaths
    secrets: Sequence[str] | None = field(default=None, repr=False)

    @property
    def run(self) -> RunId:
        return self.paths.run

    @classmethod
    def create(
        cls, plan: Plan, job_yaml: str, code: bytes, runs: Path = RUNS, secrets: Sequence[str] | None = None
    ) -> Record:
        """Make the folder and write what is known before anything starts."""
        record = cls(RunPaths(runs / plan.run), secrets)
        record._make_folders()
        write_atomic(record.paths.job, job_yaml.encode())
        write_atomic(record.paths.plan, plan.to_json().encode())
        write_atomic(record.paths.code, code)
        return record

    @classmethod
    def rebuild(
        cls,
        run: RunId,
        runtime: str,
        nodes: Sequence[NodeOfRun],
        runs: Path = RUNS,
        min_nodes: int = 0,
        spares: int = 0,
        hosts: Sequence[str] = (),
    ) -> Record:
        """The record of a run found by its labels, with what labels say; a readable record stays as it is.

        hosts: of all of its nodes, also of those that are not among `nodes`.
        """
        record = cls(RunPaths(runs / run))
        if not record.nodes():
            record._make_folders()
            known = {"run": run, "job": job_of(run), "runtime": runtime, "min_nodes": min_nodes, "spares": spares}
            told = {**known, "nodes": [*map(_node_to_json, nodes)], "hosts": list(hosts)}
            write_atomic(record.paths.plan, json.dumps(told, indent=2).encode())
        return cls(record.paths)

    def _make_folders(self) -> None:
        """Raises UsageError where one of them cannot be a folder."""
        for folder in (self.paths.root.parent, self.paths.root, self.paths.logs):
            require_folder(folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @cached_property
    def mask(self) -> Masker:
        return Masker(self._known_secrets[0])

    @property
    def unmasked(self) -> str:
        """A warning where this caller does not know all secrets of the run, else ""."""
        lacks = self._known_secrets[1]
        return f"not masked, as their values are not known here: {lacks}" if lacks else ""

    @cached_property
    def _known_secrets(self) -> tuple[Sequence[str], str]:
        """The values of its secrets that this caller has, and which others there are."""
        if self.secrets is not None:
            return self.secrets, ""
        with suppress(OSError, UnicodeDecodeError, LauncherError):  # a broken job.yaml is reported where it is needed
            values, missing = known_secrets(parse_job(self.job_text(), str(self.paths.job)), Path.cwd(), os.environ)
            return values, ", ".join(missing)
        return [], "secrets of this run, if it has any (there is no job.yaml of it)"

    def job_text(self) -> str:
        """Of its job.yaml. Raises OSError, UnicodeDecodeError."""
        with open_regular(self.paths.job) as file:
            return file.read(_LARGEST).decode("utf-8")

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to events.jsonl, if it can be: a full disk here must not keep a run from its end."""
        line = json.dumps({"time": round(time.time(), 3), "event": kind, **self.mask.deep(plain(fields))})
        with suppress(OSError), open_regular(self.paths.events, APPEND) as file:
            file.write(f"{line}\n".encode())

    def events(self, kind: str) -> Iterator[dict[str, Any]]:
        """Those of one kind on record, each with its fields."""
        return (line for line in read_json_lines(self.paths.events) if line.get("event") == kind)

    def finish(self, result: dict[str, Any]) -> str:
        """Write result.json; why it could not be written, "" where it was."""
        known = self.mask.deep(plain({"run": self.run, **result}))
        try:
            write_atomic(self.paths.result, json.dumps(known, indent=2).encode())
        except OSError as error:
            return f"{self.paths.result} was not written: {error.strerror}; make room, then: launcher logs {self.run}"
        return ""

    def remove(self) -> None:
        """Of a run that was never there; what cannot be removed stays."""
        shutil.rmtree(self.paths.root, ignore_errors=True)

    def result(self) -> dict[str, Any] | None:
        """None while the run has not been seen to end: a node that was lost may come back."""
        found = read_json(self.paths.result)
        return found if found and isinstance(found.get("state"), str) and found["state"] != "lost" else None

    @property
    def started(self) -> bool:
        """Whether every container was started, and not undone."""
        return any(self.events("started"))

    @property
    def resumes(self) -> RunId | None:
        """The earlier run whose checkpoints it began with."""
        named = (line.get("earlier") for line in self.events("resumes"))
        return next((run for run in named if isinstance(run, str) and is_run_id(run)), None)

    @property
    def taken_down(self) -> bool:
        """Whether `down` has ended it, if not on every node."""
        return any(self.events("down"))

    def nodes(self) -> tuple[NodeOfRun, ...]:
        """By rank; () where the plan is not as we write it."""
        return self._nodes

    @cached_property
    def _nodes(self) -> tuple[NodeOfRun, ...]:
        try:
            return tuple(_node_from_json(node, self.run) for node in self._plan["nodes"])
        except (LookupError, TypeError, ValueError):
            return ()

    def other_hosts(self) -> tuple[str, ...]:
        """Of a rebuilt record: hosts of the run's nodes that are not among `nodes`, as nobody has asked them."""
        known, found = {node.rank for node in self.nodes()}, self._plan.get("hosts")
        told = dict(enumerate(found if isinstance(found, list) else []))
        return tuple(str(host) for rank, host in told.items() if rank not in known and host != labels.NO_HOST)

    def container(self, rank: int) -> dict[str, Any]:
        """The ContainerSpec of the node of this rank as JSON; without most of its keys where the plan is not here."""
        found: dict[str, Any] = self._plan["nodes"][rank]["container"]
        return found

    @property
    def min_nodes(self) -> int:
        """With how many nodes the run goes on; 0: all are needed."""
        return self._number("min_nodes")

    @property
    def spares(self) -> int:
        """How many of the last nodes wait, and take the place of one that is lost."""
        return self._number("spares")

    @property
    def port(self) -> int:
        """Where its ranks meet on the first node; 0 where the plan is not here."""
        meeting = self._plan.get("rendezvous")
        try:
            return checked.number(meeting["port"], 65535) if isinstance(meeting, dict) else 0
        except (LookupError, ValueError):
            return 0

    def _number(self, key: str) -> int:
        try:
            return checked.number(self._plan.get(key, 0), 10**5)
        except ValueError:
            return 0

    @property
    def runtime(self) -> str:
        return "process" if self._plan.get("runtime") == "process" else "docker"

    @cached_property
    def _plan(self) -> dict[str, Any]:
        return read_json(self.paths.plan) or {}


def records(runs: Path = RUNS) -> list[Record]:
    """Every run on record here, the latest last. A folder without a readable plan is ignored; --nodes rebuilds it.

    Raises UsageError where runs/ is not a folder.
    """
    require_folder(runs)
    if not runs.is_dir():
        return []
    found = [Record(RunPaths(path)) for path in runs.iterdir() if is_run_id(path.name)]
    readable = [record for record in found if record.nodes()]
    return sorted(readable, key=lambda r: (created(r.run), r.paths.plan.stat().st_mtime_ns))


def misplaced(runs: Path = RUNS) -> list[str]:
    """What has a run's name and is no folder, such as a link that leads nowhere: each with the reason."""
    named = [path for path in sorted(runs.iterdir()) if is_run_id(path.name)] if runs.is_dir() else []
    return [f"{path} {what}" for path in named if (what := not_a_folder(path))]


def job_of(run: RunId) -> str:
    return run[:-21]


def created(run: RunId) -> str:
    """The part of a run id that sorts by time."""
    return run[-20:-5]


def find(text: str | None, runs: Path = RUNS) -> Record:
    """The run that `text` means: an id, a unique prefix, a job's name (its latest run), or nothing (the latest).

    Raises RunUnknown when there is none or when a prefix fits several.
    """
    known = records(runs)
    run = resolve(text, [r.run for r in known], where=str(runs) + os.sep)
    return next(r for r in known if r.run == run)


def resolve(text: str | None, known: list[RunId], where: str) -> RunId:
    """`find` over ids, the latest last; `where` names the place that was searched."""
    if not known:
        raise RunUnknown(where, "no run here", "start one: launcher up JOB; or name its nodes: --nodes a,b")
    if text is None:
        return known[-1]
    if text in known:
        return text
    of_job = [r for r in known if job_of(r) == text]
    if of_job:
        return of_job[-1]
    fitting = [r for r in known if r.startswith(text)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise RunUnknown(text, f"fits {len(fitting)} runs: " + ", ".join(fitting[-5:]), "type more of the id")
    raise RunUnknown(
        text, f"no such run; searched: {where}", "list them: launcher runs; or name its nodes: --nodes a,b"
    )


def _node_to_json(node: NodeOfRun) -> dict[str, Any]:
    """The part of a NodePlan that `Record.nodes` reads."""
    return {
        "node": node.name,
        "host": node.host,
        "rank": node.rank,
        "first_rank": node.ranks.start,
        "processes": len(node.ranks),
        "container": {"name": node.container, "output_dir": node.output},
    }


def _node_from_json(node: Any, run: RunId) -> NodeOfRun:
    container, first = node["container"], checked.number(node["first_rank"], 10**6)
    return NodeOfRun(
        name=checked.node_name(node["node"]),
        host=checked.text(node["host"], "[A-Za-z0-9_\\[][!-~]{0,299}", "host"),
        rank=checked.number(node["rank"], 10**5),
        container=checked.text(container["name"], "[A-Za-z0-9][A-Za-z0-9_.-]*", "container's name"),
        output=checked.output_folder(container["output_dir"], run),
        ranks=range(first, first + checked.number(node["processes"], 10**4)),
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object that a file holds; None where it is missing, empty, broken or not to be read."""
    try:
        with open_regular(path) as file:
            return parse_object(file.read())
    except OSError:
        return None


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line; other lines are ignored, such as one that a kill cut off."""
    with suppress(OSError), open_regular(path) as file:
        for line in iter(partial(file.readline, _LONGEST_LINE), b""):
            if (found := parse_object(line)) is not None:
                yield found


def parse_object(text: bytes | str) -> dict[str, Any] | None:
    """A JSON object; None for anything else: programs and nodes write such text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
