"""The machines of a pool: inspected once, excluded while they do not respond, and retried later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher.api.machines import machines
from launcher.api.up import StartOptions
from launcher.errors import InUse, LauncherError, NodesFailed, NodeUnreachable
from launcher.features.sweeps.pool import PORTS, Placement, Pool, no_room, room
from launcher.image.lock import lock_path
from launcher.job.models import Job
from launcher.job.overrides import on_nodes
from launcher.model.facts import NodeFacts
from launcher.node.connect import connect
from launcher.node.parallel import in_background, run_all_catching
from launcher.run.begin.claims import with_claims
from launcher.run.begin.gpus import wants_a_number
from launcher.run.begin.prepare import make_image

BUSY = 5.0  # seconds before a machine with GPUs in use is tried again
AWAY = 30.0  # seconds between two checks of a machine that does not respond


@dataclass(frozen=True)
class ExaminedPool:
    """Result of inspecting a pool: the capacity of each machine in variants, and the errors of unreachable machines.

    used: ports that are in use on any of the machines.
    """

    room: Mapping[str, int]
    used: frozenset[int]
    failed: Mapping[str, LauncherError]


def examine(job: Job, options: StartOptions, here: Path) -> ExaminedPool:
    """Connect to all machines of the pool in parallel, and ship the image to the reachable ones. here: the folder from
    which the job's relative paths count.

    Raises NodesFailed if no machine is reachable.
    """
    with connect(job.hosts(), job.runtime, options.ssh_config, allow_failures=True) as fleet:
        outcomes = run_all_catching([partial(with_claims, engine, port=True) for engine in fleet.engines])
        answers = dict(zip([engine.node for engine in fleet.engines], outcomes, strict=True))
        facts = {node: answer for node, answer in answers.items() if isinstance(answer, NodeFacts)}
        failed = {**fleet.failed}
        failed |= {node: answer for node, answer in answers.items() if isinstance(answer, LauncherError)}
        if not facts:
            raise NodesFailed(list(failed.values()), of=len(job.nodes))
        answered = [entry for entry in job.nodes if entry.name in facts]
        lock = here / lock_path(job.file) if job.file else None
        part = fleet.only([entry.name for entry in answered])
        make_image(on_nodes(job, answered), part, list(facts.values()), options.log, options.progress, lock)
    some = any(node.gpus for node in facts.values())
    rooms = {
        entry.name: room(job, entry, facts[entry.name], others=some) if entry.name in facts else 1
        for entry in job.nodes
    }
    failed |= {entry.name: no_room(job, entry, facts[entry.name]) for entry in job.nodes if not rooms[entry.name]}
    listening = {port for node in facts.values() for port in node.listening}
    claimed = {claim.port for node in facts.values() for claim in node.port_claims}
    return ExaminedPool(rooms, frozenset(listening | claimed), failed)


class Machines:
    """Chooses the machines of the pool on which a variant is started."""

    def __init__(self, job: Job, options: StartOptions, here: Path, changed: Callable[[str], None]) -> None:
        """here: as for `examine`. changed: called with a machine that responds again. Raises NodesFailed if no machine
        responds now.
        """
        examined = examine(job, options, here)
        self._each = job.each or len(job.nodes)
        most = PORTS if len(job.ports) == 1 else max(len(job.ports), sum(examined.room.values()) // self._each)
        self._pool = Pool(examined.room, self._each, job.port, examined.used, most)
        self._hosts = {entry.name: entry.host for entry in job.nodes}
        self._options = options
        self._changed = changed
        self._busy: dict[str, float] = {}  # GPUs or ports are in use: do not try before then (time.monotonic())
        self._away: dict[str, LauncherError] = {}
        self._lock = threading.RLock()
        self._over = threading.Event()
        hosts = set(self._hosts.values()) if wants_a_number(job) else ()
        self._turns = {host: threading.Lock() for host in sorted(hosts)}
        for node, error in examined.failed.items():
            self.leave_out(node, error, for_good=not examined.room[node])

    def take(self) -> Placement | None:
        """Return machines for the next variant; None while too few are free."""
        with self._lock:
            self._busy = {node: until for node, until in self._busy.items() if until > time.monotonic()}
            return self._pool.take({*self._busy, *self._away})

    def occupy(self, placement: Placement) -> None:
        with self._lock:
            self._pool.occupy(placement)

    def release(self, placement: Placement) -> None:
        with self._lock:
            self._pool.release(placement)

    @contextmanager
    def turn(self, placement: Placement) -> Iterator[None]:
        """Serialize the starts on each machine whose idle GPUs are chosen: two starts would choose the same GPUs."""
        hosts = {self._hosts[node] for node in placement.nodes}
        with ExitStack() as held:
            for host, turn in self._turns.items():  # always in the same order, to avoid a deadlock
                if host in hosts:
                    held.enter_context(turn)
            yield

    def refused(self, placement: Placement, errors: list[LauncherError]) -> set[str]:
        """Record that a variant could not be started: GPUs are in use, or a machine does not respond. Return which.

        It may be another one of the pool, which has the files from which the variant resumes.
        """
        blamed = set[str]()
        for error in errors:
            named = {node for node in self._hosts if error.is_of(node)} or {*placement.nodes}
            blamed |= named
            for node in sorted(named):
                if isinstance(error, InUse):
                    self._options.log(f"waiting: {node}: {error.what}")
                    with self._lock:
                        self._busy[node] = time.monotonic() + BUSY
                else:
                    self.leave_out(node, error)
        return blamed

    def leave_out(self, node: str, error: LauncherError, *, for_good: bool = False) -> None:
        """Exclude a machine until it responds again, or permanently."""
        with self._lock:
            if node in self._away:
                return
            self._away[node] = error
        fix = f"; {error.next_step}" if error.next_step else ""
        self._options.log(f"{node} is excluded{'' if for_good else ' until it responds again'}: {error.what}{fix}")
        if not for_good:
            in_background(partial(self._retry, node))

    def require_any(self, waited: float, lost_after: float) -> None:
        """Raises NodesFailed if too few machines are usable; if some only do not respond, not before lost_after."""
        with self._lock:
            errors = list(self._away.values())
        if len(self._hosts) - len(errors) >= self._each:
            return
        if waited > lost_after or not any(isinstance(error, NodeUnreachable) for error in errors):
            raise NodesFailed(errors, of=len(errors))

    def close(self) -> None:
        self._over.set()

    def _retry(self, node: str) -> None:
        while not self._over.wait(AWAY):
            if machines([self._hosts[node]], ssh_config=self._options.ssh_config)[1]:
                continue
            with self._lock:
                del self._away[node]
            self._changed(node)
            return
