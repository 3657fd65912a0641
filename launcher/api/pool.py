"""The machines of a pool as they are now: examined once, left out while they do not answer, asked again later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from launcher.api.machines import machines
from launcher.api.up import How
from launcher.errors import InUse, LauncherError, NodesFailed, NodeUnreachable
from launcher.image.lock import path_beside
from launcher.job.models import Job
from launcher.job.overrides import on_nodes
from launcher.model.facts import NodeFacts
from launcher.node.connect import connect
from launcher.node.parallel import in_background, run_all_settled
from launcher.planning.pool import Place, Pool, no_room, room
from launcher.run.gpus import counts, with_claims
from launcher.run.prepare import make_image

BUSY = 5.0  # seconds for which a machine whose GPUs others use is left alone
AWAY = 30.0  # seconds between two looks at a machine that does not answer


@dataclass(frozen=True)
class Examined:
    """What the machines of a pool answered: how many variants each has room for, and who did not answer.

    listening: ports at which programs listen on any of them.
    """

    room: Mapping[str, int]
    listening: frozenset[int]
    failed: Mapping[str, LauncherError]


def examine(job: Job, how: How) -> Examined:
    """Connect to all machines of the pool, and put the image on those that answer, all at once.

    Raises NodesFailed where none answers.
    """
    with connect(job.hosts(), job.runtime, how.ssh_config, allow_failures=True) as fleet:
        outcomes = run_all_settled([partial(with_claims, engine) for engine in fleet.engines])
        answers = dict(zip([engine.node for engine in fleet.engines], outcomes, strict=True))
        facts = {node: answer for node, answer in answers.items() if isinstance(answer, NodeFacts)}
        failed = {**fleet.failed}
        failed |= {node: answer for node, answer in answers.items() if isinstance(answer, LauncherError)}
        if not facts:
            raise NodesFailed(list(failed.values()), of=len(job.nodes))
        answered = [entry for entry in job.nodes if entry.name in facts]
        lock = path_beside(job.file) if job.file else None
        part = fleet.only([entry.name for entry in answered])
        make_image(on_nodes(job, answered), part, list(facts.values()), how.log, how.progress, lock)
    some = any(node.gpus for node in facts.values())
    rooms = {
        entry.name: room(job, entry, facts[entry.name], others=some) if entry.name in facts else 1
        for entry in job.nodes
    }
    failed |= {entry.name: no_room(job, entry, facts[entry.name]) for entry in job.nodes if not rooms[entry.name]}
    listening = frozenset(port for node in facts.values() for port in node.listening)
    return Examined(rooms, listening, failed)


class Machines:
    """Which machines of the pool a variant may be started on."""

    def __init__(self, job: Job, how: How, changed: Callable[[str], None]) -> None:
        """changed: called with a machine that answers again. Raises NodesFailed where none answers now."""
        examined = examine(job, how)
        self._each = job.each or len(job.nodes)
        self._pool = Pool(examined.room, self._each, job.port, examined.listening)
        self._hosts = {entry.name: entry.host for entry in job.nodes}
        self._how = how
        self._changed = changed
        self._busy: dict[str, float] = {}  # GPUs or ports are used by others: until when, of time.monotonic()
        self._away: dict[str, LauncherError] = {}
        self._lock = threading.RLock()
        self._over = threading.Event()
        hosts = set(self._hosts.values()) if counts(job) else ()
        self._turns = {host: threading.Lock() for host in sorted(hosts)}
        for node, error in examined.failed.items():
            self.leave_out(node, error, for_good=not examined.room[node])

    def take(self) -> Place | None:
        """Machines for the next variant; None while too few are free."""
        with self._lock:
            self._busy = {node: until for node, until in self._busy.items() if until > time.monotonic()}
            return self._pool.take({*self._busy, *self._away})

    def occupy(self, place: Place) -> None:
        with self._lock:
            self._pool.occupy(place)

    def release(self, place: Place) -> None:
        with self._lock:
            self._pool.release(place)

    @contextmanager
    def turn(self, place: Place) -> Iterator[None]:
        """One start at a time on each machine where idle GPUs are chosen: two would choose the same ones."""
        hosts = {self._hosts[node] for node in place.nodes}
        with ExitStack() as held:
            for host, turn in self._turns.items():  # in one order everywhere
                if host in hosts:
                    held.enter_context(turn)
            yield

    def refused(self, place: Place, errors: list[LauncherError]) -> None:
        """A variant could not be started there: others use its GPUs, or it does not answer."""
        for error in errors:
            named = [node for node in place.nodes if error.where == f"node {node}"]
            for node in named or place.nodes:
                if isinstance(error, InUse):
                    self._how.log(f"waiting: {node}: {error.what}")
                    with self._lock:
                        self._busy[node] = time.monotonic() + BUSY
                else:
                    self.leave_out(node, error)

    def leave_out(self, node: str, error: LauncherError, *, for_good: bool = False) -> None:
        """Until it answers again, or for good."""
        with self._lock:
            if node in self._away:
                return
            self._away[node] = error
        fix = f"; {error.next_step}" if error.next_step else ""
        self._how.log(f"{node} is left out{'' if for_good else ' until it answers again'}: {error.what}{fix}")
        if not for_good:
            in_background(partial(self._look_again, node))

    def require_any(self, waited: float, lost_after: float) -> None:
        """Raises NodesFailed where too few machines can be used: at once, or after lost_after if one may be silent."""
        with self._lock:
            errors = list(self._away.values())
        if len(self._hosts) - len(errors) >= self._each:
            return
        if waited > lost_after or not any(isinstance(error, NodeUnreachable) for error in errors):
            raise NodesFailed(errors, of=len(errors))

    def close(self) -> None:
        self._over.set()

    def _look_again(self, node: str) -> None:
        while not self._over.wait(AWAY):
            if machines([self._hosts[node]], ssh_config=self._how.ssh_config)[1]:
                continue
            with self._lock:
                del self._away[node]
            self._changed(node)
            return
