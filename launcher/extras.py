"""What is done at the end of a run beside its outcome and its clean-up: whatever error it has is a warning, no more."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from launcher.errors import LauncherError

T = TypeVar("T")
_LONGEST = 300  # characters of an unexpected error's text


def warn_on_error(failed: str, make: Callable[[], T], default: T, warn: Callable[[str], object]) -> T:
    """Return what `make` returns. On any error call `warn` with `failed: why` once, and return `default`.

    failed: what is missing then, as a sentence.
    """
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - said
        warn(f"{failed}: {in_words(error)}")
        return default


def in_words(error: Exception) -> str:
    """Return an error as text, one of a file access or a bug included."""
    if isinstance(error, LauncherError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"unexpected {type(error).__name__}: {str(error)[:_LONGEST]} ({Path(frame.filename).name}:{frame.lineno})"
