"""What `compare --json` prints: an object for each run, and for each variant without one (docs/compare.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.features.compare.curves import newest_of, saved_in
from launcher.features.compare.tags import TagRow
from launcher.model.plan import Membership, plain
from launcher.records.paths import as_shown
from launcher.records.store import Record
from launcher.records.sweeps import not_started

SCHEMA = 1  # of an object: another number if a key goes or means something else, not if one is added


def entry(record: Record, row: TagRow) -> dict[str, Any]:
    """Return the object of a run. row: its curves."""
    result = record.result() or {}
    failure, revision = result.get("failure"), record.revision
    return {
        **_of_variant(record.group, row.label),
        "run": record.run,
        "code": record.code_digest,
        "revision": revision and revision.commit,
        "asked": (revision and revision.asked) or None,
        "changes": revision and revision.stat,
        "state": row.state,
        "collected": not row.away,
        "ended_by": result.get("ended_by"),
        "exit_code": result.get("exit_code"),
        "seconds": _seconds(result.get("nodes", [])),
        "checkpoint": _newest(record.paths.root, row.files),
        "failure": failure and {key: failure.get(key) for key in ("node", "rank", "exit_code", "what", "cure")},
        **row.to_dict(),
    }


def without_run(chosen: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the objects of the variants of these runs' sweeps that have no run yet, in the sweeps' order."""
    variants: dict[str, list[str]] = {}
    for member in (record.group for record in chosen):
        if member is not None:
            variants.setdefault(member.group, []).append(member.variant)
    keys = ("run", "code", "revision", "changes", "ended_by", "exit_code", "seconds", "checkpoint", "failure")
    empty = dict.fromkeys(keys)
    unstarted = {"state": "not started", "collected": False}
    return [
        {**_of_variant(left, left.named), **empty, "asked": left.asked or None, **unstarted, "scalars": {}, "by": None}
        for group, names in variants.items()
        for left in not_started(group, names)
    ]


def _of_variant(group: Membership | None, label: str) -> dict[str, Any]:
    member = {"group": group and group.group, "variant": group and group.variant}
    return {"schema": SCHEMA, **member, "values": group and plain(group.values), "label": label}


def _seconds(nodes: Sequence[Mapping[str, Any]]) -> float | None:
    """Return how long the node that took longest ran, each by its own clock."""
    times = [(node.get("started"), node.get("finished")) for node in nodes]
    known = [finished - started for started, finished in times if started is not None and finished is not None]
    return round(max(known), 3) if known else None


def _newest(root: Path, files: Sequence[Path]) -> str | None:
    """Return the program's newest checkpoint that is here."""
    saved = saved_in(root, files)
    return str(as_shown(newest_of(saved))) if saved else None
