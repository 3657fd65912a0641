"""`shell` in a new container, and temporary runs without a record."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from launcher.extras import warn_on_error
from launcher.image.lock import lock_path
from launcher.job.models import Job
from launcher.job.parts import NodeEntry
from launcher.model import labels
from launcher.model.facts import NodeFacts
from launcher.model.forward import Forward
from launcher.model.plan import Plan
from launcher.model.progress import Log
from launcher.model.sizes import counted
from launcher.node import output_folder
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.parallel import uninterrupted
from launcher.node.terminal import is_terminal
from launcher.planning.allotment import allot
from launcher.records.snapshot import Snapshot
from launcher.records.wanted import is_ours
from launcher.records.workdir import sent_files
from launcher.records.written import outside
from launcher.run.begin.prepare import make_plan, prepare
from launcher.run.begin.start import start_containers
from launcher.run.end.stop import stop
from launcher.run.execute import note_local_ports
from launcher.run.locate import copy_by_hand

# Main process of a shell's container. It exits when the caller dies: on a node, a guard stops the container; a plain
# process on the same machine checks the caller's PID, $1 (0: no check).
_IDLE = 'trap "exit 0" TERM; while [ "$1" = 0 ] || kill -0 "$1" 2>/dev/null; do sleep 1; done'
_SHELL = ("sh", "-c", "if command -v bash >/dev/null 2>&1; then exec bash; fi; exec sh")


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
    note_local_ports(entry.host, ports, log)
    caller = os.getpid() if job.traits.one_machine else 0
    alone = job.model_copy(update={"nodes": (entry,), "timeout": None})
    facts = [_shared(node) for node in fleet.facts()]
    idle = ("sh", "-c", _IDLE, "sh", str(caller))
    with temporary_run("shell", alone, idle, fleet, facts, code, secrets, log) as plan:
        container = plan.master.container
        with fleet.engines[0].guard(container.name):
            code_ = fleet.engines[0].interact(container.name, _SHELL, terminal=is_terminal(), ports=ports)
            grown = partial(fleet.engines[0].grown, container.name)
            if lost := outside(warn_on_error("files outside of the output folder are not listed", grown, (), log)):
                log(f"{lost}: removed with the container; save below $LAUNCHER_OUTPUT or the working directory")
            return code_


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

    A Ctrl-C during that is raised after it. Keeps a shell's output folder if the user wrote files into it. purpose: the
    label that distinguishes it from a user's run.
    """
    run = job.run.model_copy(update={"module": None, "script": None, "command": command, "args": {}})
    nodes = tuple(entry.model_copy(update={"args": {}}) for entry in job.nodes)
    without = {"restarts": 0, "hang_timeout": None, "budget": None, "min_nodes": None, "spares": None}
    lock = lock_path(job.file) if job.file else None
    changed = job.model_copy(update={"run": run, "nodes": nodes, **without})
    prepared = prepare(changed, fleet, allot(changed, facts), log, lock_file=lock, here=Path.cwd())
    plan = make_plan(changed, prepared, code.digest)
    planned = []
    for node in plan.nodes:
        marked = {**node.container.labels, labels.PURPOSE: purpose}
        planned.append(replace(node, container=replace(node.container, labels=marked)))
    plan = replace(plan, nodes=tuple(planned))
    start_containers(plan, fleet, code.archive, secrets, lambda *_, **__: None)
    try:
        yield plan
    finally:
        uninterrupted(partial(_remove, plan, purpose, fleet, code, log))


def _remove(plan: Plan, purpose: str, fleet: Fleet, code: Snapshot, log: Log) -> None:
    def remove_output(engine: Engine) -> None:
        output = plan.node_plan(engine.node).container.output_dir
        if purpose != "shell" or not _keep_written(engine, output, log):
            output_folder.remove(engine.files, output, plan.run)

    try:
        stop(fleet.engines, plan.run, code=sent_files(code.archive), grace=1)
    finally:  # even if a node is lost
        fleet.each(remove_output)


def _keep_written(engine: Engine, output: str, log: Log) -> bool:
    """Whether the user wrote files into the output folder, which is said then."""
    kept = [file for file in engine.files.scan(output) if not is_ours(file.path)]
    if kept:
        fix = f"to copy: {copy_by_hand(engine.host, output)}"
        log(f"{counted(len(kept), 'file')} kept in {output} on {engine.node}; {fix}")
    return bool(kept)
