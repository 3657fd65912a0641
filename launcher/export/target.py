"""A target of `launcher export`: what it makes of each key of the job file, and the function that returns its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from launcher.job.models import Job


@dataclass(frozen=True)
class Keys:
    """Every key of the job file, as docker.ipc, in one of three places; tests/unit/test_targets.py tries each."""

    handled: str  # separated by spaces. They change the text; single values may be refused
    refused: str
    unused: Mapping[str, str]  # key -> why the text does not depend on it

    def all(self) -> list[str]:
        return [*self.handled.split(), *self.refused.split(), *self.unused]


@dataclass(frozen=True)
class Target:
    """text(job, cluster, image): raises JobInvalid, UsageError. cluster: of the settings file. image: has the code."""

    keys: Keys
    text: Callable[[Job, str | None, str | None], str]
