"""`exec` in a run's container, `shell` in a new one, and temporary runs without a record."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from launcher.errors import ContainerGone, LauncherError, NodeUnfit, UsageError
from launcher.extras import extra
from launcher.image.lock import lock_path
from launcher.job.models import Job
from launcher.job.parts import NodeEntry
from launcher.model import labels
from launcher.model.container import Phase
from launcher.model.facts import NodeFacts
from launcher.model.forward import Forward
from launcher.model.host import cluster_name
from launcher.model.plan import Plan, RunId
from launcher.model.progress import Log
from launcher.model.sizes import counted
from launcher.node import output_folder
from launcher.node.connect import LOCAL, Fleet
from launcher.node.engine import Engine
from launcher.node.terminal import is_terminal
from launcher.records.snapshot import Snapshot
from launcher.records.store import NodeOfRun
from launcher.records.wanted import is_ours
from launcher.records.workdir import sent_files
from launcher.records.written import outside
from launcher.run.locate import Attached
from launcher.run.prepare import make_plan, prepare
from launcher.run.printed import node_of_rank
from launcher.run.start import start
from launcher.run.state import SIGKILL_CODE
from launcher.run.stop import stop

# Main process of a shell's container. It exits when the caller dies: on a node, a guard stops the container; a plain
# process on the same machine checks the caller's PID, $1 (0: no check).
_IDLE = 'trap "exit 0" TERM; while [ "$1" = 0 ] || kill -0 "$1" 2>/dev/null; do sleep 1; done'
_RECORDED = 3.0  # seconds
_AS_RANK = Path(__file__).with_name("as_rank.sh")
_SHELL = ("sh", "-c", "if command -v bash >/dev/null 2>&1; then exec bash; fi; exec sh")


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
    _note_local_ports(node.host, ports, log)
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


def shell(
    job: Job,
    entry: NodeEntry,
    fleet: Fleet,
    code: Snapshot,
    secrets: Mapping[str, str],
    ports: Sequence[Forward],
    log: Log,
) -> int:
    """Run a shell in a new container like the job's on this node; return its exit code. The container is removed.

    Keeps its output folder only if the user wrote files into it. Takes no GPU lock and no port, so that it works next
    to a run.
    """
    _note_local_ports(entry.host, ports, log)
    caller = os.getpid() if job.traits.one_machine else 0
    alone = job.model_copy(update={"nodes": (entry,), "timeout": None})
    facts = [_shared(node) for node in fleet.facts()]
    idle = ("sh", "-c", _IDLE, "sh", str(caller))
    with temporary_run("shell", alone, idle, fleet, facts, code, secrets, log) as plan:
        container = plan.master.container
        with fleet.engines[0].guard(container.name):
            code_ = fleet.engines[0].interact(container.name, _SHELL, terminal=is_terminal(), ports=ports)
            grown = partial(fleet.engines[0].grown, container.name)
            if lost := outside(extra("files outside of the output folder are not listed", grown, (), log)):
                log(f"{lost}: removed with the container; save below $LAUNCHER_OUTPUT or the working directory")
            return code_


def _note_local_ports(host: str, ports: Sequence[Forward], log: Log) -> None:
    if host == LOCAL:
        for port in ports:
            log(f"port not forwarded: the node is this machine; open 127.0.0.1:{port.remote}")


def _shared(node: NodeFacts) -> NodeFacts:
    """Return the facts as if all GPUs and ports were free."""
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
    """Start the job with another command; stop and remove it at the end.

    Keeps an output folder only if the user wrote files into it. purpose: the label that distinguishes it from a user's
    run.
    """
    run = job.run.model_copy(update={"module": None, "script": None, "command": command, "args": {}})
    nodes = tuple(entry.model_copy(update={"args": {}}) for entry in job.nodes)
    without = {"restarts": 0, "hang_timeout": None, "min_nodes": None, "spares": None}
    lock = lock_path(job.file) if job.file else None
    changed = job.model_copy(update={"run": run, "nodes": nodes, **without})
    plan = make_plan(changed, prepare(changed, fleet, facts, log, lock_file=lock, here=Path.cwd()), code.digest)
    planned = []
    for node in plan.nodes:
        marked = {**node.container.labels, labels.PURPOSE: purpose}
        planned.append(replace(node, container=replace(node.container, labels=marked)))
    plan = replace(plan, nodes=tuple(planned))
    start(plan, fleet, code.archive, secrets, lambda *_, **__: None)
    try:
        yield plan
    finally:
        try:
            stop(fleet.engines, plan.run, code=sent_files(code.archive), grace=1)
        finally:  # even if a node is lost
            fleet.each(lambda engine: _remove_output(engine, plan.on(engine.node).container.output_dir, plan.run, log))


def _remove_output(engine: Engine, output: str, run: RunId, log: Log) -> None:
    kept = [file for file in engine.files.scan(output) if not is_ours(file.path)]
    if kept:
        log(f"{counted(len(kept), 'file')} kept in {output} on {engine.node}")
    else:
        output_folder.remove(engine.files, output, run)
