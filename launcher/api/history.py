"""The runs that are recorded here, or that are on nodes."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import Any

from launcher.errors import EngineAbsent, LauncherError
from launcher.model.container import ContainerState
from launcher.model.plan import Membership, RunId
from launcher.model.progress import silent
from launcher.model.runtime import TRAITS
from launcher.model.sizes import counted
from launcher.naming import first_of
from launcher.node import output_folder
from launcher.node.connect import LOCAL, Fleet, connect
from launcher.node.engine import Engine
from launcher.node.files import Span
from launcher.node.parallel import run_all_catching
from launcher.node.ssh.config import chosen_config
from launcher.records import groups, store, sweeps
from launcher.records.measured import top1
from launcher.records.paths import RUNS, NodePaths, RunPaths
from launcher.records.store import NodeOfRun, Record
from launcher.run.locate import Note, RunListing, list_runs, not_asked, warn_of_unsearched
from launcher.run.state import BUDGET, RunState, at_budget, state_of
from launcher.run.watch import attempts

NOT_STARTED = "not started"  # state of a variant of a sweep that has no run yet
REFUSED = "refused"  # state of a run whose `up` failed before every container was started
DISCARDED = "discarded"  # state of a run that has ended after its sweep had moved its variant to another machine
_NAMED = 5  # runs in a message
RUNS_TIMEOUT = 5.0  # seconds to connect to a node, which is only asked whether a run is still active


@dataclass(frozen=True)
class RunRow:
    """A run in a list.

    exit_code: of a command that waits for it; None if it has not ended. top1: percent. started_by: user@host of the
    caller, and the uid on the first node. stopped_by: user@host. group: the sweep to which it
    belongs. ended_by: "budget", if it ended at its budget. why: of a refused run, and what to do. not_asked: of a run
    that is `ended here`, the other hosts.
    """

    run: str
    state: str
    exit_code: int | None
    nodes: tuple[str, ...]
    top1: float | None = None
    started_by: str = ""
    stopped_by: str = ""
    group: Membership | None = None
    ended_by: str | None = None
    why: str = ""
    not_asked: tuple[str, ...] = ()


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
        code, group = result.get("exit_code"), record.group
        ended_by = result.get("ended_by")
        why = record.why_not_started if state == REFUSED else ""
        row = RunRow(record.run, state, code, names, best, stopped_by=by, group=group, ended_by=ended_by, why=why)
        rows.append(row)
    return _with_discarded(rows, {record.run for record in records if record.abandoned})


def _with_discarded(rows: Sequence[RunRow], abandoned: Collection[RunId]) -> list[RunRow]:
    """Return the rows with the state of abandoned runs that have ended, unless nothing has run in place of them."""
    latest = {row.group: row.run for row in rows}
    gone = {row.run for row in rows if row.run in abandoned and row.run != latest[row.group]}
    return [replace(row, state=DISCARDED) if row.run in gone and row.exit_code is not None else row for row in rows]


def runs_on(
    nodes: Sequence[str],
    log: Note = print,
    *,
    of: str | None = None,
    known: Collection[RunId] = (),
    ssh_config: str | PathLike[str] | None = None,
) -> tuple[list[RunRow], list[LauncherError]]:
    """Return the runs on these nodes, and the errors of nodes that did not list theirs. Those of which only files are
    left there are said. of: what the user has named; others are not said then, nor those that the caller knows.
    """
    rows = []
    with connect([(host, host) for host in nodes], None, chosen_config(ssh_config), allow_failures=True) as fleet:
        listing = list_runs(fleet, log)
        warn_of_unsearched(fleet, store.records, log)
        stopped = _why_ended({run: [f.node for f in listing.runs[run]] for run in _ended(listing)}, fleet, listing)
        for text in _only_files(fleet, listing, of, known):
            log(text)
    for run, found in listing.runs.items():
        states, labels = [f.state for f in found], found[0].labels
        names = tuple(f.labels.node for f in found)
        missing = not_asked(found, nodes)
        silent_nodes = listing.failed or (listing.no_engine if TRAITS[labels.runtime].has_images else None)
        away = labels.nodes - len(found) - len(missing) if silent_nodes else 0  # may be on a node that does not respond
        end = _END if away else stopped.get(run, _END)
        state = end.state(states, labels.nodes, labels.min_nodes, away, len(missing))
        code, who = state.exit_code if state.ended else None, labels.started_by
        row = RunRow(run, state.value, code, names, None, who, stopped_by=end.stopped_by or "", group=labels.group)
        left_out = missing if state is RunState.ENDED_HERE else ()
        rows.append(replace(row, ended_by=end.ended_by(state), not_asked=left_out))
    return rows, [*listing.failed.values()]


def _only_files(fleet: Fleet, listing: RunListing, of: str | None, known: Collection[RunId]) -> Iterator[str]:
    """Yield which runs have files on these nodes, but no container: they are not listed.

    of, known: as for `runs_on`; of: a sweep, a job or a run, or the beginning of one.
    """
    may_run_here = fleet.no_engine is not None and not isinstance(fleet.no_engine, EngineAbsent)
    unsearched = {*listing.failed, *([LOCAL] if may_run_here else [])}
    asked = [engine for engine in fleet.engines if engine.node not in unsearched]
    every = set[RunId]()
    for answer in run_all_catching([partial(output_folder.runs, engine.files) for engine in asked]):
        if isinstance(answer, LauncherError):
            yield f"warning: {answer}"
        else:
            every |= answer
    jobs = {run: store.job_of(run) for run in every.difference(listing.runs, known)}
    left = [run for run, job in jobs.items() if of is None or of.startswith(job) or job.startswith(of)]
    if not left:
        return
    latest = sorted(left, key=store.created, reverse=True)
    which = first_of(latest, _NAMED)
    variants = [run for run, found in listing.runs.items() if found[0].labels.group is not None]
    if any(
        store.job_of(run) == jobs[each] and store.created(run) <= store.created(each)
        for run in variants
        for each in left
    ):
        which += "; a variant that is listed may have its latest run among them"  # only labels tell a run's variant
    what = f"not listed: {counted(len(left), 'run')} with files on these nodes, but without a container: {which}"
    yield f"{what}; to list them: launcher runs, in the folder where they were started"


@dataclass(frozen=True)
class SweepRow:
    """A sweep in a list, by the latest run of each of its variants that have one.

    states: number of variants by state. exit_code: the worst, once all have ended. top1: percent, of the best variant.
    resume: the command that starts those which have no run yet, if no launcher of this machine does; "": none is needed
    or known.
    """

    sweep: str
    states: Mapping[str, int]
    exit_code: int | None
    nodes: tuple[str, ...]
    top1: float | None = None
    best: str = ""
    started_by: str = ""
    resume: str = ""

    @property
    def left(self) -> str:
        """Its states, and the command that is needed, if any."""
        states = ", ".join(f"{count} {state}" for state, count in self.states.items())
        how = f"; no launcher on this machine starts the others: {self.resume}" if self.resume else ""
        return f"{self.sweep}: {states}{how}"


def folded(rows: Sequence[RunRow], *, recorded: bool) -> list[RunRow | SweepRow]:
    """Return a row for each sweep in place of its runs, where the last of these is.

    recorded: the rows are those of all runs that are recorded here, which tells what has no run yet.
    """
    last = {row.group.group: row.run for row in rows if row.group}
    found: list[RunRow | SweepRow] = []
    for row in rows:
        if row.group is None:
            found.append(row)
        elif last[row.group.group] == row.run:
            found.append(sweep_row(row.group.group, rows, recorded=recorded))
    return found


def unstarted(sweep: str, rows: Sequence[RunRow]) -> list[RunRow]:
    """Return a row for each variant of a recorded sweep that has no run. rows: those of its runs."""
    left = sweeps.not_started(sweep, {row.group.variant for row in rows if row.group})
    return [RunRow("", NOT_STARTED, None, (), group=member) for member in left]


def sweep_row(sweep: str, rows: Sequence[RunRow], *, recorded: bool = True) -> SweepRow:
    """Return the row of a sweep that has one of these runs. recorded: as for `folded`."""
    latest = {row.group.variant: row for row in rows if row.group and row.group.group == sweep}
    runs = [*latest.values()]
    left = unstarted(sweep, runs) if recorded else []
    codes = [row.exit_code for row in runs if row.exit_code is not None]
    best = max((row for row in runs if row.top1 is not None), key=lambda row: row.top1 or 0.0, default=None)
    return SweepRow(
        sweep,
        Counter(row.state for row in (*runs, *left)),
        max(codes) if len(codes) == len(runs) and not left else None,
        tuple(dict.fromkeys(node for row in runs for node in row.nodes)),
        best.top1 if best else None,
        best.group.shown if best and best.group else "",
        runs[-1].started_by,
        _what_resumes(sweep, runs[-1].run) if left else "",
    )


def _what_resumes(sweep: str, run: RunId) -> str:
    return "" if sweeps.is_run_here(sweep) else sweeps.resume_command(Record(RunPaths(RUNS / run)), sweep)


def sweep_of(text: str, rows: Sequence[RunRow]) -> str | None:
    """Return the ID of the sweep in a list of runs that the text means, like `named`. Raises RunUnknown."""
    of_job = [row for row in rows if store.job_of(row.run) == text]
    if of_job:
        started = [row for row in of_job if row.state != REFUSED] or of_job
        return started[-1].group.group if started[-1].group else None
    return groups.begun_by(text, [(row.run, row.group) for row in rows])


def beside(run: RunId) -> str:
    """Return what is said of a run that a job's name means, of a job that has also a sweep; "" if it has none."""
    job = store.job_of(run)
    return f"; the latest sweep of {job} is {sweep}" if (sweep := groups.latest_sweep(job)) else ""


def others_of(job: str, sweep: str, rows: Sequence[RunRow]) -> list[str]:
    """Return the other sweeps in a list of runs, and the runs of none, that have this job's name."""
    named = [row.group.group if row.group else row.run for row in rows if store.job_of(row.run) == job]
    return [each for each in dict.fromkeys(named) if each != sweep]


@dataclass(frozen=True)
class Named:
    """What a user's text means. group: the ID of a sweep; None: a single run, which `runs` then has as it was given."""

    runs: Sequence[str | None]
    group: str | None = None


def named(
    text: str | None,
    *,
    to_stop: bool = False,
    anywhere: bool = False,
    nodes: Sequence[str] | None = None,
    ssh_config: str | PathLike[str] | None = None,
    log: Note = print,
) -> Named:
    """Return the latest run of each variant of the sweep that the text means: its ID, a unique prefix, or a job's name
    or None if a variant is what was started last; else the text itself.

    to_stop: every run of the sweep, and only for its ID or a prefix that no run has. anywhere: the caller names nodes
    or a cluster; on these nodes a sweep that was not started here is looked for, by labels. Raises RunUnknown.
    """
    if text is None and (anywhere or to_stop):
        return Named([None])
    group = groups.named_group(text, by_job=not (anywhere or to_stop), exactly=to_stop)
    here = dict[str, RunId]()  # by variant, or, to stop them, by run
    if group is not None:
        latest = {name: each.run for name, each in groups.latest_of(group).items()}
        here = {run: run for run in groups.runs_of(group)} if to_stop else latest
        if nodes is None or not any(Record(RunPaths(RUNS / run)).rebuilt for run in here.values()):
            return Named([*here.values()], group)
    elif text is None or nodes is None or (RUNS / text).is_dir():
        return Named([text])
    # also of a sweep that this folder knows from its nodes only: they may have more of it
    said = list[str]()
    rows, _ = runs_on(nodes, said.append, of=group or text, known=[*here.values()], ssh_config=ssh_config)
    if group is None and any(store.job_of(row.run) == text for row in rows):
        group = None if to_stop else sweep_of(str(text), rows)
    elif group is None:
        group = groups.begun_by(str(text), [(row.run, row.group) for row in rows], exactly=to_stop)
    if group is None:  # who looks for the run there says what is wrong
        return Named([text])
    for row in rows:
        if row.group and row.group.group == group:
            key = row.run if to_stop else row.group.variant
            here[key] = max(row.run, here.get(key, row.run), key=store.created)
    for note in said:
        log(note)
    return Named([*here.values()], group)


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


def states_by_nodes(records: Sequence[Record]) -> dict[RunId, str]:
    """Return the states of those runs whose end is not recorded here, as their nodes tell them; {}: that failed."""
    asked = [record for record in records if record.result() is None]
    try:
        seen = _seen_by_nodes(asked, silent, chosen_config(None)) if asked else {}
    except LauncherError:
        return {}
    return {run: str(found["state"]) for run, found in seen.items()}


def sweeps_that_go_on(runs: Iterable[RunId]) -> list[str]:
    """Return the sweeps of these runs that a launcher of this machine goes on with."""
    members = [Record(RunPaths(RUNS / run)).group for run in runs]
    return [group for group in sorted({member.group for member in members if member}) if groups.goes_on(group)]


def _seen_by_nodes(records: Sequence[Record], log: Note, ssh_config: Path | None) -> dict[RunId, Mapping[str, Any]]:
    """Return `state`, `exit_code`, `stopped_by` and `ended_by` of these runs; `unreachable` if the reachable nodes do
    not determine it.
    """
    hosts = sorted({node.host for record in records for node in record.nodes()})
    named = [(host, host) for host in hosts]
    with connect(named, None, ssh_config, allow_failures=True, timeout=RUNS_TIMEOUT, ask=False) as fleet:
        listing = list_runs(fleet, log)
        ended = _ended(listing)
        over = {each.run: each.nodes() for each in records if each.run in ended or each.run not in listing.runs}
        stopped = _why_ended(over, fleet, listing)
    seen: dict[RunId, Mapping[str, Any]] = {}
    for record in records:
        states, nodes = [f.state for f in listing.runs.get(record.run, ())], record.nodes()
        silent_hosts = listing.unanswered(record, [node.host for node in nodes])
        away = sum(node.host in silent_hosts for node in nodes)
        end = _END if away else stopped.get(record.run, _END)
        state = end.state(states, len(nodes), record.min_nodes, away)
        code, ended_by = state.exit_code if state.ended else None, end.ended_by(state)
        known = {"stopped_by": end.stopped_by, "ended_by": ended_by}
        seen[record.run] = {"state": state.value, "exit_code": code, **known}
    return seen


def _ended(listing: RunListing) -> set[RunId]:
    return {run for run, found in listing.runs.items() if all(each.state.phase.ended for each in found)}


@dataclass(frozen=True)
class _WhyEnded:
    """What the files of its nodes say of a run that has ended."""

    stopped_by: str | None = None
    budget: bool = False

    def state(
        self, states: Sequence[ContainerState], nodes: int, min_nodes: int, unreachable: int, not_asked: int = 0
    ) -> RunState:
        counted, stopped = at_budget(states, self.budget), self.stopped_by is not None
        return state_of(
            counted, nodes, min_nodes=min_nodes, unreachable=unreachable, not_asked=not_asked, stopped=stopped
        )

    def ended_by(self, state: RunState) -> str | None:
        return BUDGET if self.budget and state is RunState.DONE else None


_END = _WhyEnded()


def _why_ended(runs: Mapping[RunId, Sequence[NodeOfRun]], fleet: Fleet, listing: RunListing) -> dict[RunId, _WhyEnded]:
    """Return why these runs ended, by the files on their nodes; not those of which nothing is left there."""
    found: dict[RunId, _WhyEnded] = {}

    def ask(engine: Engine) -> None:
        nodes = [(run, node) for run, on in runs.items() for node in on if node.host == engine.host]
        for root in {posixpath.dirname(node.output) for _, node in nodes}:
            spans = {
                Span(NodePaths(node.output, node.name).attempts, -attempts.LIMIT, attempts.LIMIT): run
                for run, node in nodes
                if posixpath.dirname(node.output) == root
            }
            for span, pieces in groupby(engine.files.read_spans([*spans], below=root), key=itemgetter(0)):
                text, run = b"".join(piece for _, piece in pieces), spans[span]
                known = found.get(run, _END)
                by, budget = attempts.stopped_by(text), attempts.reached_budget(text)
                found[run] = _WhyEnded(by or known.stopped_by, budget or known.budget)

    engines = [engine for engine in fleet.engines if engine.node not in listing.failed] if runs else []
    run_all_catching([partial(ask, engine) for engine in engines])  # a node without that folder knows nothing
    return found
