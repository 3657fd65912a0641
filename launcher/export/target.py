"""A target of `launcher export`: what it makes of each key of the job file, and the function that returns its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from launcher.job.models import Job
from launcher.planning.cluster import Refused


@dataclass(frozen=True)
class Keys:
    """Every key of the job file, as docker.ipc, in one of three places; tests/unit/test_targets.py tries each."""

    handled: str  # separated by spaces. They change the text; single values may be refused
    refused: Mapping[str, str]  # key -> why; "" if the target's own check says it, which knows other keys too
    unused: Mapping[str, str]  # key -> why the text does not depend on it

    def all(self) -> list[str]:
        return [*self.handled.split(), *self.refused, *self.unused]

    def refusals(self, job: Job) -> Refused:
        """Yield the refused keys to which the job gives another value than the default."""
        for key, why in self.refused.items():
            part, _, name = key.rpartition(".")
            value = getattr(job, part) if part else job
            default = type(value).model_fields[name].get_default(call_default_factory=True) if why else None
            if why and getattr(value, name) != default:
                yield (*key.split("."),), f"{why}: remove it"


@dataclass(frozen=True)
class Target:
    """text(job, cluster, image): raises JobInvalid, UsageError. cluster: of the settings file. image: has the code."""

    keys: Keys
    text: Callable[[Job, str | None, str | None], str]
