"""Read and write runs/<run id>/: plan, events, result; find a run by a user's argument."""

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

_LARGEST = 1 << 20  # bytes of job.yaml; more than the loader accepts
_LONGEST_LINE = 1 << 20  # of metrics.jsonl and events.jsonl; neither the launcher nor a trainer writes longer ones


@dataclass(frozen=True)
class NodeOfRun:
    """A node of a run and how to reach it, from the run's record or from labels."""

    name: str
    host: str
    rank: int
    container: str  # container name
    output: str  # the run's output folder on the node
    ranks: range  # global ranks of its workers


@dataclass(frozen=True)
class Record:
    """A run's folder on this machine, readable by its owner only, as the output of programs may be confidential.

    secrets: the values of the job's secrets; None: those that this caller has.
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
        """Create the folder and write job, plan and code before the run starts."""
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
        """Create the record of a run found by its labels; an existing readable record is not changed.

        hosts: of all nodes of the run, including those that are not in `nodes`.
        """
        record = cls(RunPaths(runs / run))
        if not record.nodes():
            record._make_folders()
            known = {"run": run, "job": job_of(run), "runtime": runtime, "min_nodes": min_nodes, "spares": spares}
            plan = {**known, "nodes": [*map(_node_to_json, nodes)], "hosts": list(hosts)}
            write_atomic(record.paths.plan, json.dumps(plan, indent=2).encode())
        return cls(record.paths)

    def _make_folders(self) -> None:
        """Raise UsageError if one of them exists and is not a folder."""
        for folder in (self.paths.root.parent, self.paths.root, self.paths.logs):
            require_folder(folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @cached_property
    def mask(self) -> Masker:
        return Masker(self._known_secrets[0])

    @property
    def unmasked(self) -> str:
        """A warning if this caller does not know all secrets of the run, else ""."""
        lacks = self._known_secrets[1]
        return f"not masked, as their values are unknown on this machine: {lacks}" if lacks else ""

    @cached_property
    def _known_secrets(self) -> tuple[Sequence[str], str]:
        """The values of the secrets that this caller has, and the names of the others."""
        if self.secrets is not None:
            return self.secrets, ""
        with suppress(OSError, UnicodeDecodeError, LauncherError):  # an invalid job.yaml is reported when it is needed
            values, missing = known_secrets(parse_job(self.job_text(), str(self.paths.job)), Path.cwd(), os.environ)
            return values, ", ".join(missing)
        return [], "secrets of this run, if any (its job.yaml is missing)"

    def job_text(self) -> str:
        """Return the text of job.yaml. Raises OSError, UnicodeDecodeError."""
        with open_regular(self.paths.job) as file:
            return file.read(_LARGEST).decode("utf-8")

    def event(self, kind: str, **fields: Any) -> None:
        """Append a line to events.jsonl. Errors are ignored: a full disk here must not stop a run."""
        line = json.dumps({"time": round(time.time(), 3), "event": kind, **self.mask.deep(plain(fields))})
        with suppress(OSError), open_regular(self.paths.events, APPEND) as file:
            file.write(f"{line}\n".encode())

    def events(self, kind: str) -> Iterator[dict[str, Any]]:
        """The recorded events of one kind, with their fields."""
        return (line for line in read_json_lines(self.paths.events) if line.get("event") == kind)

    def finish(self, result: dict[str, Any]) -> str:
        """Write result.json. Return the reason if that failed, else ""."""
        known = self.mask.deep(plain({"run": self.run, **result}))
        try:
            write_atomic(self.paths.result, json.dumps(known, indent=2).encode())
        except OSError as error:
            fix = f"free disk space, then run: launcher logs {self.run}"
            return f"{self.paths.result} was not written: {error.strerror}; {fix}"
        return ""

    def remove(self) -> None:
        """Remove the record of a run that never started; errors are ignored."""
        shutil.rmtree(self.paths.root, ignore_errors=True)

    def result(self) -> dict[str, Any] | None:
        """The recorded result; None if the end is unknown: a lost node may become reachable again."""
        found = read_json(self.paths.result)
        return found if found and isinstance(found.get("state"), str) and found["state"] != "lost" else None

    @property
    def started(self) -> bool:
        """Whether all containers were started without rollback."""
        return any(self.events("started"))

    @property
    def resumes(self) -> RunId | None:
        """The earlier run from whose checkpoints it resumed."""
        named = (line.get("earlier") for line in self.events("resumes"))
        return next((run for run in named if isinstance(run, str) and is_run_id(run)), None)

    @property
    def taken_down(self) -> bool:
        """Whether `down` has stopped it, even if not on every node."""
        return any(self.events("down"))

    def nodes(self) -> tuple[NodeOfRun, ...]:
        """The nodes by rank; () if the plan cannot be parsed."""
        return self._nodes

    @cached_property
    def _nodes(self) -> tuple[NodeOfRun, ...]:
        try:
            return tuple(_node_from_json(node, self.run) for node in self._plan["nodes"])
        except (LookupError, TypeError, ValueError):
            return ()

    def other_hosts(self) -> tuple[str, ...]:
        """For a rebuilt record: hosts of the run's nodes that are not in `nodes` because they were not queried."""
        known, found = {node.rank for node in self.nodes()}, self._plan.get("hosts")
        hosts = dict(enumerate(found if isinstance(found, list) else []))
        return tuple(str(host) for rank, host in hosts.items() if rank not in known and host != labels.NO_HOST)

    def container(self, rank: int) -> dict[str, Any]:
        """The ContainerSpec of the node of this rank as JSON; most keys are missing in a rebuilt record."""
        found: dict[str, Any] = self._plan["nodes"][rank]["container"]
        return found

    @property
    def min_nodes(self) -> int:
        """Minimum number of nodes with which the run continues; 0: all are needed."""
        return self._number("min_nodes")

    @property
    def spares(self) -> int:
        """How many of the last nodes are spares."""
        return self._number("spares")

    @property
    def port(self) -> int:
        """The rendezvous port on the first node; 0 if the plan is missing."""
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
    """Return all recorded runs, the latest last. Folders without a readable plan are ignored; --nodes rebuilds them.

    Raises UsageError if runs/ is not a folder.
    """
    require_folder(runs)
    if not runs.is_dir():
        return []
    found = [Record(RunPaths(path)) for path in runs.iterdir() if is_run_id(path.name)]
    readable = [record for record in found if record.nodes()]
    return sorted(readable, key=lambda r: (created(r.run), r.paths.plan.stat().st_mtime_ns))


def misplaced(runs: Path = RUNS) -> list[str]:
    """Return entries of runs/ that have a run's name but are not folders, such as dangling links, with reasons."""
    named = [path for path in sorted(runs.iterdir()) if is_run_id(path.name)] if runs.is_dir() else []
    return [f"{path} {what}" for path in named if (what := not_a_folder(path))]


def job_of(run: RunId) -> str:
    return run[:-21]


def created(run: RunId) -> str:
    """Return the part of a run ID that sorts by time."""
    return run[-20:-5]


def find(text: str | None, runs: Path = RUNS) -> Record:
    """Return the run selected by an ID, a unique prefix, a job's name (its latest run), or None (the latest run).

    Raises RunUnknown if there is no such run or several match a prefix.
    """
    known = records(runs)
    run = resolve(text, [r.run for r in known], where=str(runs) + os.sep)
    return next(r for r in known if r.run == run)


def resolve(text: str | None, known: list[RunId], where: str) -> RunId:
    """Select one of the run IDs `known`, the latest last, like `find`. where: the searched location, for messages."""
    if not known:
        raise RunUnknown(where, "no runs", "start a run: launcher up JOB; or give the nodes of a run: --nodes a,b")
    if text is None:
        return known[-1]
    if text in known:
        return text
    of_job = [r for r in known if job_of(r) == text]
    if of_job:
        return of_job[-1]
    matching = [r for r in known if r.startswith(text)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise RunUnknown(
            text, f"matches {len(matching)} runs: " + ", ".join(matching[-5:]), "give more characters of the run ID"
        )
    raise RunUnknown(
        text,
        f"no such run; searched: {where}",
        "list the runs: launcher runs; or give the nodes of the run: --nodes a,b",
    )


def _node_to_json(node: NodeOfRun) -> dict[str, Any]:
    """Return the part of a NodePlan that `Record.nodes` needs."""
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
    """Return the JSON object in a file; None if the file is missing, unreadable or invalid."""
    try:
        with open_regular(path) as file:
            return parse_object(file.read())
    except OSError:
        return None


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one per line. Other lines are ignored, such as a truncated last line."""
    with suppress(OSError), open_regular(path) as file:
        for line in iter(partial(file.readline, _LONGEST_LINE), b""):
            if (found := parse_object(line)) is not None:
                yield found


def parse_object(text: bytes | str) -> dict[str, Any] | None:
    """Return a JSON object; None for anything else, as the text comes from programs and nodes."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
