"""Image references and their parts, labels of built images, and build files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from launcher.shipped import shipped

# Image labels. Containers inherit them, so they must differ from those in launcher.model.labels.
RECIPE = "launcher.image.recipe"  # Repair.digest; marks images built by the launcher
JOB = "launcher.image.job"
TORCH = "launcher.image.torch"
TORCHVISION = "launcher.image.torchvision"
STEP = "launcher.image.step"
WHY = "launcher.image.why"
BASE_ID = "launcher.image.base-id"
PARTIAL = "launcher.image.partial"  # set by images/pack.py: ID of the image that this partial image belongs to
OCI_BASE_NAME = "org.opencontainers.image.base.name"
OCI_BASE_DIGEST = "org.opencontainers.image.base.digest"
OCI_TITLE = "org.opencontainers.image.title"

OURS = "launcher/"  # built images are named launcher/<job>:<digest>; they are in no registry
_ID = re.compile(r"(sha256:)?[0-9a-f]{64}|[0-9a-f]{12}")
_NAME = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Reference:
    """`[registry/]name[:tag][@digest]`."""

    registry: str  # host[:port]; "" for Docker Hub
    name: str
    tag: str
    digest: str

    @property
    def repository(self) -> str:
        return f"{self.registry}/{self.name}" if self.registry else self.name

    def at(self, digest: str) -> str:
        """Return the reference pinned by digest."""
        return f"{self.repository}@{digest}"


def parse(text: str) -> Reference | None:
    """Parse a reference; return None for an image ID or an invalid reference."""
    if _ID.fullmatch(text):
        return None
    rest, _, digest = text.partition("@")
    if digest and not _DIGEST.fullmatch(digest):
        return None
    head, slash, tail = rest.partition("/")
    registry = head if slash and ("." in head or ":" in head or head == "localhost") else ""
    path = tail if registry else rest
    name, _, tag = path.partition(":")
    if not _NAME.fullmatch(name) or (tag and not _TAG.fullmatch(tag)):
        return None
    return Reference(registry, name, tag, digest)


def in_registry(text: str) -> bool:
    """Whether this can be an image in a registry: a valid reference that is not the name of a built image."""
    found = parse(text)
    return found is not None and not (not found.registry and found.name.startswith(OURS))


@cache
def asset(name: str) -> str:
    """Return the text of `images/NAME`, from a checkout or from the installed wheel."""
    return (shipped("images") / name).read_text(encoding="utf-8")
