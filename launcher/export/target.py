"""A target of `launcher export`: what it makes of each key of the job file, and the function that returns its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from launcher.job.models import Job
from launcher.planning.cluster import Refused


@dataclass(frozen=True)
class Keys:
    """Every key of the job file, as docker.ipc, in one of four places; tests/unit/test_targets.py tries each."""

    handled: str  # separated by spaces. They change the text; single values may be refused
    refused: Mapping[str, str]  # key -> why
    refused_by: Mapping[Callable[..., object], str]  # check -> the keys for which it says why
    unused: Mapping[str, str]  # key -> why the text does not depend on it

    def __post_init__(self) -> None:
        if missing := [key for key, why in (*self.refused.items(), *self.unused.items()) if not why]:
            raise ValueError(f"no reason is given for {', '.join(missing)}")

    def all(self) -> list[str]:
        return [*self.handled.split(), *self.refused, *" ".join(self.refused_by.values()).split(), *self.unused]

    def refusals(self, job: Job) -> Refused:
        """Yield the keys with a reason to which the job, or one of its nodes or secrets, gives another value."""
        for key, why in self.refused.items():
            of, _, name = key.rpartition(".")
            found = getattr(job, of) if of else job
            parts = found if isinstance(found, tuple) else () if found is None else (found,)
            if any(_is_set(part, name) for part in parts):
                yield (*key.split("."),), f"{why}: remove it"


def _is_set(part: BaseModel, name: str) -> bool:
    default: object = type(part).model_fields[name].get_default(call_default_factory=True)
    return bool(getattr(part, name) != default)


@dataclass(frozen=True)
class Target:
    """text(job, cluster, image): raises JobInvalid, UsageError. cluster: of the settings file. image: has the code."""

    keys: Keys
    text: Callable[[Job, str | None, str | None], str]
