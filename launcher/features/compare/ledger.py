"""What `compare --json` prints: an object for each run, and for each variant without one (docs/compare.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.api.history import NOT_STARTED
from launcher.features.compare.curves import Piece, newest_of, saved_in
from launcher.features.compare.tags import TagRow
from launcher.model.plan import Membership, plain
from launcher.records.groups import pieces_of
from launcher.records.paths import as_shown
from launcher.records.store import Record

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
        "seconds": seconds(record),
        "earlier": [piece.run for piece in row.pieces[:-1]],
        "seconds_in_all": seconds_in_all(record),
        "checkpoint": _newest(row.pieces[-1]),
        "failure": failure and {key: failure.get(key) for key in ("node", "rank", "exit_code", "what", "cure")},
        **row.to_dict(),
    }


def without_run(variant: Membership) -> dict[str, Any]:
    """Return the object of a variant that has no run yet."""
    keys = ("run", "code", "revision", "changes", "ended_by", "exit_code", "seconds", "seconds_in_all")
    empty = dict.fromkeys((*keys, "checkpoint", "failure", "by"))
    asked, unstarted = variant.asked or None, {"state": NOT_STARTED, "collected": False}
    return {**_of_variant(variant, variant.named), **empty, "asked": asked, **unstarted, "earlier": [], "scalars": {}}


def _of_variant(group: Membership | None, label: str) -> dict[str, Any]:
    member = {"group": group and group.group, "variant": group and group.variant}
    return {"schema": SCHEMA, **member, "values": group and plain(group.values), "label": label}


def seconds(record: Record) -> float | None:
    """Return how long the node of a run that took longest ran, each by its own clock."""
    nodes: Sequence[Mapping[str, Any]] = (record.result() or {}).get("nodes", [])
    times = [(node.get("started"), node.get("finished")) for node in nodes]
    known = [finished - started for started, finished in times if started is not None and finished is not None]
    return round(max(known), 3) if known else None


def seconds_in_all(record: Record) -> float | None:
    """Return the seconds of a run and of those that it goes on from; None if those of one of them are unknown."""
    known = [seconds(piece) for piece in pieces_of(record)]
    return None if None in known else round(sum(filter(None, known)), 3)


def _newest(piece: Piece) -> str | None:
    """Return the program's newest checkpoint that is here."""
    saved = saved_in(piece.root, piece.files)
    return str(as_shown(newest_of(saved))) if saved else None
