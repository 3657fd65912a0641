"""A run as an object: follow it, read its output, fetch its files, stop it. Used by the commands and by notebooks.

A method imports what only it uses: `status` reads no output, and stops nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import LauncherError, RunUnknown, UsageError
from launcher.extras import in_words, warn_on_error
from launcher.job.settings import read_settings, use_valid_settings
from launcher.logs.lines import Lines
from launcher.model.container import ContainerState
from launcher.model.forward import parse_forward
from launcher.model.host import cluster_host
from launcher.model.plan import Membership, Plan, RunId
from launcher.model.progress import silent
from launcher.node.ssh.config import chosen_config
from launcher.records.groups import named_group, newest_of
from launcher.records.paths import RUNS
from launcher.records.store import Record, read_json_lines, records
from launcher.records.store import find as on_record
from launcher.run.locate import Attached, Note, Owner, connect_run, find_containers, find_on_nodes
from launcher.run.result import Outcome
from launcher.run.selection import MASTER, Selection
from launcher.run.state import RunState
from launcher.run.status import RunStatus, run_status
from launcher.run.watch import messages
from launcher.run.watch.messages import Message, Output

if TYPE_CHECKING:
    from launcher.job.settings import Notify
    from launcher.records.written import Written
    from launcher.run.end.fetch import Fetched
    from launcher.run.end.stop import Remaining, Removed
    from launcher.run.watch.supervise import Supervision

    Show = Callable[[Message], None]

_END_UNKNOWN = "how the run has ended could not be recorded"
RECONNECT = 30.0  # seconds before unreachable nodes are tried again: a command waits for them only once


class Run:
    """A run of a job, from its start to its end. Created by `launcher.up` and `launcher.find`.

    Connections are opened when they are first needed. `close`, or leaving a `with` block, closes the connections and
    does not end the run. All methods may be called from several threads.
    """

    def __init__(
        self,
        record: Record,
        ssh_config: Path | None = None,
        log: Note = print,
        attached: Attached | None = None,
        plan: Plan | None = None,
    ) -> None:
        """plan: set if this process has started the run; it then also removes the containers of a failed run."""
        self._record = record
        self._ssh_config = ssh_config
        self._log = log
        self._attached = attached
        self._fleets = [attached.fleet] if attached else []
        self._connected_at = time.monotonic()
        self.plan = plan
        self._outcome: Outcome | None = None
        self._ended = False  # seen by a `wait` that did not return
        self._supervision: Supervision | None = None
        self._shown = MASTER  # the output that it shows
        self._readings: set[Supervision] = set()  # of iterators that were not used up
        self._turn = threading.Lock()  # one thread supervises at a time
        self._connecting = threading.Lock()

    @property
    def id(self) -> RunId:
        return self._record.run

    @property
    def group(self) -> Membership | None:
        """The sweep to which the run belongs."""
        return self._record.group

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, by rank."""
        return tuple(node.name for node in self._record.nodes())

    @property
    def folder(self) -> Path:
        """runs/<run id>/ on this machine: logs, TensorBoard logs, metrics, the job, the plan, the result."""
        return self._record.paths.root

    @property
    def outcome(self) -> Outcome | None:
        """The recorded outcome; None if the run continues, or if no launcher has seen its end."""
        if self._outcome is None and (result := self._record.result()):
            try:
                self._outcome = Outcome.from_dict(self.id, result)
            except ValueError:  # not written by the launcher
                return None
        return self._outcome

    @property
    def ended(self) -> bool:
        """Whether all of its containers have ended, as far as is known; its files may not have been collected yet."""
        return self.outcome is not None or self._ended

    @property
    def not_started(self) -> LauncherError | None:
        """Why it was not started, with the exit code of the `up` that was to; None: it was started."""
        if not (why := self._record.why_not_started):
            return None
        if self.outcome is None and ((now := self._now()).states or now.unreachable):
            return None
        error = LauncherError(self.id, f"was not started: {why}")
        error.exit_code = (self._record.result() or {}).get("exit_code") or error.exit_code
        return error

    def __repr__(self) -> str:
        return f"<launcher.Run {self.id}>"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the run continues. An iterator of output that is still in use ends with an error."""
        for reading in [*self._readings]:
            reading.close()
        if self._supervision is not None:
            self._supervision.close()
            self._supervision = None
        self._attached = None
        while self._fleets:
            self._fleets.pop().close()

    def wait(self, timeout: float | None = None, *, show: Show | None = None, logs: Selection = MASTER) -> Outcome:
        """Supervise the run until it ends and record its outcome; peers of a failed node are stopped.

        timeout: seconds until TimeoutError is raised; the run continues, as on Ctrl-C. show: called in this thread with
        each message: output of `logs`, progress, nodes that are lost and come back. Several threads may wait: one of
        them supervises, and another one takes over when that one returns. If the run fails, the process that started
        it removes the containers. Raises NodesFailed if too few nodes respond.
        """
        until = None if timeout is None else time.monotonic() + timeout
        if not self._turn.acquire(timeout=-1 if timeout is None else timeout):
            raise self._not_yet(timeout)
        try:
            if self.outcome is None:
                self._outcome = self._supervise(show or self._warnings, logs, until)
            if self._outcome is None:
                raise self._not_yet(timeout)
            return self._outcome
        finally:
            self._turn.release()

    def output(self, logs: Selection = MASTER, *, follow: bool = False, timestamps: bool = False) -> Iterator[Output]:
        """Yield the output of the selected nodes or ranks as chunks of bytes, without changing the run.

        follow: continue until the run ends. timestamps: start each line with its time, to within a second; this
        disables `follow`.
        """
        from launcher.run.printed import find_output, read_earlier, read_now, with_copies

        attached = with_copies(self._now(), self._log)
        attached.require_any()
        for error in attached.unreachable.values() if logs.all_nodes else ():
            self._log(f"warning: {error}")
        parts = find_output(attached, logs)
        yield from read_earlier(attached, parts, timestamps=timestamps)
        if timestamps or not follow or not attached.states or self.outcome is not None:
            yield from read_now(attached, parts, timestamps=timestamps)
            return
        from launcher.run.watch.supervise import Supervision

        reading = Supervision(attached, parts.now, resumed=True, reads_only=True)
        self._readings.add(reading)
        try:
            yield from (message for message in reading.messages() if isinstance(message, Output))
        finally:
            reading.close()
            self._readings.discard(reading)

    def logs(
        self,
        *,
        rank: int | None = None,
        node: str | None = None,
        all_nodes: bool = False,
        tail: int | None = None,
        since: str | None = None,
        follow: bool = True,
    ) -> Iterator[str]:
        """Yield the lines of rank 0, or of the selection, without line ends and with secrets masked.

        follow: continue until the run ends; else stop at the current end. tail: start with this number of last lines.
        since: "10m" ago or an ISO 8601 time. The run is not changed.
        """
        cut: dict[str, Lines] = {}
        for piece in self.output(Selection(rank, node, all_nodes, tail, since), follow=follow):
            lines = cut.setdefault(piece.node, Lines())
            yield from map(self.mask, lines.feed(piece.data))
        for lines in cut.values():
            yield from map(self.mask, lines.end())

    def status(self) -> RunStatus:
        """Return the current state of the nodes: states, ranks, restarts, progress, use of the GPUs."""
        seen = run_status(self._now())
        return replace(seen, nodes=tuple(replace(node, last=self.mask(node.last)) for node in seen.nodes))

    def containers(self) -> Mapping[str, ContainerState]:
        """Return the current containers of the reachable nodes, by the name of the node in the run."""
        return self._now().states

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of the trainer's metrics.jsonl, including new ones on the nodes."""
        if self.outcome is None:
            self.fetch()
        return list(read_json_lines(self._record.paths.metrics))

    def fetch(self, to: str | PathLike[str] | None = None, *, checkpoints: bool = False) -> Fetched:
        """Download TensorBoard logs, metrics, error files and rank logs.

        checkpoints: also download them, and what else the program wrote to its output folder and its working
        directories (workdir/NODE/). to: destination folder; default: the folder of the run. Only new data is
        transferred.
        """
        from launcher.run.end.fetch import fetch

        attached = self._now()
        fetched = fetch(attached, Path(to) if to else self.folder, checkpoints=checkpoints)
        warn_on_error(_END_UNKNOWN, partial(self._record_end, attached), False, self._warn)
        return fetched

    def written(self) -> Written | None:
        """Return what the program wrote to its output folders, with its working directories; `str()` is a sentence.

        None: nothing that `fetch(checkpoints=True)` would still bring. `unlisted` of it has the reason if
        that could not be found out, whatever it is.
        """
        from launcher.records.written import Written
        from launcher.run.end.fetch import written

        lost = [node.node for node in self.outcome.nodes if node.lost] if self.outcome else []
        try:
            found = written(self._connected(), without=lost)
        except Exception as error:  # noqa: BLE001 - said; the run has ended as it has
            return Written(0, 0, (), unlisted=in_words(error))
        with suppress(RunUnknown):
            latest = on_record(None, self.folder.parent)  # of a sweep, `fetch` without a name brings every variant
            if found is not None and (self.group is not None or latest.run != self.id):
                return replace(found, run=self.id)
        return found

    def exec(
        self, argv: Sequence[str], node: str | None = None, *, rank: int | None = None, ports: Sequence[str] = ()
    ) -> int:
        """Run a command in a running container, with the variables of the job's processes. Return its exit code.

        The command uses this process's stdin, stdout and stderr. node: name or host; default: the first node. rank: use
        the container of this rank, with the variables of its process (RANK, MASTER_ADDR, ...). ports: local ports to
        forward to the node while the command runs: "8888", or "9000:8888" for local port 9000. Raises UsageError, and
        NodeUnfit if no container is running.
        """
        from launcher.run.execute import execute

        forwards = [parse_forward(text) for text in ports]
        return execute(self._now(), argv, node, rank, forwards, self._log)

    def debug(self, *, rank: int | None = None) -> int:
        """Give this process's terminal to the ranks that wait in breakpoint(), one after another. Return an exit code.

        rank: only this one. Raises UsageError if none waits.
        """
        from launcher.run.debug import debug

        return debug(self._now(), rank, self._log)

    def down(
        self, *, purge: bool = False, unfetched: bool | None = None, any_owner: bool = False, own_only: bool = False
    ) -> list[Removed]:
        """Stop the run and remove its containers: SIGTERM, 45 s for a checkpoint, SIGKILL; logs are fetched first.

        purge: also delete the output folders on the nodes. unfetched: also what has files that were not fetched:
        containers, with files outside of the output folder, and output folders; default: only with `purge`. What is
        kept for them is `kept` of what is returned. any_owner: also stop the run of another user. own_only: do
        not stop a run that another caller with the same account has started. The call may be repeated. Raises
        UsageError for a run that it may not stop, NotConfirmed if a node did not confirm.
        """
        from launcher.run.end.outcome import failed_before
        from launcher.run.end.stop import not_confirmed, take_down

        use_valid_settings(os.environ, self._warn)
        attached = self._now(claims=True, any_owner=any_owner)
        if attached.owner is Owner.OTHER and not any_owner:
            what = f"belongs to another user: {attached.started_by}"
            raise UsageError(self.id, what, f"to stop it anyway, run: launcher down {self.id} --any-owner")
        if attached.owner is Owner.ACCOUNT and own_only and not any_owner:
            what = f"was started by another caller with the same account: {attached.started_by}"
            raise UsageError(self.id, what, f"to stop it, name the run: launcher down {self.id}")
        collected = warn_on_error(_END_UNKNOWN, partial(self._record_end, attached), False, self._warn)
        removed, errors = take_down(
            attached,
            self._warn,
            partial(failed_before, attached, self._warn),
            purge=purge,
            unfetched=purge if unfetched is None else unfetched,
            collected=collected,
        )
        if errors:
            raise not_confirmed(removed, errors)
        return removed

    @property
    def mask(self) -> Callable[[str], str]:
        """Function that replaces the values of the run's secrets in a text."""
        return self._record.mask

    @property
    def unmasked(self) -> str:
        """A warning if this caller does not know the values of all secrets of the run, else ""."""
        return self._record.unmasked

    def _connected(self) -> Attached:
        """Connect on first use, and again RECONNECT seconds after a node was unreachable."""
        with self._connecting:
            old = time.monotonic() - self._connected_at > RECONNECT and self._supervision is None
            if self._attached is None or (self._attached.unreachable and old):
                self._attached = connect_run(self._record, self._ssh_config)
                self._connected_at = time.monotonic()
                self._fleets.append(self._attached.fleet)  # an earlier one may still be in use
            return self._attached

    def _now(self, *, claims: bool = False, any_owner: bool = False) -> Attached:
        return find_containers(self._connected(), self._log, claims=claims, any_owner=any_owner)

    def _not_yet(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(f"{self.id} has not ended after {timeout:g} s; it is still running")

    def _warn(self, text: str) -> None:
        self._log(f"warning: {text}")

    def _warnings(self, message: Message) -> None:
        if isinstance(message, (messages.NotCollected, messages.Warned)):
            self._warn(message.reason)

    def _supervise(self, show: Show, logs: Selection, until: float | None) -> Outcome | None:
        """Return None after `until` (time.monotonic())."""
        # all that the end needs is loaded now: until then, the launcher's files may be replaced by another version's
        import launcher.records.written
        import launcher.run.end.stop
        import launcher.run.notify  # noqa: F401

        notify = read_settings(os.environ).notify  # read at the start, as the file may be edited during the run
        try:
            if self._supervision is not None and logs != self._shown:
                self._supervision.close()
                self._supervision = None
            self._shown = logs
            supervision = self._supervision = self._supervision or self._begin(show, logs)
            for message in supervision.messages():
                show(message)
                if until is not None and time.monotonic() > until:
                    return None
            outcome, unrecorded, problems = supervision.record_outcome()
        except BaseException:  # a message may be lost: the next call starts over
            if self._supervision is not None:
                self._ended = self._supervision.all_ended
                self._supervision.close()
                self._supervision = None
            raise
        self._outcome = outcome  # from here on nothing that fails changes it
        if self.plan is not None and outcome.state not in (RunState.DONE, RunState.STOPPED):
            problems = [*problems, *self._remove_failed(show)]
        problems = [*problems, *self._announce(outcome, notify)]
        if unrecorded:
            show(messages.NotCollected(unrecorded))
        for problem in problems:
            show(messages.Warned(problem))
        return outcome

    def _begin(self, show: Show, logs: Selection) -> Supervision:
        from launcher.run.printed import find_output, master_from_start, read_earlier
        from launcher.run.watch.supervise import Supervision

        if self._attached is not None and self.plan is not None and logs == MASTER:
            attached = self._attached
            return Supervision(attached, master_from_start(attached).now, resumed=False)
        attached = self._now()
        attached.require_any()
        if len(attached.unreachable) > attached.may_lose:
            attached.require_all()
        parts = find_output(attached, logs)
        for output in read_earlier(attached, parts):
            show(output)
        return Supervision(attached, parts.now, resumed=True)

    def _record_end(self, attached: Attached) -> bool:
        """Record how the run has ended if no launcher followed it to its end, while all of its nodes can tell.

        Return whether that was done, and the files of all nodes were collected for it.
        """
        states = attached.states.values()
        others = attached.owner is Owner.OTHER  # whose files are not read
        if self.outcome is not None or others or len(states) < attached.size:
            return False
        if not all(state.phase.ended for state in states):
            return False
        from launcher.run.watch.supervise import Supervision

        supervision = Supervision(attached, (), resumed=True)
        try:
            for message in supervision.messages():
                self._warnings(message)
            outcome, unrecorded, problems = supervision.record_outcome()
        finally:
            supervision.close()
        self._outcome = outcome
        for problem in filter(None, (unrecorded, *problems)):
            self._warn(problem)
        return not any(node.lost for node in outcome.nodes)

    def _announce(self, outcome: Outcome, notify: Notify) -> list[str]:
        """Notify unless another command has, which saw the same end. Return what is wrong with that."""
        from launcher.run.notify import Notice, send

        if not (notify.command or notify.webhook) or not self._record.first("notified", state=outcome.state.value):
            return []
        why = "" if outcome.failure is None else f": {outcome.failure.node} {outcome.failure.what}"
        why = why if outcome.stopped_by is None else f" by {outcome.stopped_by}"
        text = self.mask(f"{outcome.run} {outcome.state.value}{why}")
        problems = send(notify, Notice(outcome.run, outcome.state.value, outcome.exit_code, text))
        return [f"notification failed: {problem}" for problem in problems]

    def _remove_failed(self, show: Show) -> list[str]:
        """Remove everything but the output folders from the nodes; all evidence has been recorded. Return errors."""
        from launcher.run.end.stop import stop

        fix = f"Cleanup is incomplete. Once the node is reachable again, run: launcher down {self.id}"
        try:
            engines = self._connected().fleet.engines
            removed = stop(engines, self.id, code=self._record.sent_code, record=self._record)
        except Exception as left:  # noqa: BLE001 - said
            return [f"{fix}\n{in_words(left)}"]
        except KeyboardInterrupt:
            show(messages.Warned(f"interrupted, so cleanup is incomplete; run: launcher down {self.id}"))
            raise
        return [f"{each.node}: {each.left_in_words}" for each in removed if each.left_in_shm]


def find(
    run: str | None = None,
    *,
    runs: str | PathLike[str] = RUNS,
    nodes: Sequence[str] | None = None,
    cluster: str | None = None,
    ssh_config: str | PathLike[str] | None = None,
    log: Note | None = print,
) -> Run:
    """Return the run with this ID, unique prefix of an ID, or job name (its latest run); None: the latest run. The ID
    of a sweep, or a unique prefix of it, is that of its latest variant.

    runs: folder of the records. nodes, cluster: search these nodes, or a cluster of the settings file, by the labels
    of containers; no record is needed then. log: None: silent. Raises RunUnknown, NodesFailed.
    """
    log = log or silent
    config = chosen_config(ssh_config)
    hosts = [cluster_host(cluster)] if cluster is not None else nodes
    if hosts is None:
        group = None if run is None else named_group(run, Path(runs), by_job=False)
        record = on_record(run, Path(runs)) if group is None else newest_of(group, Path(runs))
        for problem in record.ignored():
            log(f"warning: {problem}")
        return Run(record, config, log)
    attached = find_on_nodes(run, hosts, config, log, Path(runs))
    return Run(attached.record, config, log, attached)


def runs_to_stop(
    *,
    nodes: Sequence[str] | None = None,
    cluster: str | None = None,
    purge: bool = False,
    ssh_config: str | PathLike[str] | None = None,
    log: Note = print,
) -> Remaining:
    """Return what is left of the runs recorded here, or of all runs on these nodes or this cluster.

    Each node is asked once. purge: output folders count, too.
    """
    from launcher.run.end.stop import remaining, remaining_on

    hosts = [cluster_host(cluster)] if cluster is not None else nodes
    if hosts is None:
        return remaining(records(), chosen_config(ssh_config), log, purge=purge)
    return remaining_on(hosts, records(), chosen_config(ssh_config), log)
