"""Reading and writing runs/<run id>/: the plan, events, the result; finding a run by what a user types."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import RunUnknown
from launcher.model import checked
from launcher.model.plan import Plan, RunId, is_run_id, plain
from launcher.records.paths import RUNS, RunPaths


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
    """A run's own folder on the caller's side."""

    paths: RunPaths

    @property
    def run(self) -> RunId:
        return self.paths.run

    @classmethod
    def create(cls, plan: Plan, job_yaml: str, code: bytes, runs: Path = RUNS) -> Record:
        """Make the folder and write what is known before anything starts."""
        record = cls(RunPaths(runs / plan.run))
        record.paths.root.mkdir(parents=True)
        record.paths.logs.mkdir()
        write_atomic(record.paths.job, job_yaml.encode())
        write_atomic(record.paths.plan, plan.to_json().encode())
        write_atomic(record.paths.code, code)
        return record

    @classmethod
    def rebuild(cls, run: RunId, runtime: str, nodes: Sequence[NodeOfRun], runs: Path = RUNS) -> Record:
        """The record of a run found by its labels, with what labels say; a readable record stays as it is."""
        record = cls(RunPaths(runs / run))
        if not record.nodes():
            record.paths.logs.mkdir(parents=True, exist_ok=True)
            known = {"run": run, "job": job_of(run), "runtime": runtime, "nodes": [*map(_node_to_json, nodes)]}
            write_atomic(record.paths.plan, json.dumps(known, indent=2).encode())
        return record

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to events.jsonl."""
        line = json.dumps({"time": round(time.time(), 3), "event": kind, **plain(fields)})
        with self.paths.events.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def finish(self, result: dict[str, Any]) -> None:
        write_atomic(self.paths.result, json.dumps(plain(result), indent=2).encode())

    def result(self) -> dict[str, Any] | None:
        """None while the run has not been seen to end: a node that was lost may come back."""
        result = read_json(self.paths.result)
        return None if result is None or result.get("state") == "lost" else result

    def nodes(self) -> tuple[NodeOfRun, ...]:
        """By rank; () where the plan is not as we write it."""
        try:
            return tuple(_node_from_json(node, self.run) for node in self._plan()["nodes"])
        except (LookupError, TypeError, ValueError):
            return ()

    @property
    def runtime(self) -> str:
        return "process" if self._plan().get("runtime") == "process" else "docker"

    def _plan(self) -> dict[str, Any]:
        return read_json(self.paths.plan) or {}


def records(runs: Path = RUNS) -> list[Record]:
    """Every run on record here, the latest last. A folder without a readable plan is ignored; --nodes rebuilds it."""
    if not runs.is_dir():
        return []
    found = [Record(RunPaths(path)) for path in runs.iterdir() if is_run_id(path.name)]
    readable = [record for record in found if record.nodes()]
    return sorted(readable, key=lambda r: (created(r.run), r.paths.plan.stat().st_mtime_ns))


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
    raise RunUnknown(text, f"no such run in {where}", "`launcher runs` lists them; or name its nodes: --nodes a,b")


def write_atomic(path: Path, data: bytes) -> None:
    """Whole or not at all: a reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


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
    """The JSON object that a file holds; None where it is missing, empty or broken."""
    return _object(path.read_bytes()) if path.is_file() else None


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line; other lines are ignored, such as one that a kill cut off."""
    lines = path.read_bytes().splitlines() if path.is_file() else ()
    return (found for line in lines if (found := _object(line)) is not None)


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
