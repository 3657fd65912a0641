"""The names of images: their parts, and whether a registry could know them."""

from __future__ import annotations

import re
from dataclasses import dataclass

OURS = "launcher/"  # what we build is named launcher/<job>:<digest>; no registry has it
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
        """The same image pinned by digest."""
        return f"{self.repository}@{digest}"


def parse(text: str) -> Reference | None:
    """The parts of a reference; None for an image id and for what is no reference at all."""
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
    """Whether it is worth asking a registry: a reference, and not of a name that only we give."""
    found = parse(text)
    return found is not None and not (not found.registry and found.name.startswith(OURS))
