"""The states of a run, and what its containers' states make of it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from launcher.model.container import ContainerState, Phase

TIMEOUT_CODE = 124
HANG_CODE = 125
SIGKILL_CODE = 137
SIGTERM_CODE = 143


class RunState(str, Enum):
    """A run as a whole. The last four are ends: nothing follows them."""

    CREATED = "created"
    RUNNING = "running"
    RESTARTING = "restarting"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"

    @property
    def ended(self) -> bool:
        return self in _EXIT_CODES

    @property
    def exit_code(self) -> int:
        """What a command that waited for this end returns."""
        return _EXIT_CODES.get(self, 0)


_EXIT_CODES = {RunState.DONE: 0, RunState.FAILED: 1, RunState.LOST: 3, RunState.STOPPED: 5}


def of_containers(states: Sequence[ContainerState], nodes: int, min_nodes: int = 0) -> RunState:
    """The state of a run with these containers that should have `nodes` of them.

    min_nodes: it may have lost some, and is done when any of them has finished; 0: all are needed.
    """
    phases = {state.phase for state in states}
    if Phase.RESTARTING in phases:
        return RunState.RESTARTING
    if phases & {Phase.RUNNING, Phase.PAUSED}:
        return RunState.RUNNING
    if Phase.CREATED in phases:
        return RunState.CREATED
    if min_nodes and any(state.exit_code == 0 for state in states):
        return RunState.DONE
    if any(state.exit_code not in (0, None) for state in states):
        return RunState.FAILED
    return RunState.DONE if len(states) >= nodes else RunState.LOST
