"""Which runs a comparison means: a group is what one `up` of a job with a sweep started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from launcher.model.plan import Membership
from launcher.records.paths import RUNS
from launcher.records.store import Record, find, records

GROUPED = "group"  # the event with the fields of Membership


def membership(record: Record) -> Membership | None:
    """None for a run of its own."""
    if not record.paths.events.exists():
        return None
    for text in record.paths.events.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["event"] == GROUPED:
            return Membership(line["group"], line["variant"])
    return None


def select(wanted: Sequence[str], runs: Path = RUNS) -> list[tuple[Record, str | None]]:
    """The runs meant, each once, with what sets it apart in its group.

    A run id or a unique prefix of one means that run; a group's id, or a job's name whose latest run belongs to a
    group, all runs of the group, the earliest first. Raises RunUnknown.
    """
    places = [(record, membership(record)) for record in records(runs)]
    groups = {place.group for _, place in places if place}
    chosen: dict[str, tuple[Record, str | None]] = {}
    for text in wanted:
        group = text if text in groups else _latest_group(text, places)
        only = None if group else find(text, runs).run
        for record, place in places:
            if record.run == only or (group and place and place.group == group):
                chosen.setdefault(record.run, (record, place.variant if place else None))
    return list(chosen.values())


def _latest_group(job: str, places: Sequence[tuple[Record, Membership | None]]) -> str | None:
    """The group of the job's latest run, if it has one."""
    of_job = [place for record, place in places if record.run[:-21] == job]
    return of_job[-1].group if of_job and of_job[-1] else None
