"""How a run ended, as result.json stores it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from launcher.model.plan import plain
from launcher.run.state import RunState


@dataclass(frozen=True)
class Failure:
    """Why a run failed. `words` is the failing rank's traceback or last lines."""

    node: str
    rank: int | None  # global rank of the worker; None: the node's container as a whole
    exit_code: int | None
    what: str
    cure: str  # the suggested fix; this name is the key in result.json
    words: str


@dataclass(frozen=True)
class NodeResult:
    """How a node ended; None: unknown."""

    node: str
    rank: int
    exit_code: int | None = None
    oom_killed: bool | None = None
    restarts: int | None = None
    restarted: tuple[str, ...] = ()  # why each restart was needed
    started: float | None = None
    finished: float | None = None
    victim: bool = False  # it ended because another node ended
    lost: str | None = None  # why it is missing: less is known of it


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: str
    state: RunState
    failure: Failure | None = None
    nodes: tuple[NodeResult, ...] = ()
    last: Mapping[str, Any] = field(default_factory=dict)  # see outcome.last_epoch
    stopped_by: str | None = None  # user@host of another terminal or machine that stopped it
    gradients: str = ""  # how they travelled between the nodes; "" if unknown
    apart: str = ""  # that its ranks did not train together
    resume: str | None = None  # after a failure that left a checkpoint: which one, and the command that continues it
    ended_by: str | None = None  # "budget": at the job's `budget`; None: otherwise

    @property
    def exit_code(self) -> int:
        """Exit code of a command that waited for the run."""
        return self.state.exit_code

    def to_dict(self) -> dict[str, Any]:
        return {**plain(self), "exit_code": self.exit_code}

    @classmethod
    def from_dict(cls, run: str, found: Mapping[str, Any]) -> Outcome:
        """Parse a record's result of this or an earlier version. Raises ValueError if its state is unknown."""
        nodes = (_known(NodeResult, node) for node in found.get("nodes", ()))
        return cls(
            run=run,
            state=RunState(found["state"]),
            failure=_known(Failure, found.get("failure", {})),
            nodes=tuple(node for node in nodes if node is not None),
            last=found.get("last", {}),
            stopped_by=found.get("stopped_by"),
            gradients=found.get("gradients", ""),
            apart=found.get("apart", ""),
            resume=found.get("resume"),
            ended_by=found.get("ended_by"),
        )


V = TypeVar("V", Failure, NodeResult)


def _known(kind: type[V], found: Mapping[str, Any]) -> V | None:
    """Build an object from the fields that this version knows; None if it needs others."""
    names = {each.name for each in fields(kind)}
    known = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items() if key in names}
    make: Callable[..., V] = kind
    return make(**known) if all(each.name in known for each in fields(kind) if each.default is MISSING) else None
