"""A notice when a run has ended: by a command or a webhook of the user's own settings file, never of a job file.

A job file may come from a stranger; what runs on the caller's machine may not.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from launcher.errors import UsageError

LIMIT = 15.0  # seconds for a command or a webhook
_CONFIG = ConfigDict(extra="forbid", strict=True, defer_build=True)  # most users have no such file: it costs nothing
_FOR_ALL = stat.S_IWGRP | stat.S_IWOTH


class Notify(BaseModel):
    """`notify:` of the settings file; each of the two may be left out."""

    model_config = _CONFIG

    command: tuple[str, ...] = Field(default=(), strict=False)  # argv; the notice is JSON on its stdin
    webhook: str = Field(default="", pattern="^(https?://.+)?$")  # gets the notice as a POST


class Settings(BaseModel):
    """The whole settings file."""

    model_config = _CONFIG

    notify: Notify = Field(default_factory=Notify.model_construct)


@dataclass(frozen=True)
class Notice:
    """How a run ended, without its output, which may hold anything."""

    run: str
    state: str
    exit_code: int
    text: str  # one line for a person; the key that chat webhooks show


def notify_settings(environ: Mapping[str, str]) -> Notify:
    """From `launcher/settings.yaml` of the user's configuration folder (XDG Base Directory Specification), if any.

    Raises UsageError for a file that is wrong, or that others may write.
    """
    file = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "launcher", "settings.yaml")
    try:
        status, text = file.stat(), file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Notify.model_construct()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(str(file), f"cannot be read: {error}", "correct it, or remove it") from error
    if status.st_mode & _FOR_ALL or status.st_uid not in (os.geteuid(), 0):
        raise UsageError(str(file), "others may change it, and it names a command", f"chmod 600 {file}")
    try:
        return Settings.model_validate(yaml.safe_load(text) or {}).notify
    except yaml.YAMLError as error:
        raise UsageError(str(file), f"is not YAML: {error}", "correct it, or remove it") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{file}: {place}", first["msg"], "it knows notify.command and notify.webhook") from error


def send(notify: Notify, notice: Notice) -> list[str]:
    """What went wrong, a line each. That a notice cannot be sent changes nothing of the run's end."""
    body = json.dumps(vars(notice)).encode()
    problems = []
    if notify.command and (problem := _call(notify.command, notice, body)):
        problems.append(f"notify.command {notify.command[0]}: {problem}")
    if notify.webhook and (problem := _post(notify.webhook, body)):
        problems.append(f"notify.webhook: {problem}")  # its address may hold a token: not shown
    return problems


def _call(command: tuple[str, ...], notice: Notice, body: bytes) -> str:
    env = {**os.environ, "LAUNCHER_RUN": notice.run, "LAUNCHER_STATE": notice.state}
    try:
        done = subprocess.run(command, input=body, capture_output=True, timeout=LIMIT, check=False, env=env)
    except subprocess.TimeoutExpired:
        return f"did not end in {LIMIT:g} s"
    except OSError as error:
        return str(error)
    words = (done.stderr or done.stdout).decode(errors="replace").strip()[-300:]
    return f"exit code {done.returncode}: {words}" if done.returncode else ""


def _post(address: str, body: bytes) -> str:
    import urllib.error  # for the few who have a webhook, when a run has ended
    import urllib.request

    request = urllib.request.Request(  # noqa: S310 - http and https only: the settings' pattern
        address, data=body, headers={"Content-Type": "application/json", "User-Agent": "launcher"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT):  # noqa: S310
            return ""
    except urllib.error.HTTPError as error:
        return f"it answered {error.code}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
