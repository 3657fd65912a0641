"""The runs of a comparison and their labels. A group: the runs that one `up` of a sweep started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.errors import LauncherError, RunUnknown
from launcher.job.loader import parse_job
from launcher.job.models import Job
from launcher.job.overrides import short_commit, variant_name
from launcher.job.scalars import Args, ArgValue, show_duration
from launcher.model.plan import CODE, Membership, RunId, shortened
from launcher.model.sizes import counted
from launcher.naming import first_of
from launcher.records.paths import RUNS, RunPaths
from launcher.records.store import Record, created, find, job_of, records
from launcher.records.sweeps import in_order, is_run_here, not_started

_NAMED = 5  # in a message
_MOST = 3  # settings in a label
_LONGEST = 24  # characters of a setting's value


def named_group(text: str | None, runs: Path = RUNS, *, by_job: bool = True, exactly: bool = False) -> str | None:
    """Return the ID of the recorded group that a user's text means, as `begun_by`. by_job: also a job's name, or None
    for all jobs, if what it started last belongs to a group. Raises RunUnknown.
    """
    return _named(text, [(record, record.group) for record in records(runs)], runs, by_job=by_job, exactly=exactly)


def latest_sweep(job: str, runs: Path = RUNS) -> str | None:
    """Return the ID of the sweep of a job of which a run was started last, whatever the job has started since."""
    known = [(record, record.group) for record in records(runs) if job_of(record.run) == job]
    return next((member.group for record, member in reversed(known) if member and not record.refused), None)


def sweep_named(text: str, runs: Path = RUNS) -> str | None:
    """Return the ID of the recorded sweep that a text means where only a sweep can be meant: as `named_group`, but of
    a job's name its latest sweep. Raises RunUnknown.
    """
    return latest_sweep(text, runs) or named_group(text, runs)


def _named(
    text: str | None,
    known: Sequence[tuple[Record, Membership | None]],
    runs: Path,
    *,
    by_job: bool = True,
    exactly: bool = False,
) -> str | None:
    if text is None or any(job_of(record.run) == text for record, _ in known):
        latest = find(text, runs).run if by_job else None
        return next((member.group for record, member in known if record.run == latest and member), None)
    return begun_by(text, [(record.run, member) for record, member in known], exactly=exactly)


def begun_by(text: str, known: Sequence[tuple[RunId, Membership | None]], *, exactly: bool = False) -> str | None:
    """Return the ID of the group whose ID is the text or begins with it, unless another group or a run of another one
    does, too; then RunUnknown is raised. None: no group's does.

    known: all runs. exactly: no run may begin with it, of whatever group.
    """
    groups = dict.fromkeys(member.group for _, member in known if member)
    if text in groups:
        return text
    begun = [group for group in groups if group.startswith(text)]
    others = [run for run, own in known if run.startswith(text) and (exactly or own is None or own.group not in begun)]
    if begun and len(begun) + len(others) > 1:
        what = f"matches {counted(len(begun), 'sweep')}"
        what += f" and {counted(len(others), 'run')}: " if others else ": "
        raise RunUnknown(text, what + first_of([*begun, *others], _NAMED), "give more characters of the ID")
    return begun[0] if begun else None


def latest_of(group: str, runs: Path = RUNS) -> dict[str, Record]:
    """Return the latest run of each variant of a group, by variant; {} if this machine has no record of the group.

    In the order of the sweep, if that is recorded, else as the variants were started first.
    """
    known = [(record, record.group) for record in records(runs)]
    found = {member.variant: record for record, member in known if member and member.group == group}
    return {name: found[name] for name in in_order(group, found, runs)}


def pieces_of(record: Record) -> list[Record]:
    """Return the runs of a variant that this one goes on from, the first one first, and itself."""
    found, own = [record], record.group
    while own is not None and (earlier := found[0].resumes) is not None:
        old = Record(RunPaths(record.paths.root.parent / earlier))
        if old.group != own or old.run in {each.run for each in found}:  # anybody may have written these files
            break
        found.insert(0, old)
    return found


def unstarted_of(chosen: Sequence[Record]) -> list[Membership]:
    """Return the variants without a run of the sweeps of which all other variants are among these runs."""
    variants: dict[str, list[str]] = {}
    for member in filter(None, (record.group for record in chosen)):
        variants.setdefault(member.group, []).append(member.variant)
    found = list[Membership]()
    for group, names in variants.items():
        started = {name for name, record in latest_of(group).items() if not record.refused}
        found += not_started(group, names) if started <= {*names} else []
    return found


def runs_of(group: str, runs: Path = RUNS) -> list[RunId]:
    """Return all runs of a group, the latest last: a variant may have several."""
    every = [(record.run, record.group) for record in records(runs)]
    return [run for run, member in every if member and member.group == group]


def goes_on(group: str, runs: Path = RUNS) -> bool:
    """Return whether a launcher of this machine runs a sweep of which some variants have no run yet, or run."""
    if not is_run_here(group):
        return False
    latest = latest_of(group, runs)
    return bool(not_started(group, latest, runs)) or any(record.unfinished for record in latest.values())


def newest_of(group: str, runs: Path = RUNS) -> Record:
    """Return the run of a recorded group that started last; if none has started, that of the last try."""
    found = [record for record in records(runs) if (member := record.group) and member.group == group]
    return next((record for record in reversed(found) if not record.refused), found[-1])


def select(wanted: Sequence[str], runs: Path = RUNS) -> list[tuple[Record, str | None]]:
    """Return the selected runs, each once, with their variants.

    A run ID or a unique prefix of one selects that run, a job's name its latest run. What names a group selects the
    latest run of each of its variants, as `latest_of`. An empty list selects the group of the latest run, else all
    runs of its job. Runs that never started are only selected by their ID. Raises RunUnknown.
    """
    every = [(record, record.group) for record in records(runs)]
    known = [(record, member) for record, member in every if not record.refused]
    if not wanted:
        latest = find(None, runs).run
        of_job = [record.run for record, _ in known if job_of(record.run) == job_of(latest)]
        wanted = [member.group for record, member in known if record.run == latest and member] or of_job
    last = {member: record.run for record, member in known if member}
    chosen: dict[str, tuple[Record, str | None]] = {}
    for text in wanted:
        group = _named(text, every, runs)
        only = None if group else find(text, runs).run
        found = [
            (record, member.variant if member else None)
            for record, member in every
            if record.run == only or (group and member and member.group == group and last.get(member) == record.run)
        ]
        if group:
            at = {name: index for index, name in enumerate(in_order(group, [str(name) for _, name in found], runs))}
            found.sort(key=lambda each: at[str(each[1])])
        for each in found:
            chosen.setdefault(each[0].run, each)
    return list(chosen.values())


def labels(chosen: Sequence[tuple[Record, str | None]]) -> list[str]:
    """Return a label for each run: its variant in a sweep, after the name of that if there are several, else its job.

    Equal labels are distinguished by the settings in which the job files differ (`batch_size=64`), else by date.
    """
    members = [record.group if variant else None for record, variant in chosen]
    names = [
        member.named if member else job_of(record.run) for (record, _), member in zip(chosen, members, strict=True)
    ]
    found = list(names)
    for name, count in Counter(names).items():
        same = [index for index, other in enumerate(names) if other == name]
        for index, one in zip(same, differences([chosen[index] for index in same]), strict=True):
            if one:
                difference = variant_name(dict([*one.items()][:_MOST]))
                found[index] = difference if count == len(names) else f"{name} {difference}"
    found = [f"{sweep} {label}" if sweep else label for sweep, label in zip(_sweeps(chosen), found, strict=True)]
    for more in (_date, _end):
        counts = Counter(found)
        found = [
            label if counts[label] == 1 else f"{label} {more(record.run)}"
            for label, (record, _) in zip(found, chosen, strict=True)
        ]
    return found


def _sweeps(chosen: Sequence[tuple[Record, str | None]]) -> list[str]:
    """Return what tells the sweeps of these runs apart, for each run: job, else date, else the end of the ID; "" for a
    run of none, and for all if there is only one sweep.
    """
    groups = [member.group if variant and (member := record.group) else "" for record, variant in chosen]
    known = sorted({*groups} - {""})
    if len(known) < 2:
        return ["" for _ in groups]
    forms = (job_of, lambda group: _date(group)[5:-3], _end, str)
    every = ({group: form(group) for group in known} for form in forms)
    named = next(names for names in every if len({*names.values()}) == len(known))
    return [named.get(group, "") for group in groups]


def differences(chosen: Sequence[tuple[Record, str | None]]) -> list[dict[str, ArgValue]]:
    """Return for each run the settings of its job file that are not the same in all of them."""
    found = [settings(record) for record, _ in chosen] if len(chosen) > 1 else [{}] * len(chosen)
    known = dict.fromkeys(key for one in found for key in one)
    keys = [key for key in known if len({one.get(key) for one in found}) > 1]
    if "nodes" in keys:
        keys = [key for key in keys if key != "hosts"]
    shown = [{key: short(one.get(key, "default")) for key in keys} for one in found]
    for (record, _), one in zip(chosen, shown, strict=True):
        if "revision" in one and (of := record.revision) and of.asked:
            one["revision"] = short(f"{one['revision']} ({of.asked})")
    return shown


def _date(run: str) -> str:
    """`2026-01-31 12:00:00`, UTC."""
    day, time = created(run).split("-")
    return f"{day[:4]}-{day[4:6]}-{day[6:]} {time[:2]}:{time[2:4]}:{time[4:]}"


def _end(run: str) -> str:
    return run[-4:]


def settings(record: Record) -> dict[str, ArgValue]:
    """Return the settings of a run from its job.yaml; {} if that is missing or invalid in this version."""
    job = _job(record)
    return {} if job is None else settings_of(job)


def budget_of(record: Record) -> int | None:
    """Return the budget of a run in seconds; None if it has none, or none that is known."""
    job = _job(record)
    return None if job is None else job.budget


def _job(record: Record) -> Job | None:
    try:
        return parse_job(record.job_text(), str(record.paths.job))
    except (LauncherError, OSError, UnicodeDecodeError):
        return None


def settings_of(job: Job) -> dict[str, ArgValue]:
    """Return what distinguishes runs: code folder, arguments, variables, image and machines."""
    args: Args = job.run.args
    named = args if isinstance(args, Mapping) else {"args": args}
    image = job.image and (job.image.ref or job.image.base)
    others = {
        "nodes": str(len(job.nodes)),
        "hosts": ",".join(node.host for node in job.nodes),
        "gpus": str(job.gpus),
        "processes": str(job.processes),
        "image": image or "",
        **({"revision": short_commit(job.revision)} if job.revision else {}),
        **({} if job.budget is None else {"budget": show_duration(job.budget)}),
        **job.env,
    }
    return {key.replace("-", "_"): value for key, value in {CODE: job.code, **named, **others}.items()}


def short(value: ArgValue) -> ArgValue:
    """Return a setting as a label or a message has it."""
    text = ",".join(value) if isinstance(value, tuple) else value
    return shortened(text, _LONGEST) if isinstance(text, str) else text
