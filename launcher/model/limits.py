"""How much a node may answer; a user's settings file raises it (job/settings.py, which most commands need not load)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.model.home import config_folder


@dataclass(frozen=True)
class AnswerLimits:
    """Of a command's output, or of what a container engine says. Not for whole images."""

    size: int = 64 << 20  # bytes
    seconds: float = 60.0  # where the caller does not say how long it may take


DEFAULT_LIMITS = AnswerLimits()


def settings_file(environ: Mapping[str, str]) -> Path:
    """In the user's configuration folder. Raises UsageError where there is no home folder."""
    return config_folder(environ) / "settings.yaml"
