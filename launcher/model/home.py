"""The caller's name, home, configuration and cache folders (XDG Base Directory Specification)."""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping
from pathlib import Path

from launcher.errors import UsageError

FIX = "set HOME to your home folder: export HOME=/home/you"


def home(environ: Mapping[str, str]) -> Path:
    """Return $HOME; if unset, the home folder in the password database, as OpenSSH does. Raises UsageError."""
    if "HOME" not in environ:
        try:
            return Path.home()
        except RuntimeError:  # no entry for this user id
            raise UsageError("HOME", wrong_home(""), FIX) from None
    if wrong := wrong_home(environ["HOME"]):
        raise UsageError("HOME", wrong, FIX)
    return Path(environ["HOME"])


def with_home(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with HOME, which services of systemd lack; unchanged if the home folder is unknown."""
    try:
        return {**environ, "HOME": str(home(environ))}
    except UsageError:
        return dict(environ)


def user_name() -> str:
    """Return the caller's name; the number of one without a name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def wrong_home(found: str) -> str:
    """Return why a value of HOME is invalid; "" if it is valid."""
    if found.startswith("/") and found.isprintable() and not {".", ".."} & set(found.split("/")):
        return ""
    return f"HOME is {repr(found[:200]) if found else 'empty or not set'}; expected an absolute path"


def config_folder(environ: Mapping[str, str]) -> Path:
    """Return $XDG_CONFIG_HOME/launcher; default: ~/.config/launcher. Raises UsageError."""
    return _folder(environ, "XDG_CONFIG_HOME", ".config")


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return $XDG_CACHE_HOME/launcher; default: ~/.cache/launcher. Raises UsageError."""
    return _folder(environ, "XDG_CACHE_HOME", ".cache")


def _folder(environ: Mapping[str, str], variable: str, default: str) -> Path:
    """The specification requires relative paths to be ignored."""
    base = environ.get(variable, "")
    return (Path(base) if base.startswith("/") else home(environ) / default) / "launcher"
