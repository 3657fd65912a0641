"""Going into a run's container, or into one made for it: `exec` and `shell`."""

from __future__ import annotations

import dataclasses
import os
import posixpath
from collections.abc import Callable, Mapping, Sequence

from launcher.errors import NodeUnfit
from launcher.job.models import Job, NodeEntry
from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.plan import Plan
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.terminal import is_terminal
from launcher.plan.containers import KIT
from launcher.records.snapshot import Snapshot
from launcher.records.store import NodeOfRun
from launcher.run.prepare import prepare
from launcher.run.start import start
from launcher.run.stop import stop

# What the container of a shell runs meanwhile. Its caller's death ends it: a guard sees to that on a node, the
# caller's pid, $1, where it is a plain process of the same machine.
_IDLE = 'trap "exit 0" TERM; while [ "$1" = 0 ] || kill -0 "$1" 2>/dev/null; do sleep 1; done'
_SHELL = ("sh", "-c", "if command -v bash >/dev/null 2>&1; then exec bash; fi; exec sh")
_OWN_FOLDERS = ("logs/", "state/", "errors/", ".node/")  # in an output folder: what is not the user's work


def execute(engine: Engine, node: NodeOfRun, state: ContainerState | None, argv: Sequence[str]) -> int:
    """Run a command in the run's container on this node; its exit code. Raises NodeUnfit where none is running."""
    if state is None or state.phase is not Phase.RUNNING:
        raise NodeUnfit(
            f"node {node.name}",
            f"no container of the run is running there ({state.phase.value if state else 'removed'})",
            "for a container of the same kind: launcher shell JOB",
        )
    return engine.interact(state.id, _within(node, state, argv), terminal=is_terminal())


def shell(
    job: Job, entry: NodeEntry, fleet: Fleet, code: Snapshot, secrets: Mapping[str, str], say: Callable[[str], None]
) -> int:
    """A shell in a fresh container that is like the job's own on this node, gone when it ends; its exit code.

    Its output folder stays only where something was written into it. Takes no GPU lock and no port: it is for looking
    at things, also while a run goes on.
    """
    caller = os.getpid() if job.runtime == "process" else 0
    run = job.run.model_copy(
        update={"module": None, "script": None, "command": ("sh", "-c", _IDLE, "sh", str(caller)), "args": {}}
    )
    alone = job.model_copy(update={"nodes": (entry,), "run": run, "restarts": 0, "timeout": None, "hang_timeout": None})
    facts = [dataclasses.replace(node, listening=()) for node in fleet.facts()]
    plan = _as_shell(prepare(alone, fleet, code.digest, say, facts=facts))
    container = plan.master.container
    start(plan, fleet, code.archive, secrets, _no_record)
    engine = fleet.engines[0]
    try:
        with engine.guard(container.name):
            argv = ("sh", f"{container.layout.kit}/within.sh", *_SHELL)
            return engine.interact(container.name, argv, terminal=is_terminal())
    finally:
        stop(fleet, plan.run, grace=1)
        kept = [f.path for f in engine.files.scan(container.output_dir) if not f.path.startswith(_OWN_FOLDERS)]
        if kept:
            say(f"{len(kept)} file(s) stay in {container.output_dir} on {engine.node}")
        else:
            engine.files.remove_tree(container.output_dir)


def _within(node: NodeOfRun, state: ContainerState, argv: Sequence[str]) -> tuple[str, ...]:
    """The command behind the kit's script that gives it the variables of the job's own processes."""
    process = state.labels.get(labels.RUNTIME) == "process"
    kit = posixpath.join(node.output, ".node", node.name, "kit") if process else KIT
    return ("sh", f"{kit}/within.sh", *argv)


def _as_shell(plan: Plan) -> Plan:
    """Marked as what it is, so that no command takes it for a run."""
    nodes = tuple(
        dataclasses.replace(
            node,
            container=dataclasses.replace(node.container, labels={**node.container.labels, labels.PURPOSE: "shell"}),
        )
        for node in plan.nodes
    )
    return dataclasses.replace(plan, nodes=nodes)


def _no_record(_kind: str, **_fields: object) -> None:
    """A shell leaves no record: nothing ran that one would want to come back to."""
