"""`exec` in a run's container."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.errors import ContainerGone, LauncherError, NodeUnfit, UsageError
from launcher.model.container import Phase
from launcher.model.forward import Forward
from launcher.model.host import cluster_name
from launcher.model.progress import Log
from launcher.node.connect import LOCAL
from launcher.node.engine import Engine
from launcher.node.terminal import is_terminal
from launcher.records.store import NodeOfRun
from launcher.run.locate import Attached
from launcher.run.printed import node_of_rank
from launcher.run.state import SIGKILL_CODE

_RECORDED = 3.0  # seconds
_AS_RANK = Path(__file__).with_name("as_rank.sh")


def execute(
    attached: Attached, argv: Sequence[str], on: str | None, rank: int | None, ports: Sequence[Forward], log: Log
) -> int:
    """Run a command in a container of the run; return its exit code. Raises NodeUnfit if the container is not running.

    on: a node, by name or host; default: the first. rank: run on this rank's node, with its process's environment.
    """
    node = _choose(attached, on, rank)
    state = attached.states.get(node.name)
    if state is None or state.phase is not Phase.RUNNING:
        what = f"its container is not running ({state.phase.value if state else 'removed'})"
        new_one = "start a similar container: launcher shell JOB"
        fix = new_one if cluster_name(node.host) is None else "check its state: launcher status"
        raise NodeUnfit(f"node {node.name}", what, fix)
    if rank is not None:
        argv = ("sh", "-c", _AS_RANK.read_text(encoding="utf-8"), "sh", str(rank), *argv)
    note_local_ports(node.host, ports, log)
    engine = attached.engines[node.name]
    code = engine.interact(state.id, argv, terminal=is_terminal(), ports=ports)
    patience = _RECORDED if code == SIGKILL_CODE else 0  # a command is killed just before that is recorded
    if code and (why := _over(engine, state.id, patience)):  # the engine's own message, if any, names no run
        log(f"{node.name}: the run's container {why}, so the command could not start or was killed")
    return code


def _over(engine: Engine, container: str, patience: float) -> str:
    """Return that a container has ended or was removed; "" if it runs, or if that is not known."""
    try:
        state = engine.wait(container, patience)
    except ContainerGone:
        return "was removed"
    except LauncherError:
        return ""
    return f"has ended ({state.phase.value}, exit code {state.exit_code})" if state.phase.ended else ""


def _choose(attached: Attached, on: str | None, rank: int | None) -> NodeOfRun:
    """Return the node to run on. Raises UsageError, NodesFailed."""
    if on is not None and rank is not None:
        raise UsageError("exec", "both a node and a rank are given", "omit one of them")
    attached.require_any()
    if rank is not None:
        return node_of_rank(attached, rank)
    if on is None and attached.nodes[0].rank:
        attached.require_all()  # the first node is unreachable
    return attached.nodes[0] if on is None else attached.node(on)


def note_local_ports(host: str, ports: Sequence[Forward], log: Log) -> None:
    if host == LOCAL:
        for port in ports:
            log(f"port not forwarded: the node is this machine; open 127.0.0.1:{port.remote}")
