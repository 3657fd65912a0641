"""The caller's home folder, and the caller's own folders below it (XDG Base Directory Specification)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from launcher.errors import UsageError

CURE = "set HOME to your home folder: export HOME=/home/you"


def home(environ: Mapping[str, str]) -> Path:
    """$HOME; where it is not set, what the password database says, as for OpenSSH. Raises UsageError."""
    if "HOME" not in environ:
        try:
            return Path.home()
        except RuntimeError:  # this user id has no entry there
            raise UsageError("HOME", wrong_home(""), CURE) from None
    if wrong := wrong_home(environ["HOME"]):
        raise UsageError("HOME", wrong, CURE)
    return Path(environ["HOME"])


def wrong_home(found: str) -> str:
    """What is wrong with a value of HOME; "" where it can be used."""
    if found.startswith("/") and found.isprintable() and not {".", ".."} & set(found.split("/")):
        return ""
    return f"HOME is {repr(found[:200]) if found else 'empty or not set'}; expected an absolute path"


def config_folder(environ: Mapping[str, str]) -> Path:
    """$XDG_CONFIG_HOME/launcher, by default ~/.config/launcher. Raises UsageError."""
    return _folder(environ, "XDG_CONFIG_HOME", ".config")


def cache_folder(environ: Mapping[str, str]) -> Path:
    """$XDG_CACHE_HOME/launcher, by default ~/.cache/launcher. Raises UsageError."""
    return _folder(environ, "XDG_CACHE_HOME", ".cache")


def _folder(environ: Mapping[str, str], variable: str, default: str) -> Path:
    """By the specification a relative path is ignored."""
    base = environ.get(variable, "")
    return (Path(base) if base.startswith("/") else home(environ) / default) / "launcher"
