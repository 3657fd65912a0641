"""`up JOB --into GROUP`: one more variant of a sweep, on machines of its pool on which none of its variants runs."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from launcher import Run
from launcher.api.history import states_by_nodes
from launcher.api.inputs import Inputs, inputs_of
from launcher.api.until_started import until_started
from launcher.api.up import StartOptions, run_to_resume, start_run
from launcher.cli.long_work import LongWork
from launcher.cli.up import Asked, attend
from launcher.errors import InUse, LauncherError, NodeError, NodesFailed, UsageError
from launcher.features.sweeps.alone import alone, in_turn
from launcher.features.sweeps.attempt import attempt
from launcher.features.sweeps.continued import differing, with_budget
from launcher.features.sweeps.pool import one_at_a_time
from launcher.job.models import Job
from launcher.job.overrides import of_one_run, on_nodes, short_commit
from launcher.model.plan import CODE, Membership, RunId
from launcher.node.ssh.config import chosen_config
from launcher.records.groups import latest_of, named_group, runs_of, sweep_named
from launcher.records.masking import MASK, names_secret
from launcher.records.paths import RUNS, RunPaths
from launcher.records.revisions import resolved
from launcher.records.store import Record, job_of
from launcher.records.sweeps import is_run_here, lock_of
from launcher.run.begin.gpus import PAUSE
from launcher.run.cluster import Destination, on_cluster, own_machines
from launcher.run.state import RunState

ARGS = "run.args."
PLAIN = "default"  # name of a variant for which nothing was set
_OVER = (RunState.DONE, RunState.FAILED, RunState.STOPPED, RunState.LOST, RunState.REMOVED)


def up_into(job: Job, asked: Asked, text: str) -> int:
    """Run the job, without its sweep, as a variant of the recorded sweep that the text names. Return the exit code.

    Raises as launcher.up; RunUnknown; UsageError if it is no sweep, or one of another job, or with another budget, or a
    launcher runs it; InUse if a variant runs on each machine of the pool and asked.wait is False.
    """
    if job.codes and _sets_codes(job):
        raise UsageError("--into", "adds one variant, without the sweep", "give its code: --set revision=REVISION")
    group = _group(text, job)
    if asked.resume is not None and (other := named_group(asked.resume)) is not None:
        fix = "to run its variants without a result: omit --into; to add a variant: omit --resume, or give a run's ID"
        raise UsageError("--resume", f"{asked.resume} is the sweep {other}, and --into starts a single run", fix)
    single = resolved(job.model_copy(update={"sweep": (), "codes": ()}), Path.cwd())
    single = with_budget(single, group, "--into")
    with LongWork() as work:
        options = StartOptions(
            run_to_resume(asked.resume),
            log=work.log,
            progress=work.progress,
            ssh_config=chosen_config(asked.ssh_config),
        )
        with until_started(options.started):
            if asked.on is None:
                run = _start(single, group, options, wait=asked.wait)
            else:
                run = _submit(of_one_run(single), group, options, on_cluster(asked.on))
    with run:
        return attend(run, asked) or 0


def _sets_codes(job: Job) -> bool:
    """Return whether --set, not only the job file, gives the codes of the sweep."""
    keys = [word.partition("=")[0].strip() for word in job.options[1::2]]
    return any(key == "sweep" or f"{key}.".startswith(("sweep.code.", "codes.")) for key in keys)


def _group(text: str, job: Job) -> RunId:
    group = sweep_named(text)
    if group is None:
        raise UsageError("--into", f"{text} is not a sweep recorded here", "to list them: launcher runs")
    names = {job_of(run) for run in runs_of(group)}
    if job.name not in names:
        what = f"{group} is a sweep of {', '.join(sorted(names))}, and this job is {job.name}"
        raise UsageError("--into", what, "give its job file")
    return group


@contextmanager
def _turn(group: RunId) -> Iterator[None]:
    """One launcher at a time adds a variant: another one would choose the same name and the same machines.

    Raises UsageError while a launcher runs the sweep: it would start its next variant on the machine that is chosen.
    """
    lock = lock_of(group)
    with in_turn(lock.with_name(f"{group}.into")):
        if is_run_here(group):
            what = "a launcher runs its variants, and would use the same machines"
            raise UsageError(f"sweep {group}", what, "wait until it has ended, or press Ctrl-C there")
        with alone(group):
            yield


def _start(job: Job, group: RunId, options: StartOptions, *, wait: bool) -> Run:
    """Start a run of the job on free machines of its pool; wait for them if that is allowed."""
    inputs = inputs_of(job, own_machines(job), options.log)
    told = ""
    while True:
        with _turn(group):
            try:
                return _start_on_free(job, _member(group, job), inputs, options)
            except NodesFailed as error:
                if not wait or not any(isinstance(each, InUse) for each in error.errors):
                    raise
                text = "; ".join(f"{each.where}: {each.what}" for each in error.errors)
        if text != told:
            options.log(f"waiting: {text}")
        told = text
        time.sleep(PAUSE + random.random())  # noqa: S311 - waiting launchers must not retry in lockstep


def _submit(job: Job, group: RunId, options: StartOptions, cluster: Destination) -> Run:
    """Start a run of the job on a cluster, which has a queue."""
    inputs = inputs_of(job, cluster, options.log)
    with _turn(group):
        return start_run(job, cluster, inputs, _member(group, job), options)


def _start_on_free(job: Job, member: Membership, inputs: Inputs, options: StartOptions) -> Run:
    """Try the machines that no variant uses, until a start succeeds. Raises NodesFailed with a reason for each of the
    others.
    """
    taken = _running(member.group)
    each = job.each or len(job.nodes)
    errors: list[LauncherError] = [
        InUse(f"node {entry.name}", f"runs {taken[entry.name].shown}", "wait for it: --wait")
        for entry in job.nodes
        if entry.name in taken and one_at_a_time(job, entry)
    ]
    busy = {error.where for error in errors}
    free = [entry for entry in job.nodes if f"node {entry.name}" not in busy]
    ports = {running.port for running in taken.values()}
    port = next(port for port in count(job.port) if port not in ports) if len(job.ports) == 1 else None
    while len(free) >= each:
        chosen = free[:each]
        single = on_nodes(job, chosen, port)
        try:
            return attempt(single, inputs, member, options)
        except NodesFailed as error:
            if not all(isinstance(one, NodeError) for one in error.errors):
                raise
            errors += error.errors
            named = [entry for entry in chosen if any(one.is_of(entry.name) for one in error.errors)]
            free = [entry for entry in free if entry not in (named or chosen)]
    raise NodesFailed(errors, of=len(job.nodes))


@dataclass(frozen=True)
class _Running:
    """A variant that runs. shown: its run, and its name."""

    shown: str
    port: int


def _running(group: RunId) -> Mapping[str, _Running]:
    """Return which variant runs on each node. What is not known to be over runs."""
    records = [Record(RunPaths(RUNS / run)) for run in runs_of(group)]
    unknown = [record for record in records if record.unfinished]
    states = states_by_nodes(unknown)
    found = dict[str, _Running]()
    for record in unknown:
        if states.get(record.run) not in _OVER:
            shown = f"{record.run} ({member.shown})" if (member := record.group) else record.run
            found |= {node.name: _Running(shown, record.port) for node in record.nodes()}
    return found


def _member(group: RunId, job: Job) -> Membership:
    """Return the membership of a new variant, by what --set and edits of the job file change of the sweep's job."""
    values, told = {}, set[str]()
    for option, assignment in zip(job.options[::2], job.options[1::2], strict=True):
        key, _, value = assignment.partition("=")
        if option == "--set":
            key = key.strip()
            plain = key.replace("-", "_")
            told |= {plain.removeprefix(ARGS), *plain.split(".")}
            if key == "revision" and job.revision is not None:
                values[CODE] = short_commit(job.revision)
            else:
                values[key.removeprefix(ARGS)] = MASK if names_secret(key) else value.strip()
    told.add("revision")  # the commit is shown in any case
    values |= {key: text for key, text in differing(job, group).items() if key not in told}
    name = " ".join(f"{key}={value}" for key, value in values.items()) or PLAIN
    known = latest_of(group)
    unique = next(text for n in count(1) if (text := f"{name} #{n}" if n > 1 else name) not in known)
    commit = short_commit(job.revision) if job.revision and CODE not in values else ""
    return Membership(group, unique, values=values, added=True, commit=commit)
