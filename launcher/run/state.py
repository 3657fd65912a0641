"""The states of a run, and the one decision about whether and how it has ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from launcher.model.container import ContainerState, Phase

TIMEOUT_CODE = 124
HANG_CODE = 125
SIGKILL_CODE = 137
SIGTERM_CODE = 143


class RunState(str, Enum):
    """A run as a whole. DONE, FAILED, STOPPED and LOST are ends: nothing follows them."""

    CREATED = "created"
    RUNNING = "running"
    RESTARTING = "restarting"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    REMOVED = "removed"  # it has no containers any more, and no end on record
    UNREACHABLE = "unreachable"  # nodes that do not answer may still run it

    @property
    def ended(self) -> bool:
        return self in _EXIT_CODES

    @property
    def exit_code(self) -> int:
        """Of a command that waited for this end."""
        return _EXIT_CODES.get(self, 0)


_EXIT_CODES = {RunState.DONE: 0, RunState.FAILED: 1, RunState.LOST: 3, RunState.STOPPED: 5}


def state_of(
    containers: Iterable[ContainerState],
    nodes: int,
    *,
    min_nodes: int = 0,
    silent: int = 0,
    gone: int = 0,
    incomplete: bool = False,
    stopped: bool = False,
    recorded: RunState | None = None,
) -> RunState:
    """Whether and how a run has ended. The only place where this is decided.

    containers: those that `nodes` nodes still have. min_nodes: it can go on with so many; 0: all are needed. silent:
    nodes that do not answer now. gone: nodes that were seen to lose their container. incomplete: the nodes have ended,
    and not all of their files could be collected. stopped: by a user. recorded: its end in result.json.
    """
    states = list(containers)
    phases = {state.phase for state in states}
    if going_on := _going_on(phases):
        return going_on
    if recorded is not None:
        return recorded
    may_lose = nodes - min_nodes if min_nodes else 0
    if stopped:
        return RunState.STOPPED
    if may_lose and any(state.exit_code == 0 for state in states):
        return RunState.DONE
    if gone > may_lose or any(state.exit_code not in (0, None) for state in states):
        return RunState.FAILED
    if silent > may_lose:
        return RunState.UNREACHABLE
    if not states:
        return RunState.REMOVED
    return RunState.LOST if incomplete or len(states) < nodes else RunState.DONE


def recorded_end(result: Mapping[str, Any] | None) -> RunState | None:
    """From result.json; None where it has none."""
    words = (result or {}).get("state")
    return RunState(words) if words in set(RunState) else None


def _going_on(phases: set[Phase]) -> RunState | None:
    if Phase.RESTARTING in phases:
        return RunState.RESTARTING
    if phases & {Phase.RUNNING, Phase.PAUSED}:
        return RunState.RUNNING
    return RunState.CREATED if Phase.CREATED in phases else None
