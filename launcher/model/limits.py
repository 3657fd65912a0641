"""Limits for responses of nodes. The settings file can raise them (job/settings.py, not loaded by most commands)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.model.home import config_folder


@dataclass(frozen=True)
class AnswerLimits:
    """Limits for the output of a command or a response of a container engine; not for image transfers."""

    size: int = 64 << 20  # bytes
    seconds: float = 60.0  # default if the caller sets no timeout


DEFAULT_LIMITS = AnswerLimits()


def settings_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the settings file. Raises UsageError if no home folder is known."""
    return config_folder(environ) / "settings.yaml"
