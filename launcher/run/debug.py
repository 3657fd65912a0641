"""Ranks that wait in breakpoint() (container_scripts/launcher_breakpoint.py), and the terminal that they wait for."""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from launcher.container_scripts.debug_client import LEFT
from launcher.errors import ContainerGone, LauncherError, NodeUnfit, UsageError
from launcher.model.container import KIT, Phase
from launcher.model.progress import Log
from launcher.node.engine import Engine
from launcher.node.files import Span
from launcher.node.parallel import run_all_catching
from launcher.node.terminal import is_terminal
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun
from launcher.run.locate import Attached
from launcher.run.watch import attempts
from launcher.run.watch.attempts import AtBreakpoint

BEAT = 2.0  # seconds
_NOT_THERE = 3  # exit code of debug.sh and of debug_client.py


def debug(attached: Attached, rank: int | None, log: Log) -> int:
    """Give this terminal to the ranks that wait, one after another, or to this rank. Return an exit code.

    Raises UsageError if none waits, NodesFailed.
    """
    attached.require_any()
    _require_rank(attached, rank)
    seen, gone = False, set[tuple[str, AtBreakpoint]]()
    with _no_hang(attached):
        while True:
            found = [(node, one) for node, one in _waiting(attached) if rank in (None, one.rank)]
            there = [(node, one) for node, one in found if one.waits and (node.name, one) not in gone]
            if not there and seen:
                return 0
            if not there and found:
                for node, one in found:
                    log(one.sentence(node.name) if not one.waits else f"rank {one.rank} no longer waits")
                return _NOT_THERE
            if not there:
                raise _nobody(attached, rank)
            node, one = there[0]
            log(one.sentence(node.name))
            kit = KIT if attached.record.traits.isolates else posixpath.join(node.output, ".node", node.name, "kit")
            argv = ("sh", f"{kit}/debug.sh", str(one.rank))
            code = attached.engines[node.name].interact(node.container, argv, terminal=is_terminal())
            if code == LEFT:
                return 0
            if code == _NOT_THERE:
                gone.add((node.name, one))
            elif code:
                return code
            else:
                seen = True


def keep_alive(engine: Engine, node: NodeOfRun) -> None:
    """Show the entry script of a node with a hang timeout that the run does not hang. Raises LauncherError."""
    engine.files.append(NodePaths(node.output, node.name).alive, ".", below=node.output)


@contextmanager
def _no_hang(attached: Attached) -> Iterator[None]:
    """While a rank is debugged, the run does not hang."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT):
            for node in attached.nodes:
                with suppress(LauncherError):  # tried again; the terminal shows what is wrong with its own node
                    keep_alive(attached.engines[node.name], node)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def _waiting(attached: Attached) -> list[tuple[NodeOfRun, AtBreakpoint]]:
    """Return the ranks that wait, those that have waited longest first. Raises NodeUnfit, NodeUnreachable."""
    found = run_all_catching([partial(_of_node, attached.engines[node.name], node) for node in attached.nodes])
    waiting = []
    for node, ranks in zip(attached.nodes, found, strict=True):
        if isinstance(ranks, LauncherError):
            raise ranks
        waiting += [(node, one) for one in ranks]
    return sorted(waiting, key=lambda pair: (pair[1].since, pair[1].rank))


def _of_node(engine: Engine, node: NodeOfRun) -> tuple[AtBreakpoint, ...]:
    try:
        if engine.wait(node.container, 0).phase is not Phase.RUNNING:
            return ()
        end = Span(NodePaths(node.output, node.name).attempts, -attempts.LIMIT, attempts.LIMIT)
        return attempts.waiting(b"".join(piece for _, piece in engine.files.read_spans([end], below=node.output)))
    except (ContainerGone, NodeUnfit):
        return ()


def _require_rank(attached: Attached, rank: int | None) -> None:
    """Raise UsageError for a rank that the run does not have; in a job with min_nodes, their number changes."""
    last = max((node.ranks.stop - 1 for node in attached.record.nodes()), default=0)
    if rank is not None and rank > last and not attached.record.min_nodes:
        raise UsageError("--rank", f"{rank}: the ranks of {attached.record.run} are 0 to {last}", "name one of them")


def _nobody(attached: Attached, rank: int | None) -> UsageError:
    if not attached.unreachable and all(state.phase.ended for state in attached.states.values()):
        state = (attached.record.result() or {}).get("state")
        what = f"{attached.record.run} has ended{f' ({state})' if state else ''}: no rank waits in breakpoint()"
        return UsageError("debug", what, "to run the job again: launcher up")
    where = f"{attached.record.run}: {'no rank waits' if rank is None else f'rank {rank} does not wait'}"
    fix = "call breakpoint() in the program; for another run: launcher debug RUN; to list them: launcher runs"
    return UsageError("debug", f"{where} in breakpoint()", fix)
