"""A run of the launcher's own, without a record: for `shell` and for `doctor --measure`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from launcher.image.image_locations import Log
from launcher.job.models import Job
from launcher.model import labels
from launcher.model.facts import NodeFacts
from launcher.model.plan import Plan, RunId
from launcher.node import output_folder
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.records.snapshot import Snapshot
from launcher.run.prepare import prepare
from launcher.run.start import start
from launcher.run.stop import stop

_OWN = ("logs/", "state/", "errors/", ".node/", output_folder.MARKER)  # in an output folder: not the user's work


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
        nodes.append(dataclasses.replace(node, container=dataclasses.replace(node.container, labels=marked)))
    plan = dataclasses.replace(plan, nodes=tuple(nodes))
    start(plan, fleet, code.archive, secrets, lambda *_, **__: None)
    try:
        yield plan
    finally:
        stop(fleet, plan.run, grace=1)
        fleet.each(lambda engine: _remove_output(engine, plan.on(engine.node).container.output_dir, plan.run, log))


def _remove_output(engine: Engine, output: str, run: RunId, log: Log) -> None:
    kept = [file for file in engine.files.scan(output) if not file.path.startswith(_OWN)]
    if kept:
        log(f"{len(kept)} file(s) stay in {output} on {engine.node}")
    else:
        output_folder.remove(engine.files, output, run)
