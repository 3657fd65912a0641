"""What an image is built from, and the name that follows from it: the same inputs always have the same name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.image import assets, labels
from launcher.image.decide import Decision, Method
from launcher.image.reference import OURS

CONTEXT = ("Dockerfile", "install.sh")  # of images/, besides what the recipe writes itself


@dataclass(frozen=True)
class Recipe:
    """Everything that goes into an image. How the package index is reached does not count for its name."""

    base_id: str
    step: str  # words for `install.sh torchvision`
    packages: tuple[str, ...]
    user: str  # what the base runs as
    index: tuple[tuple[str, str], ...] = ()  # pip's settings of the caller, by variable
    authority: str = ""  # certificates that pip needs, PEM

    @property
    def digest(self) -> str:
        """24 hex digits over every input that decides what is in the image, our own files included."""
        parts = [self.base_id, self.step, self.packages, self.user]
        files = [assets.text(name) for name in CONTEXT]
        return hashlib.sha256(json.dumps([parts, files]).encode()).hexdigest()[:24]

    @property
    def requirements(self) -> str:
        """requirements.txt of the build."""
        return "".join(f"{line}\n" for line in self.packages)

    @property
    def changes_nothing(self) -> bool:
        return self.step == Method.KEEP.value and not self.packages

    def tag(self, job: str) -> str:
        """`launcher/<job>:<digest>`."""
        return f"{OURS}{job}:{self.digest}"

    def files(self) -> Mapping[str, str]:
        """The build context by file name."""
        context = {name: assets.text(name) for name in CONTEXT}
        context["requirements.txt"] = self.requirements
        if self.authority:
            context["ca.crt"] = self.authority
        return context

    def arguments(self, base: str) -> dict[str, str]:
        """The build arguments; `base` is what the builder's own store calls the base."""
        return {
            "BASE_IMAGE": base,
            "TORCHVISION": self.step,
            "RUN_USER": self.user or "root",
            **dict(self.index),
        }


def labels_of(
    recipe: Recipe, job: str, base: str, base_digest: str, torch: str, torchvision: str, decision: Decision
) -> dict[str, str]:
    """What the built image says of itself. `torchvision`: what the base has, for images whose torchvision stays."""
    found = {
        labels.MADE: recipe.digest,
        labels.JOB: job,
        labels.TORCH: torch,
        labels.TORCHVISION: decision.version or torchvision,
        labels.STEP: decision.step,
        labels.WHY: decision.why,
        labels.BASE_ID: recipe.base_id,
        labels.OCI_BASE_NAME: base,
        labels.OCI_BASE_DIGEST: base_digest,
        labels.OCI_TITLE: f"launcher image of job {job}",
    }
    return {key: value for key, value in found.items() if value}
