"""The runs that are recorded here, or that are on nodes."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import Any

from launcher.api.jobs import chosen_config
from launcher.errors import LauncherError
from launcher.model.plan import RunId
from launcher.model.progress import silent
from launcher.node.connect import Fleet, connect
from launcher.node.engine import Engine
from launcher.node.files import Span
from launcher.node.parallel import run_all_settled
from launcher.records import store
from launcher.records.measured import top1
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, Record
from launcher.run import attempts
from launcher.run.locate import Note, RunListing, list_runs
from launcher.run.state import RunState, state_of

REFUSED = "refused"  # state of a run whose `up` failed before every container was started
RUNS_TIMEOUT = 5.0  # seconds to connect to a node, which is only asked whether a run is still active


@dataclass(frozen=True)
class RunRow:
    """A run in a list.

    exit_code: of a command that waits for it; None if it has not ended. top1: percent. started_by: user@host of the
    caller, and the uid on the first node. stopped_by: user@host.
    """

    run: str
    state: str
    exit_code: int | None
    nodes: tuple[str, ...]
    top1: float | None = None
    started_by: str = ""
    stopped_by: str = ""


def recorded_runs(log: Note = print, *, ssh_config: str | PathLike[str] | None = None) -> list[RunRow]:
    """Return the runs recorded here, the latest last; the nodes of unfinished ones are asked."""
    rows, records = [], store.records()
    for problem in store.misplaced():
        log(f"warning: {problem}")
    seen = _seen_by_nodes([record for record in records if record.result() is None], log, chosen_config(ssh_config))
    for record in records:
        result = record.result() or seen[record.run]
        names = tuple(node.name for node in record.nodes())
        state = REFUSED if record.refused and result["state"] == RunState.FAILED else result["state"]
        by, best = result.get("stopped_by") or "", top1(result.get("last", {}))
        rows.append(RunRow(record.run, state, result.get("exit_code"), names, best, stopped_by=by))
    return rows


def runs_on(
    nodes: Sequence[str], log: Note = print, *, ssh_config: str | PathLike[str] | None = None
) -> tuple[list[RunRow], list[LauncherError]]:
    """Return the runs on these nodes, and the errors of nodes that did not list theirs."""
    rows = []
    with connect([(host, host) for host in nodes], None, chosen_config(ssh_config), allow_failures=True) as fleet:
        listing = list_runs(fleet, log)
        stopped = _who_stopped({run: [f.node for f in listing.runs[run]] for run in _ended(listing)}, fleet, listing)
    for run, found in listing.runs.items():
        states, labels = [f.state for f in found], found[0].labels
        names = tuple(f.labels.node for f in found)
        away = labels.nodes - len(found) if listing.failed else 0  # may be on a node that does not respond
        by = None if away else stopped.get(run)
        state = state_of(states, labels.nodes, min_nodes=labels.min_nodes, silent=away, stopped=by is not None)
        code = state.exit_code if state.ended else None
        rows.append(RunRow(run, state.value, code, names, started_by=labels.started_by, stopped_by=by or ""))
    return rows, [*listing.failed.values()]


def maybe_running(job: str | None = None, *, ssh_config: str | PathLike[str] | None = None) -> list[RunId]:
    """Return the runs of this job, or of all jobs, that were started in this folder and may still be running.

    The nodes of those whose end is not recorded are asked.
    """
    records = [each for each in store.records() if each.unfinished and job in (None, store.job_of(each.run))]
    try:
        seen = _seen_by_nodes(records, silent, chosen_config(ssh_config)) if records else {}
    except LauncherError:  # then that is not known
        seen = {record.run: {"state": RunState.UNREACHABLE.value} for record in records}
    states = {run: RunState(found["state"]) for run, found in seen.items()}
    return [run for run, state in states.items() if not (state.ended or state is RunState.REMOVED)]


def _seen_by_nodes(records: Sequence[Record], log: Note, ssh_config: Path | None) -> dict[RunId, Mapping[str, Any]]:
    """Return `state`, `exit_code` and `stopped_by` of these runs; `unreachable` if the reachable nodes do not determine
    it.
    """
    hosts = sorted({node.host for record in records for node in record.nodes()})
    named = [(host, host) for host in hosts]
    with connect(named, None, ssh_config, allow_failures=True, timeout=RUNS_TIMEOUT, ask=False) as fleet:
        listing = list_runs(fleet, log)
        ended = _ended(listing)
        over = {each.run: each.nodes() for each in records if each.run in ended or each.run not in listing.runs}
        stopped = _who_stopped(over, fleet, listing)
    seen: dict[RunId, Mapping[str, Any]] = {}
    for record in records:
        states, nodes = [f.state for f in listing.runs.get(record.run, ())], record.nodes()
        away = sum(node.host in listing.failed for node in nodes)
        by = None if away else stopped.get(record.run)
        state = state_of(states, len(nodes), min_nodes=record.min_nodes, silent=away, stopped=by is not None)
        code = state.exit_code if state.ended else None
        seen[record.run] = {"state": state.value, "exit_code": code, "stopped_by": by}
    return seen


def _ended(listing: RunListing) -> set[RunId]:
    return {run for run, found in listing.runs.items() if all(each.state.phase.ended for each in found)}


def _who_stopped(runs: Mapping[RunId, Sequence[NodeOfRun]], fleet: Fleet, listing: RunListing) -> dict[RunId, str]:
    """Return who stopped these runs, by the files on their nodes; not those of which nothing is left there."""
    found: dict[RunId, str] = {}

    def ask(engine: Engine) -> None:
        nodes = [(run, node) for run, on in runs.items() for node in on if node.host == engine.host]
        for root in {posixpath.dirname(node.output) for _, node in nodes}:
            spans = {
                Span(NodePaths(node.output, node.name).attempts, 0, attempts.LIMIT): run
                for run, node in nodes
                if posixpath.dirname(node.output) == root
            }
            for span, pieces in groupby(engine.files.read_spans([*spans], below=root), key=itemgetter(0)):
                if by := attempts.stopped_by(b"".join(piece for _, piece in pieces)):
                    found[spans[span]] = by

    engines = [engine for engine in fleet.engines if engine.node not in listing.failed] if runs else []
    run_all_settled([partial(ask, engine) for engine in engines])  # a node without that folder knows nothing
    return found
