"""A sweep over a pool of machines: run as many variants in parallel as fit, and start the next when machines are free.

It runs in the foreground, without a queue: its state is in the records of its runs, from which `resume` continues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from launcher.api.inputs import Inputs, inputs_had, inputs_of
from launcher.api.run import Run, find
from launcher.api.up import StartOptions
from launcher.errors import LauncherError, NodeError, NodesFailed, NodeUnreachable, UsageError
from launcher.features.sweeps.attempt import attempt
from launcher.features.sweeps.codes import code_of
from launcher.features.sweeps.continued import added, continued, ended_meanwhile, known_sweep, member, say_ended
from launcher.features.sweeps.machines import Machines
from launcher.features.sweeps.pool import Placement
from launcher.job.models import Job
from launcher.job.overrides import on_nodes, variants
from launcher.job.scalars import duration
from launcher.model.container import Phase
from launcher.model.plan import Membership, RunId, new_run_id
from launcher.model.progress import Log, OnProgress, no_progress
from launcher.node.parallel import in_background, run_all, run_all_catching, uninterrupted
from launcher.node.ssh.config import chosen_config
from launcher.records.measured import TrainingProgress, top1, training_progress
from launcher.records.paths import RUNS, RunPaths
from launcher.records.store import ABANDONED, Record
from launcher.records.sweeps import command_of
from launcher.run.begin.earlier import Earlier
from launcher.run.cluster import own_machines
from launcher.run.result import Outcome
from launcher.run.state import RunState
from launcher.run.watch import messages

LOST_AFTER = 300.0  # seconds; the job's lost_after
SETTLES = 2.0  # seconds in which an engine that was told to start a container shows that it has
TICK = 0.5  # seconds between two checks for changes


class SweepState(str, Enum):
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def ended(self) -> bool:
        return self in (SweepState.DONE, SweepState.FAILED, SweepState.STOPPED)


@dataclass(frozen=True)
class Variant:
    """Current state of a variant. why: reason of a failure. values: what distinguishes it."""

    name: str
    state: SweepState = SweepState.WAITING
    nodes: tuple[str, ...] = ()
    run: RunId | None = None
    progress: TrainingProgress | None = None
    top1: float | None = None  # percent
    exit_code: int | None = None
    why: str = ""
    ended_by: str | None = None  # "budget"
    values: Mapping[str, Any] | Sequence[str] = ()

    @property
    def shown_state(self) -> str:
        return f"{self.state.value} by {self.ended_by}" if self.ended_by else self.state.value


@dataclass
class _Work:
    """Internal state of a variant."""

    job: Job
    own: Membership
    shown: Variant
    earlier: RunId | None = None  # the run from whose checkpoint it starts, if one exists
    had: Record | None = None  # a run whose code it uses, not that of now
    run: Run | None = None
    silent: dict[str, float] = field(default_factory=dict)  # start of the silence, in seconds since the epoch


class _InputsByCode:
    """The inputs of the variants, which differ else only in `args`. All of a code have what it is at the first start.

    log, here: as for `inputs_of`.
    """

    def __init__(self, log: Log, here: Path) -> None:
        self._log = log
        self._here = here
        self._known = dict[tuple[str, str | None], Inputs]()
        self._turn = threading.Lock()

    def of(self, job: Job) -> Inputs:
        """Raises the errors of `inputs_of`."""
        with self._turn:
            code = code_of(job)
            if code not in self._known:
                self._known[code] = inputs_of(job, own_machines(job), self._log, self._here)
            return self._known[code]


class _LostError(Exception):
    """Machines of a variant have been silent for too long."""


def _was_started(run: Run, record: Record) -> bool:
    """Return whether a run was started whose launcher was killed before it could record that. The nodes know.

    A node that does not respond may have started it, so that is left to whoever follows it.
    """
    until = time.monotonic() + SETTLES
    while True:
        try:
            states = {node.state for node in run.status().nodes}
        except LauncherError:
            return True
        if "unreachable" in states:
            return True
        if not states & {Phase.CREATED.value, "removed"}:
            record.event("started", nodes=[node.name for node in record.nodes()])
            return True
        if Phase.CREATED.value not in states or time.monotonic() > until:
            return False
        time.sleep(TICK)


class Sweep:
    """Runs the variants of a job on its pool, or one after another on its nodes.

    `run` returns when each variant has a result; `leave` ends it earlier.
    """

    def __init__(
        self,
        job: Job,
        *,
        resume: str | None = None,
        most: int | None = None,
        log: Log = print,
        progress: OnProgress = no_progress,
        ssh_config: str | PathLike[str] | None = None,
    ) -> None:
        """resume: group whose variants without a result are run. most: maximum number of parallel variants.

        log: for messages about starts and machines; the attribute may be replaced.

        Raises UsageError for a job without a sweep and for an unknown group, NodesFailed if no machine responds.
        """
        if not job.sweep:
            raise UsageError(f"job {job.name}", "has no sweep", "for example: sweep: [{lr: 0.1}, {lr: 0.4}]")
        self.group = resume or new_run_id(job.name)
        earlier = continued(job, resume, log) if resume else {}
        self.log = log
        self._said: set[str] = set()
        self._options = StartOptions(log=self._log, progress=progress, ssh_config=chosen_config(ssh_config))
        self._here = Path.cwd()  # a program may change to another folder meanwhile
        self._lost_after = float(job.lost_after or LOST_AFTER)
        self._entries = {entry.name: entry for entry in job.nodes}
        self._given_up: list[RunId] = []
        self._changed = threading.Condition()
        self._leaving = False
        self._known = known_sweep(job, most)
        own = [(variant.job, member(self.group, variant, self._known)) for variant in variants(job)]
        every = [*own, *added(job, earlier, log)]
        self._work = [_Work(each, of, Variant(of.named, values=of.named_values or ())) for each, of in every]
        self._most = most or len(self._work)
        self._inputs = _InputsByCode(self._log, self._here)
        if not job.codes:
            self._inputs.of(job)
        self._machines = Machines(job, self._options, self._here, self._back)
        for work in self._work:
            if job.codes or work.own.added:
                work.had = earlier.get(work.own.variant)
        known = [(work, earlier[work.own.variant]) for work in self._work if work.own.variant in earlier]
        run_all_catching([partial(self._take_over, work, record) for work, record in known])

    @property
    def resume(self) -> str:
        """The command that runs the variants without a result."""
        return command_of(self._known, self.group)

    def variants(self) -> list[Variant]:
        """Return the current state of the variants, in the order of the sweep."""
        with self._changed:
            return [work.shown for work in self._work]

    def settled(self) -> list[Variant]:
        """The same; a variant whose run has ended is not running, even if its end is still being announced."""
        for work in self._work:
            if work.shown.state is SweepState.RUNNING and work.run is not None and (outcome := work.run.outcome):
                self._conclude(work, outcome)
        return self.variants()

    def run(self, show: Callable[[Sequence[Variant]], None]) -> int:
        """Run the variants without a result and return the worst exit code.

        show: called with all variants, at least every TICK. On KeyboardInterrupt running variants continue; call
        `leave`. Raises NodesFailed if no machine can run a variant.
        """
        idle_since: float | None = None
        while True:
            with self._changed:
                uninterrupted(self._begin_what_fits)
                states = {work.shown.state for work in self._work}
                if all(state.ended for state in states):
                    break
                self._changed.wait(TICK)
            show(self.variants())
            nothing_runs = not states & {SweepState.STARTING, SweepState.RUNNING}
            idle_since = (idle_since or time.monotonic()) if nothing_runs else None
            if idle_since is not None:
                self._machines.require_any(time.monotonic() - idle_since, self._lost_after)
        self._machines.close()
        show(self.variants())
        self._name_given_up()
        return max(work.shown.exit_code or 0 for work in self._work)

    def leave(self) -> None:
        """Start no more variants and close the connections; running variants continue. Waits for pending starts."""
        self._machines.close()
        with self._changed:
            self._leaving = True
            while any(work.shown.state is SweepState.STARTING for work in self._work):
                self._changed.wait(TICK)
            running = [work.run for work in self._work if work.run is not None]
        for run in running:
            run.close()
        self._name_given_up()

    def _name_given_up(self) -> None:
        for run in self._given_up:
            self.log(f"{run} was given up and may still be running. Once its machine responds: launcher down {run}")

    def stop(self) -> None:
        """After `leave`: stop the running variants, in parallel. Raises NodesFailed."""
        running = [work for work in self._work if work.shown.state is SweepState.RUNNING]
        run_all([partial(self._stop, work) for work in running])

    def _stop(self, work: _Work) -> None:
        with self._find(work.shown.run) as run:
            run.down()
        self._show(work, state=SweepState.STOPPED, exit_code=RunState.STOPPED.exit_code)

    def _find(self, run: RunId | None) -> Run:
        return find(run, runs=self._here / RUNS, ssh_config=self._options.ssh_config, log=self._log)

    def _log(self, text: str) -> None:
        """Log each line once: the messages about a start are the same for each variant."""
        with self._changed:
            new = text not in self._said
            self._said.add(text)
        if new:
            self.log(text)

    def _warn(self, work: _Work, text: str) -> None:
        assert work.run is not None
        self._log(f"warning: {work.shown.name}: {work.run.mask(text)}")

    def _show(self, work: _Work, **changes: Any) -> None:
        with self._changed:
            work.shown = replace(work.shown, **changes)
            self._changed.notify_all()

    def _take_over(self, work: _Work, record: Record) -> None:
        """Continue from the variant's last run: keep its result, or follow it if it was started."""
        run = Run(record, self._options.ssh_config, self._log)
        work.earlier = run.id if record.started else record.resumes
        if run.outcome is not None:
            if run.outcome.state is RunState.DONE:
                self._show_code(work, record)
                self._show(work, nodes=run.nodes)
                self._conclude(work, run.outcome)
        elif record.started or _was_started(run, record):
            work.earlier = run.id
            if outcome := ended_meanwhile(run, self._lost_after):
                self._take_over_ended(work, run, record, outcome)
                return
            nodes = tuple(node.name for node in record.nodes())
            placement = Placement(nodes, record.port)
            self._show_code(work, record)
            self._machines.occupy(placement)
            work.run = run
            self._show(work, state=SweepState.RUNNING, nodes=nodes, run=run.id)
            in_background(partial(self._attend, work, placement, lambda: run))
        else:
            self._remove_unstarted(work, run)

    def _show_code(self, work: _Work, record: Record) -> None:
        """Show a variant with the code that its run has: the revision of the job may mean another commit now."""
        if (had := record.group) is not None:
            self._show(work, name=had.named, values=had.named_values or ())

    def _take_over_ended(self, work: _Work, run: Run, record: Record, outcome: Outcome) -> None:
        """Keep the result of a run whose end is recorded only now; without one, the variant waits to be run again."""
        with run:
            if outcome.state is RunState.DONE:
                self._show_code(work, record)
                self._show(work, nodes=run.nodes)
                self._conclude(work, outcome)
            say_ended(work.shown.name, run, outcome, self._log)

    def _remove_unstarted(self, work: _Work, run: Run) -> None:
        """Remove the remains of a run whose launcher was killed during the start: they would never end."""
        try:
            with run:
                run.down()
        except LauncherError as error:  # it may be running there: nothing else is started in its place
            fix = f"run: launcher down {run.id}; then resume the sweep"
            why = f"the start of {run.id} was interrupted, and it could not be removed: {error}; {fix}"
            self._show(work, state=SweepState.FAILED, exit_code=error.exit_code, why=why)

    def _begin_what_fits(self) -> None:
        active = sum(work.shown.state in (SweepState.STARTING, SweepState.RUNNING) for work in self._work)
        waiting = [work for work in self._work if work.shown.state is SweepState.WAITING]
        for work in waiting[: 0 if self._leaving else max(0, self._most - active)]:
            placement = self._machines.take()
            if placement is None:
                return
            work.shown = replace(work.shown, state=SweepState.STARTING, nodes=placement.nodes)
            in_background(partial(self._attend, work, placement, partial(self._start, work, placement)))

    def _start(self, work: _Work, placement: Placement) -> Run:
        job = on_nodes(work.job, [self._entries[name] for name in placement.nodes], placement.port)
        earlier = None if work.earlier is None else Earlier(work.earlier, required=False)
        options = replace(self._options, resume=earlier, started=threading.Event())
        with self._machines.turn(placement):
            # one that ran before has the code that it had: a revision may mean another commit, a folder change
            had = work.had and inputs_had(job, work.had, self._log, self._here)
            return attempt(job, had or self._inputs.of(job), work.own, options)

    def _attend(self, work: _Work, placement: Placement, begin: Callable[[], Run]) -> None:
        """Run a variant from its start to its end, in its own thread."""
        try:
            with begin() as run:
                work.run, work.silent = run, {}
                self._show(work, state=SweepState.RUNNING, run=run.id)
                if not self._leaving:
                    self._conclude(work, run.wait(show=partial(self._note, work)))
                    if work.shown.state.ended and (written := run.written()):
                        self._log(f"{work.shown.name}: {run.mask(str(written))}")
        except Exception as error:  # noqa: BLE001 - shown as the variant's end
            self._without_result(work, placement, error)
        finally:
            self._machines.release(placement)
            with self._changed:
                self._changed.notify_all()

    def _without_result(self, work: _Work, placement: Placement, error: Exception) -> None:
        if self._leaving:  # connections are closed, and running variants continue
            if work.run is None:
                self._wait_again(work)
        elif isinstance(error, _LostError):
            self._give_up(work, f"did not respond for {duration(self._lost_after)}")
        elif isinstance(error, LauncherError):
            self._refused(work, placement, error)
        else:
            self._show(work, state=SweepState.FAILED, exit_code=1, why=f"{type(error).__name__}: {error}")

    def _note(self, work: _Work, message: messages.Message) -> None:
        """Raises _LostError if a machine has been silent for too long."""
        match message:
            case messages.Progress(fields):
                before = work.shown.progress
                lines = () if before is None else (before.first, before.last)
                made = training_progress([*lines, {"time": time.time(), **fields}])
                self._show(work, progress=made or before, top1=top1(fields) or work.shown.top1)
            case messages.NodeAway(node, reason, since):
                work.silent[node] = time.time()  # not `since`: a responding node is polled only every 30 s
                self._log(f"{node}: no connection since {messages.clock(since)} ({reason})")
            case messages.NodeBack(node):
                work.silent.pop(node, None)
            case messages.NodeStopped(node, by):
                self._log(f"{work.shown.name}: {by} is stopping it on {node}, from another terminal")
            case messages.NodeRemoved(node):
                self._log(f"{work.shown.name}: what ran on {node} was removed by another process")
            case messages.NotCollected(reason):
                self._warn(work, f"not downloaded: {reason}")
            case messages.Warned(reason):
                self._warn(work, reason)
        if any(time.time() - since > self._lost_after for since in work.silent.values()):
            raise _LostError

    def _conclude(self, work: _Work, outcome: Outcome) -> None:
        if outcome.state in (RunState.REMOVED, RunState.LOST, RunState.UNREACHABLE):  # without a result
            self._wait_again(work)
            return
        if outcome.state is RunState.FAILED and outcome.failure and outcome.failure.node in work.silent:
            self._give_up(work, "stopped responding")  # and its other machines failed without it
            return
        state = {RunState.DONE: SweepState.DONE, RunState.STOPPED: SweepState.STOPPED}.get(
            outcome.state, SweepState.FAILED
        )
        why = "" if outcome.failure is None else f"{outcome.failure.node}: {outcome.failure.what}"
        code, by = outcome.exit_code, outcome.ended_by
        self._show(work, state=state, run=outcome.run, exit_code=code, top1=top1(outcome.last), why=why, ended_by=by)

    def _refused(self, work: _Work, placement: Placement, error: LauncherError) -> None:
        """Handle a failed start, or a run with unreachable machines. If a machine is to blame, another is tried."""
        errors = list(error.errors) if isinstance(error, NodesFailed) else [error]
        if not all(isinstance(each, NodeError) for each in errors):
            self._show(work, state=SweepState.FAILED, exit_code=error.exit_code, why=str(error))
            return
        blamed = self._machines.refused(placement, errors)
        if work.run is None:
            self._wait_again(work)
        else:
            self._give_up(work, "did not respond when the sweep was resumed", blamed)

    def _wait_again(self, work: _Work) -> None:
        work.run = None
        self._show(work, state=SweepState.WAITING, nodes=(), run=None, progress=None)

    def _give_up(self, work: _Work, why: str, blamed: Collection[str] = ()) -> None:
        """Start the variant on other machines, and discard what its run does on machines that come back.

        blamed: the machines that did not respond; by default, those that are silent.
        """
        assert work.run is not None
        run, silent = work.run.id, sorted(blamed or work.silent) or list(work.shown.nodes)
        what = f"{work.shown.name} moves to another machine; the results of {run} will be discarded"
        self._log(f"{', '.join(silent)} {why}: {what}")
        for node in silent:
            self._machines.leave_out(node, NodeUnreachable(f"node {node}", why))
        Record(RunPaths(work.run.folder)).event(ABANDONED, why=why)
        work.earlier = run
        self._given_up.append(run)
        in_background(partial(self._discard, run))  # on its reachable machines
        self._wait_again(work)

    def _back(self, node: str) -> None:
        self.log(f"{node} responds again")
        run_all_catching([partial(self._discard, run) for run in list(self._given_up)])
        with self._changed:
            self._changed.notify_all()

    def _discard(self, run: RunId) -> None:
        """Stop and remove a run that was given up."""
        with suppress(LauncherError), self._find(run) as found:
            found.down()
            self._given_up.remove(run)
            self.log(f"{run}, which ran on a lost machine, was removed and its result discarded")
