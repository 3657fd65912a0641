"""Which runs a comparison means, and its name for each. A group: the runs that one `up` of a sweep started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.errors import LauncherError
from launcher.job.loader import parse_job
from launcher.job.overrides import variant_name
from launcher.job.scalars import Args, ArgValue
from launcher.model.plan import Membership
from launcher.records.paths import RUNS
from launcher.records.store import Record, created, find, job_of, records

GROUPED = "group"  # the event with the fields of Membership
_MOST = 3  # settings in a label
_LONGEST = 24  # characters of a setting's value


def membership(record: Record) -> Membership | None:
    """None for a run of its own."""
    grouped = record.events(GROUPED)
    return next((Membership(str(line.get("group")), str(line.get("variant"))) for line in grouped), None)


def latest_of(group: str, runs: Path = RUNS) -> dict[str, Record]:
    """The latest run of each variant of a group, by its name; {} where there is no such group here."""
    known = [(record, membership(record)) for record in records(runs)]
    return {place.variant: record for record, place in known if place and place.group == group}


def select(wanted: Sequence[str], runs: Path = RUNS) -> list[tuple[Record, str | None]]:
    """The runs meant, each once, with what sets it apart in its group.

    A run id or a unique prefix of one means that run; a group's id, or a job's name whose latest run belongs to a
    group, the latest run of each variant of the group, the earliest first. Nothing means the latest run's group, else
    all runs of its job. Raises RunUnknown.
    """
    known = [(record, membership(record)) for record in records(runs)]
    if not wanted:
        latest = find(None, runs).run
        of_job = [record.run for record, _ in known if job_of(record.run) == job_of(latest)]
        wanted = [place.group for record, place in known if record.run == latest and place] or of_job
    groups = {place.group: place.group for _, place in known if place}
    groups |= {job_of(record.run): place.group if place else "" for record, place in known}  # of each job's latest run
    last = {place: record.run for record, place in known if place}
    chosen: dict[str, tuple[Record, str | None]] = {}
    for text in wanted:
        group = groups.get(text)
        only = None if group else find(text, runs).run
        for record, place in known:
            if record.run == only or (group and place and place.group == group and last[place] == record.run):
                chosen.setdefault(record.run, (record, place.variant if place else None))
    return list(chosen.values())


def labels(chosen: Sequence[tuple[Record, str | None]]) -> list[str]:
    """What to call each run: its variant in a sweep, else its job. Runs that would be called the same are told apart.

    By the settings in which their job files differ (`batch_size=64`), and where these are the same by their date.
    """
    names = [variant or job_of(record.run) for record, variant in chosen]
    found = list(names)
    for name, count in Counter(names).items():
        same = [place for place, other in enumerate(names) if other == name]
        settings = {place: _settings(chosen[place][0]) for place in same if count > 1}
        known = dict.fromkeys(key for one in settings.values() for key in one)
        keys = [key for key in known if len({one.get(key) for one in settings.values()}) > 1]
        if "nodes" in keys:
            keys = [key for key in keys if key != "hosts"]
        if keys:
            for place, one in settings.items():
                words = variant_name({key: _short(one.get(key, "default")) for key in keys[:_MOST]})
                found[place] = words if count == len(names) else f"{name} {words}"
    for more in (_date, lambda run: run[-4:]):
        counts = Counter(found)
        found = [
            label if counts[label] == 1 else f"{label} {more(record.run)}"
            for label, (record, _) in zip(found, chosen, strict=True)
        ]
    return found


def _date(run: str) -> str:
    """`2026-01-31 12:00:00`, UTC."""
    day, time = created(run).split("-")
    return f"{day[:4]}-{day[4:6]}-{day[6:]} {time[:2]}:{time[2:4]}:{time[4:]}"


def _settings(record: Record) -> dict[str, ArgValue]:
    """What a run was started with, from its own job.yaml; {} where that is missing or of another version."""
    try:
        job = parse_job(record.job_text(), str(record.paths.job))
    except (LauncherError, OSError, UnicodeDecodeError):
        return {}
    args: Args = job.run.args
    named = args if isinstance(args, Mapping) else {"args": args}
    image = job.image and (job.image.ref or job.image.base)
    others = {
        "nodes": str(len(job.nodes)),
        "hosts": ",".join(node.host for node in job.nodes),
        "gpus": str(job.gpus),
        "processes": str(job.processes),
        "image": image or "",
        **job.env,
    }
    return {key.replace("-", "_"): value for key, value in {**named, **others}.items()}


def _short(value: ArgValue) -> ArgValue:
    text = ",".join(value) if isinstance(value, tuple) else value
    if not isinstance(text, str):
        return text
    return text if len(text) <= _LONGEST else "…" + text[1 - _LONGEST :]
