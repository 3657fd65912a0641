"""Notify when a run has ended, by a command or a webhook from the user's settings file.

Job files cannot set these: a job file may be untrusted, and the command runs on the caller's machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from dataclasses import dataclass

from launcher.job.settings import Notify

LIMIT = 15.0  # seconds for a command or a webhook


@dataclass(frozen=True)
class Notice:
    """How a run ended. Excludes its output, which may contain anything."""

    run: str
    state: str
    exit_code: int
    text: str  # one line to display; chat webhooks show this key


def send(notify: Notify, notice: Notice) -> list[str]:
    """Send the notice; return a line per error. Errors do not affect the outcome of the run."""
    body = json.dumps(vars(notice)).encode()
    problems = []
    if notify.command and (problem := _call(notify.command, notice, body)):
        problems.append(f"notify.command {notify.command[0]}: {problem}")
    if notify.webhook and (problem := _post(notify.webhook, body)):
        problems.append(f"notify.webhook: {problem}")  # the URL may contain a token, so it is not shown
    return problems


def _call(command: tuple[str, ...], notice: Notice, body: bytes) -> str:
    env = {**os.environ, "LAUNCHER_RUN": notice.run, "LAUNCHER_STATE": notice.state}
    try:
        done = subprocess.run(command, input=body, capture_output=True, timeout=LIMIT, check=False, env=env)
    except subprocess.TimeoutExpired:
        return f"timed out after {LIMIT:g} s"
    except OSError as error:
        return str(error)
    output = (done.stderr or done.stdout).decode(errors="replace").strip()[-300:]
    return f"exit code {done.returncode}: {output}" if done.returncode else ""


def _post(address: str, body: bytes) -> str:
    request = urllib.request.Request(  # noqa: S310 - http and https only: the settings' pattern
        address, data=body, headers={"Content-Type": "application/json", "User-Agent": "launcher"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT):  # noqa: S310
            return ""
    except urllib.error.HTTPError as error:
        return f"HTTP status {error.code}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
