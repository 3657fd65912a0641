"""`exec` in a run's container, `shell` in one that is created for it; runs of the launcher's own, without a record."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from launcher.errors import NodeUnfit, UsageError
from launcher.job.models import Job, NodeEntry
from launcher.model import labels
from launcher.model.container import Phase
from launcher.model.facts import NodeFacts
from launcher.model.forward import Forward
from launcher.model.host import cluster_name
from launcher.model.plan import Plan, RunId
from launcher.model.progress import Log
from launcher.node import output_folder
from launcher.node.connect import LOCAL, Fleet
from launcher.node.engine import Engine
from launcher.node.terminal import is_terminal
from launcher.records.snapshot import Snapshot
from launcher.records.store import NodeOfRun
from launcher.run.locate import Attached
from launcher.run.prepare import prepare
from launcher.run.printed import node_of_rank
from launcher.run.start import start
from launcher.run.stop import stop

_OWN = ("logs/", "state/", "errors/", ".node/", output_folder.MARKER)  # in an output folder: not the user's work
# What the container of a shell runs meanwhile. Its caller's death ends it: a guard sees to that on a node, the
# caller's pid, $1, where it is a plain process of the same machine.
_IDLE = 'trap "exit 0" TERM; while [ "$1" = 0 ] || kill -0 "$1" 2>/dev/null; do sleep 1; done'
_AS_RANK = Path(__file__).with_name("as_rank.sh")
_SHELL = ("sh", "-c", "if command -v bash >/dev/null 2>&1; then exec bash; fi; exec sh")


def execute(
    attached: Attached, argv: Sequence[str], on: str | None, rank: int | None, ports: Sequence[Forward], log: Log
) -> int:
    """Run a command in a container of the run; its exit code. Raises NodeUnfit where none is running.

    on: a node, by name or host; default: the first. rank: where it runs, with the variables of its process.
    """
    node = _choose(attached, on, rank)
    state = attached.states.get(node.name)
    if state is None or state.phase is not Phase.RUNNING:
        what = f"no container of the run is running there ({state.phase.value if state else 'removed'})"
        alike = "for a container of the same kind: launcher shell JOB"
        fix = alike if cluster_name(node.host) is None else "see what its job does: launcher status"
        raise NodeUnfit(f"node {node.name}", what, fix)
    if rank is not None:
        argv = ("sh", "-c", _AS_RANK.read_text(encoding="utf-8"), "sh", str(rank), *argv)
    _say_what_is_here(node.host, ports, log)
    return attached.engines[node.name].interact(state.id, argv, terminal=is_terminal(), ports=ports)


def _choose(attached: Attached, on: str | None, rank: int | None) -> NodeOfRun:
    """Raises UsageError, NodesFailed."""
    if on is not None and rank is not None:
        raise UsageError("exec", "a node and a rank are given", "leave out one of them")
    attached.require_any()
    if rank is not None:
        return node_of_rank(attached, rank)
    if on is None and attached.nodes[0].rank:
        attached.require_all()  # the first node does not answer
    return attached.nodes[0] if on is None else attached.node(on)


def shell(
    job: Job,
    entry: NodeEntry,
    fleet: Fleet,
    code: Snapshot,
    secrets: Mapping[str, str],
    ports: Sequence[Forward],
    log: Log,
) -> int:
    """A shell in a new container that is like the job's own on this node, removed when it ends; its exit code.

    Its output folder stays only where something was written into it. Takes no GPU lock and no port: it is for looking
    at things, also while a run goes on.
    """
    _say_what_is_here(entry.host, ports, log)
    caller = os.getpid() if job.runtime == "process" else 0
    alone = job.model_copy(update={"nodes": (entry,), "timeout": None})
    facts = [_shared(node) for node in fleet.facts()]
    idle = ("sh", "-c", _IDLE, "sh", str(caller))
    with temporary_run("shell", alone, idle, fleet, facts, code, secrets, log) as plan:
        container = plan.master.container
        with fleet.engines[0].guard(container.name):
            return fleet.engines[0].interact(container.name, _SHELL, terminal=is_terminal(), ports=ports)


def _say_what_is_here(host: str, ports: Sequence[Forward], log: Log) -> None:
    if host == LOCAL:
        for port in ports:
            log(f"nothing is forwarded: the node is this machine, open 127.0.0.1:{port.remote}")


def _shared(node: NodeFacts) -> NodeFacts:
    """As if nobody used its GPUs and ports."""
    return replace(node, listening=(), gpus=tuple(replace(gpu, processes=(), used_mib=0) for gpu in node.gpus))


@contextmanager
def temporary_run(
    purpose: str,
    job: Job,
    command: tuple[str, ...],
    fleet: Fleet,
    facts: Sequence[NodeFacts],
    code: Snapshot,
    secrets: Mapping[str, str],
    log: Log,
) -> Iterator[Plan]:
    """The job with another command, started; stopped and removed at the end.

    An output folder stays only where something was written into it. purpose: the label for which no command takes it
    for a user's run.
    """
    run = job.run.model_copy(update={"module": None, "script": None, "command": command, "args": {}})
    without = {"restarts": 0, "hang_timeout": None, "min_nodes": None, "spares": None}
    plan = prepare(job.model_copy(update={"run": run, **without}), fleet, facts, code.digest, log)
    nodes = []
    for node in plan.nodes:
        marked = {**node.container.labels, labels.PURPOSE: purpose}
        nodes.append(replace(node, container=replace(node.container, labels=marked)))
    plan = replace(plan, nodes=tuple(nodes))
    start(plan, fleet, code.archive, secrets, lambda *_, **__: None)
    try:
        yield plan
    finally:
        try:
            stop(fleet, plan.run, grace=1)
        finally:  # also where one node is lost
            fleet.each(lambda engine: _remove_output(engine, plan.on(engine.node).container.output_dir, plan.run, log))


def _remove_output(engine: Engine, output: str, run: RunId, log: Log) -> None:
    kept = [file for file in engine.files.scan(output) if not file.path.startswith(_OWN)]
    if kept:
        log(f"{len(kept)} file(s) stay in {output} on {engine.node}")
    else:
        output_folder.remove(engine.files, output, run)
