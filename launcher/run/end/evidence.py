"""The collected data of a node that ended: container state, logs, attempts and torchrun's error file."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.hangs.report import unmet
from launcher.local_files import parse_object, read_end
from launcher.model.container import ContainerState
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun
from launcher.run.end import gradients
from launcher.run.state import SIGKILL_CODE
from launcher.run.watch.attempts import (
    LIMIT,
    AtBreakpoint,
    Attempt,
    EndedGeneration,
    begun,
    give_up_reason,
    parse,
    parse_ended_generation,
    parse_generations,
    reached_budget,
    waiting,
)

TAIL = 256 << 10


@dataclass(frozen=True)
class WorkerError:
    """torchrun's error file: a worker's exception and when it was raised (seconds since the epoch, 0: unknown)."""

    text: str
    time: float


@dataclass(frozen=True)
class Evidence:
    """What is known about how a node ended: its last attempt, or, in a job with min_nodes, its last generation."""

    node: NodeOfRun
    state: ContainerState
    log: str  # the end of the node's log
    error: WorkerError | None
    rank_logs: Mapping[int, str]  # the ends of its workers' logs, by rank
    attempts: tuple[Attempt, ...] = ()
    ended_generation: EndedGeneration | None = None  # in a job with min_nodes
    nccl: str = ""  # NCCL's own logs of its last attempt, to which its warnings go too
    give_up_reason: str = ""  # why it is not restarted although `restarts` is not used up
    at_breakpoint: tuple[AtBreakpoint, ...] = ()  # ranks that had not gone on from there
    budget: bool = False  # it has ended the run at its budget
    ahead: float = 0.0  # seconds by which its clock is ahead of this machine's

    @property
    def last(self) -> Attempt:
        return self.attempts[-1] if self.attempts else Attempt(0.0)

    @property
    def failed_at(self) -> float:
        """When its failing worker raised its error, else when it ended, by this machine's clock; 0: unknown.

        Of nodes that are blamed alike; `ended_at` is what others can have noticed: a program that had failed may go on.
        """
        when = (self.error and self.error.time) or self.state.finished
        return when and when - self.ahead

    @property
    def ended_at(self) -> tuple[float, bool, float]:
        """Sorts nodes by the end of their programs, by this machine's clock; unknown ends last.

        entry.sh notes it in whole seconds; the container may end later, as orphaned processes keep its log open. Within
        a second, nodes that failed come first: they may have ended those that did not.
        """
        ended = self.last.ended or self.state.finished
        if not ended:
            return math.inf, False, math.inf
        return math.floor(ended - self.ahead), self.state.exit_code == 0, self.state.finished - self.ahead

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel killed it for want of memory.

        Its engine may have missed that, and knows nothing of a whole machine that has none left. A program may go on
        without the process that was killed, and fail of something else.
        """
        killed = self.state.exit_code == SIGKILL_CODE or any(code == -signal.SIGKILL for _, code in self.last.failed)
        return self.state.oom_killed or (self.last.memory_ran_out and killed)

    @property
    def logs(self) -> tuple[str, ...]:
        """The ends of all its logs."""
        return self.log, *self.rank_logs.values()


def collective_failed(evidence: Iterable[Evidence]) -> bool:
    """Return whether the logs show a collective that timed out because other ranks did not join it."""
    return any(unmet(log) for one in evidence for log in one.logs)


def refusal(logged: bytes, node: str) -> bytes:
    """Return why entry.sh has not started the program, or b"". logged: the engine's log of the container."""
    last = logged.rstrip().rpartition(b"\n")[2]
    return last if last.startswith(f"launcher: node {node}: ".encode()) else b""


def gather(root: Path, node: NodeOfRun, state: ContainerState, fallback: bytes = b"", refused: bytes = b"") -> Evidence:
    """Return the evidence for a node, from the run's files that were collected in `root`.

    What earlier attempts printed is not evidence: the last one may have ended without a word.
    fallback: the engine's log, used if the node's log file is missing or empty. refused: why the program was not
    started again, of which the files have nothing.
    """
    paths = NodePaths(str(root), node.name)
    tried = read_end(paths.attempts, LIMIT)
    attempts, begins = parse(tried), begun(tried)
    if refused and not (attempts and attempts[-1].exit_code == state.exit_code):  # else the program exited with it
        again = (*attempts, Attempt(state.started))
        return Evidence(node, state, refused.decode("utf-8", "replace"), None, {}, again, budget=reached_budget(tried))
    files = {rank: Path(paths.rank_log(rank)) for rank in node.ranks}
    if None in begins:  # else there is nothing of an earlier attempt
        files = {rank: file for rank, file in files.items() if rank in begins}
    if generations := [each for each in parse_generations(tried) if node.name in each.members]:
        last = generations[-1]
        begins = {None: last.offset}
        own = Path(paths.in_generation(last.number, last.members.index(node.name)))
        files = {int(file.stem[5:]): file for file in own.glob("rank-*.log")}
    return Evidence(
        node=node,
        state=state,
        log=(read_end(paths.log, TAIL, begins.get(None, 0)) or fallback).decode("utf-8", "replace"),
        error=_worker_error(read_end(paths.error, LIMIT), attempts[-1].started if attempts else 0.0),
        rank_logs={
            rank: read_end(str(file), TAIL, begins.get(rank, 0)).decode("utf-8", "replace")
            for rank, file in files.items()
            if file.is_file()
        },
        attempts=attempts,
        nccl=gradients.collected(root, [node])[node.name],
        ended_generation=parse_ended_generation(tried),
        give_up_reason=give_up_reason(tried),
        budget=reached_budget(tried),
        at_breakpoint=waiting(tried),
    )


def _worker_error(content: bytes, started: float) -> WorkerError | None:
    """Return None if the error file is missing, incomplete because of a full disk or a kill, or of an earlier attempt.

    started: the last attempt.
    """
    message = (parse_object(content) or {}).get("message")
    if not isinstance(message, dict):
        return WorkerError(str(message), 0.0) if message else None
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    try:
        time = float(str(extra.get("timestamp")))
    except ValueError:
        time = 0.0
    if time and time < started:  # entry.sh has removed it on the node, and the last attempt has left none
        return None
    return WorkerError(str(extra.get("py_callstack") or message.get("message", "")), time)
