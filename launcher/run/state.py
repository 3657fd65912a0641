"""The states of a run, and the function that determines them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from launcher.model.container import ContainerState, Phase

REFUSED_CODE = 73  # entry.sh could not start the program
TIMEOUT_CODE = 124
HANG_CODE = 125
SIGKILL_CODE = 137
SIGTERM_CODE = 143
BUDGET = "budget"  # `ended_by` of a run


class RunState(str, Enum):
    """State of a run. DONE, FAILED, STOPPED and LOST are final."""

    CREATED = "created"
    RUNNING = "running"
    RESTARTING = "restarting"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    REMOVED = "removed"  # no containers left, and no recorded outcome
    UNREACHABLE = "unreachable"  # it may still be running on unreachable nodes
    ENDED_HERE = "ended here"  # on the nodes that the user named; the others were not asked

    @property
    def ended(self) -> bool:
        return self in _EXIT_CODES

    @property
    def exit_code(self) -> int:
        """Exit code of a command that waited for the run."""
        return _EXIT_CODES.get(self, 0)


_EXIT_CODES = {RunState.DONE: 0, RunState.FAILED: 1, RunState.LOST: 3, RunState.STOPPED: 5}


def state_of(  # noqa: PLR0913 - all that decides it
    containers: Iterable[ContainerState],
    nodes: int,
    *,
    min_nodes: int = 0,
    unreachable: int = 0,
    not_asked: int = 0,
    removed: int = 0,
    incomplete: bool = False,
    stopped: bool = False,
    recorded: RunState | None = None,
) -> RunState:
    """Return the state of a run. No other function decides whether and how a run has ended.

    containers: those that still exist on its `nodes` nodes. min_nodes: nodes that the run needs at least; 0: all.
    unreachable: number of nodes that do not answer. not_asked: of nodes that the user did not name. removed: of nodes
    without a container of the run any more, or given up. incomplete: of the end of a node less is known, such as that
    its files could not be collected. stopped: by a user. recorded: the state in result.json.
    """
    states = list(containers)
    phases = {state.phase for state in states}
    if active := _active(phases):
        return active
    if recorded is not None:
        return recorded
    if unreachable:
        return RunState.UNREACHABLE  # whatever the others did, the run may go on there
    if not_asked:
        return RunState.ENDED_HERE
    may_lose = nodes - min_nodes if min_nodes else 0
    if stopped:
        return RunState.STOPPED
    if may_lose and any(state.exit_code == 0 for state in states):
        return RunState.DONE
    if removed > may_lose or any(state.exit_code not in (0, None) for state in states):
        return RunState.FAILED
    if not states:
        return RunState.REMOVED
    unknown = any(state.exit_code is None for state in states)
    return RunState.LOST if incomplete or unknown or len(states) < nodes else RunState.DONE


def at_budget(containers: Iterable[ContainerState], budget: bool) -> list[ContainerState]:
    """Return containers as they count for `state_of`: if the run has reached its budget, no exit code is a failure."""
    return [replace(each, exit_code=0) if budget and each.exit_code else each for each in containers]


def recorded_end(result: Mapping[str, Any] | None) -> RunState | None:
    """Return the state in result.json; None if it has none, or one that this version does not know."""
    state = (result or {}).get("state")
    return RunState(state) if state in set(RunState) else None


def _active(phases: set[Phase]) -> RunState | None:
    if Phase.RESTARTING in phases:
        return RunState.RESTARTING
    if phases & {Phase.RUNNING, Phase.PAUSED}:
        return RunState.RUNNING
    return RunState.CREATED if Phase.CREATED in phases else None
