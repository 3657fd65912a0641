"""The states of a run and what leads from one to another; the first end wins."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from launcher.model.container import ContainerState, Phase


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
        return not ALLOWED[self]

    @property
    def exit_code(self) -> int:
        """What a command that waited for this end returns."""
        return {RunState.DONE: 0, RunState.STOPPED: 5, RunState.LOST: 3}.get(self, 1 if self.ended else 0)


ALLOWED: dict[RunState, frozenset[RunState]] = {
    RunState.CREATED: frozenset({RunState.RUNNING, RunState.FAILED, RunState.STOPPED, RunState.LOST}),
    RunState.RUNNING: frozenset({RunState.RESTARTING, RunState.DONE, RunState.FAILED, RunState.STOPPED, RunState.LOST}),
    RunState.RESTARTING: frozenset({RunState.RUNNING, RunState.DONE, RunState.FAILED, RunState.STOPPED, RunState.LOST}),
    RunState.DONE: frozenset(),
    RunState.FAILED: frozenset(),
    RunState.STOPPED: frozenset(),
    RunState.LOST: frozenset(),
}

SIGTERM_CODE = 143
SIGKILL_CODE = 137
TIMEOUT_CODE = 124
HANG_CODE = 125


def advance(state: RunState, new: RunState) -> RunState:
    """`new` where it may follow `state`; an end stays what it is."""
    if new is state or new in ALLOWED[state]:
        return new
    if state.ended:
        return state
    raise ValueError(f"a run cannot go from {state.value} to {new.value}")


def of_containers(states: Sequence[ContainerState], nodes: int) -> RunState:
    """What the containers of a run say about it; `nodes` is how many it should have."""
    phases = [state.phase for state in states]
    if any(phase is Phase.RESTARTING for phase in phases):
        return RunState.RESTARTING
    if any(phase in (Phase.RUNNING, Phase.PAUSED) for phase in phases):
        return RunState.RUNNING
    if any(phase is Phase.CREATED for phase in phases):
        return RunState.CREATED
    if any(state.exit_code not in (0, None) for state in states):
        return RunState.FAILED
    return RunState.DONE if len(states) >= nodes else RunState.LOST
