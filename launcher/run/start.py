"""All or nothing: create everywhere, put code and kit in, check, start; any failure undoes everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from launcher.errors import ImageUnfit, LauncherError, NodesFailed, NodeUnfit
from launcher.model import labels
from launcher.model.container import ContainerState
from launcher.model.plan import NodePlan, Plan
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.run.archive import archive


def start(
    plan: Plan,
    fleet: Fleet,
    code: bytes,
    secrets: Mapping[str, str],
    event: Callable[..., None],
) -> None:
    """Bring every container of the plan to life.

    Whatever goes wrong, a Ctrl-C too, nothing of this run is left on any node when this raises; NodesFailed names
    every node that failed with its reason.
    """
    by_node = {planned.node: planned for planned in plan.nodes}
    ids: dict[str, str] = {}

    def create(engine: Engine) -> None:
        planned = by_node[engine.node]
        engine.files.make_dir(planned.container.output_dir)
        ids[engine.node] = engine.create(planned.container)
        engine.put(ids[engine.node], archive(planned.container, code, secrets))

    def check(engine: Engine) -> None:
        _check(engine, plan, by_node[engine.node])

    def run(engine: Engine) -> None:
        engine.start(ids[engine.node])

    try:
        fleet.each(create)
        event("created", nodes=list(by_node))
        fleet.each(check)
        fleet.each(run)
        event("started", nodes=list(by_node))
    except BaseException as error:
        event("undone", reason=str(error) or type(error).__name__)
        undo(plan, fleet, cause=error)
        raise


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


def _check(engine: Engine, plan: Plan, planned: NodePlan) -> None:
    """Before anything starts: the container is there, as asked for, of the same image as everywhere."""
    found: list[ContainerState] = [
        s for s in engine.list({labels.RUN: plan.run, labels.NODE: planned.node}) if s.name == planned.container.name
    ]
    if len(found) != 1:
        raise NodeUnfit(f"node {planned.node}", "the container that was just created is gone", "try again")
    if plan.image_id and found[0].image != plan.image_id:
        raise ImageUnfit(
            f"node {planned.node}",
            f"its container is of image {found[0].image[:19]}, not of {plan.image_id[:19]} as on the others",
            "try again; if it happens again: launcher image ship JOB",
        )
