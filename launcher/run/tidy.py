"""What remains of earlier runs of a job that are done: their containers, once their files were collected."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.model.host import cluster_name
from launcher.model.plan import RunId
from launcher.model.progress import Log, silent
from launcher.model.sizes import counted
from launcher.node.connect import Fleet
from launcher.records.store import Record, job_of, records
from launcher.run.end.stop import remove_ended
from launcher.run.locate import Owner, connected_run, engine_of, find_containers
from launcher.run.state import RunState, recorded_end


def remove_done(job: str, fleet: Fleet, runs: Path, but: RunId | None, log: Log) -> None:
    """Remove the containers of the job's runs that this folder has recorded as done, except those of the newest one.

    Only of runs on connected nodes, and not those of `but`. Raises NodesFailed.
    """
    removed = []
    for record in _done(job, fleet, records(runs))[:-1]:
        if record.run != but and not record.confirmed_down:
            attached = find_containers(connected_run(record, fleet), silent)  # the new run may just take their locks
            if attached.owner is Owner.SELF and remove_ended(attached):
                removed.append(record.run)
    if removed:
        are, were = ("is", "was") if len(removed) == 1 else ("are", "were")
        log(f"{counted(len(removed), 'earlier run')} that {are} done {were} taken down")


def _done(job: str, fleet: Fleet, known: Sequence[Record]) -> list[Record]:
    """Return the job's runs on these nodes that are done and of which every file was collected, the latest last."""
    there = {(engine.node, engine.host) for engine in fleet.engines if cluster_name(engine.host) is None}
    return [
        record
        for record in known
        if job_of(record.run) == job
        and recorded_end(record.result()) is RunState.DONE
        and not record.rebuilt
        and record.group is None
        and not record.other_hosts()
        and {engine_of(node) for node in record.nodes()} <= there
        and not any(record.events("notcollected"))
    ]
