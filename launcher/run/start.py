"""All or nothing: create everywhere, put code and kit in, check, start; any failure undoes everything."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from functools import partial

from launcher.errors import ImageUnfit, LauncherError, NodesFailed, NodeUnfit
from launcher.model import labels
from launcher.model.container import ContainerSpec, ContainerState, Layout
from launcher.model.plan import NodePlan, Plan, RunId
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.parallel import uninterrupted
from launcher.run.archive import archive
from launcher.run.gpu_lock import claim_gpus

CHECKPOINTS = "checkpoints"  # in the output folder: where the trainer saves, and from where it goes on by itself


def start(
    plan: Plan,
    fleet: Fleet,
    code: bytes,
    secrets: Mapping[str, str],
    event: Callable[..., None],
    resume: RunId | None = None,
) -> None:
    """Bring every container of the plan to life.

    resume: an earlier run, whose checkpoints each node copies into the new run's output folder first.

    Whatever goes wrong, a Ctrl-C too, nothing of this run is left on any node when this raises; NodesFailed names
    every node that failed with its reason.
    """
    by_node = {planned.node: planned for planned in plan.nodes}
    ids: dict[str, str] = {}
    # nodes alike are given the very same bytes
    archives = {key: archive(*key, code, secrets) for key in {_unpacked(node.container) for node in plan.nodes}}

    def create(engine: Engine) -> None:
        planned = by_node[engine.node]
        engine.files.make_dir(planned.container.output_dir)
        if resume is not None:
            _bring_checkpoints(engine, planned, resume)
        ids[engine.node] = engine.create(planned.container)
        claim_gpus(engine, planned)
        engine.put(ids[engine.node], archives[_unpacked(planned.container)])
        _check(plan, planned, engine.wait(ids[engine.node], 0))

    def run(engine: Engine) -> None:
        engine.start(ids[engine.node])

    try:
        uninterrupted(partial(fleet.each, create))
        event("created", nodes=list(by_node))
        uninterrupted(partial(fleet.each, run))
        event("started", nodes=list(by_node))
    except BaseException as error:
        event("undone", reason=str(error) or type(error).__name__)
        uninterrupted(partial(undo, plan, fleet, cause=error))
        raise


def _unpacked(spec: ContainerSpec) -> tuple[Layout, str]:
    """Where in a container the archive goes, and whose it is there."""
    return spec.layout, spec.user


def _bring_checkpoints(engine: Engine, planned: NodePlan, earlier: RunId) -> None:
    """A copy, not links: a program that overwrites its checkpoint in place must not change the earlier run's."""
    new = planned.container.output_dir
    old = posixpath.join(posixpath.dirname(new), earlier)
    found = engine.files.copy_tree(posixpath.join(old, CHECKPOINTS), posixpath.join(new, CHECKPOINTS))
    if not found and planned.rank == 0:
        raise NodeUnfit(
            f"node {planned.node}",
            f"{earlier} has left no {CHECKPOINTS}/ in {old} to go on from",
            "the first node must be the one that it was then, and the run not purged",
        )


def undo(plan: Plan, fleet: Fleet, cause: BaseException) -> None:
    """Take back all that was created. Raises NodesFailed, the cause in it, where a node did not let us."""

    def take_back(engine: Engine) -> None:
        for state in engine.list({labels.RUN: plan.run}):
            if not state.phase.ended and state.phase.value != "created":
                engine.stop(state.id, grace=0)
            engine.remove(state.id)

    def clear(engine: Engine) -> None:
        engine.files.remove_tree(next(p for p in plan.nodes if p.node == engine.node).container.output_dir)

    try:
        fleet.each(take_back)
        fleet.each(clear)  # after all of them: nodes of one machine share this folder
    except LauncherError as left:
        raise NodesFailed([*([cause] if isinstance(cause, LauncherError) else []), left]) from cause


def _check(plan: Plan, planned: NodePlan, created: ContainerState) -> None:
    """Before anything starts: the container is of the same image as everywhere."""
    if plan.image_id and created.image != planned.container.image:
        raise ImageUnfit(
            f"node {planned.node}",
            f"its container is of image {created.image[:19]}, not of {planned.container.image[:19]} as was proven",
            "try again; if it happens again: launcher image ship JOB",
        )
