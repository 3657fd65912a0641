"""Look up which torchvision matches a torch, and the contents of NVIDIA's releases, in the tables of images/."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache

from launcher.image.names import asset

# A published release: 2.6.0, 2.6.0+cu124, 2.6.0+cpu. Every other version was built from a snapshot.
_PUBLISHED = re.compile(r"\d+\.\d+\.\d+(?:\.post\d+)?(?:\+(cpu|cu\d+|rocm[\d.]+|xpu))?")
_NUMBERS = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
VGG_ADAPTIVE = (0, 2, 2)  # first torchvision with a VGG for images smaller than 224 (pytorch/vision PR 747)
PURE_PYTHON = "0.2.2.post3"  # newest torchvision without compiled operators: works with any torch


def numbers(version: str) -> tuple[int, int, int] | None:
    """Return (major, minor, patch) from the start of a version such as 2.6.0a0+ecf3bae40a.nv25.01 or 1.1.0commit."""
    found = _NUMBERS.match(version.strip())
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


def published(torch: str) -> bool:
    """Whether this is a release from pytorch.org or PyPI, with matching torchvision wheels."""
    return _PUBLISHED.fullmatch(torch.strip()) is not None


def variant(torch: str) -> str:
    """Return `cpu`, `cu124`, ... of a published torch; "" if its version has no such suffix."""
    found = _PUBLISHED.fullmatch(torch.strip())
    return (found[1] or "") if found else ""


def torchvision_for(torch: str) -> str | None:
    """Return the torchvision release X.Y.Z that matches a torch version; None for an unrecognised version.

    A published patch release has its own row, every other version is matched by its minor version. 1.14 became 2.0.
    Beyond the table: torch 2.N has been paired with torchvision 0.(N + 15) since 2.0.
    """
    wanted = numbers(torch)
    if wanted is None:
        return None
    if wanted[:2] == (1, 14):
        wanted = (2, 0, 0)
    patches = _official("patch")
    if published(torch) and wanted in patches:
        return patches[wanted]
    if wanted[:2] <= (1, 0):
        return PURE_PYTHON
    minor = _official("minor").get((*wanted[:2], 0))
    if minor is not None:
        return minor if minor.count(".") == 2 else f"{minor}.0"
    same_minor = [patches[row] for row in sorted(patches) if row[:2] == wanted[:2]]
    if same_minor:
        return same_minor[0]
    return f"0.{wanted[1] + 15}.0" if wanted[0] == 2 else None


def belong_together(torch: str, torchvision: str) -> bool | None:
    """Whether the minor versions are an official pair; None if unknown."""
    official, installed = torchvision_for(torch), numbers(torchvision)
    if official is None or installed is None:
        return None
    wanted = numbers(official)
    return wanted is not None and wanted[:2] == installed[:2]


@dataclass(frozen=True)
class Release:
    """One of NVIDIA's monthly images; "" for versions that are not documented."""

    tag: str
    ubuntu: str
    python: str
    cuda: str
    cudnn: str
    nccl: str
    torch: str
    torchvision: str
    pair: str  # torchvision's official minor for its torch
    driver: str  # quoted from the release notes
    grade: str
    notes: str
    source: str

    @property
    def mismatch(self) -> str:
        """Description of a torchvision that is not the official pair: a note, not a fault."""
        if not self.torch or not self.torchvision or belong_together(self.torch, self.torchvision) is not False:
            return ""
        return f"torchvision {self.torchvision}, official for torch {'.'.join(self.torch.split('.')[:2])}: {self.pair}"


@cache
def releases() -> tuple[Release, ...]:
    """Return every documented release, oldest first."""
    return tuple(Release(**row) for row in _rows("ngc.csv"))


def release(tag: str) -> Release | None:
    """Return a release by tag, with or without `-py3` and the repository."""
    month = tag.partition("@")[0].rpartition(":")[2].removesuffix("-py3")
    return next((row for row in releases() if row.tag.removesuffix("-py3") == month), None)


def _rows(name: str) -> list[dict[str, str]]:
    lines = [line for line in asset(name).splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


@cache
def _official(level: str) -> dict[tuple[int, int, int], str]:
    """Return torchvision by torch, from the `patch` or `minor` rows; the newer if a row lists two."""
    rows = ((row["torch"], row["torchvision"]) for row in _rows("torchvision.csv") if row["level"] == level)
    pairs = ((numbers(torch), torchvision) for torch, torchvision in rows if not torch.startswith("<"))
    return {torch: torchvision.split("/")[-1].strip() for torch, torchvision in pairs if torch is not None}
