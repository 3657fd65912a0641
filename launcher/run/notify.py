"""Notify when a run has ended, by a command or a webhook from the user's settings file.

Job files cannot set these: a job file may be untrusted, and the command runs on the caller's machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException

from launcher.job.settings import Notify
from launcher.node.parallel import in_background

LIMIT = 15.0  # seconds for the command and the webhook together; a server may send a byte a second
COMMAND_LIMIT = 14.0  # then the command is killed, while somebody still waits for it


@dataclass(frozen=True)
class Notice:
    """How a run ended. Excludes its output, which may contain anything."""

    run: str
    state: str
    exit_code: int
    text: str  # one line to display; chat webhooks show this key


def send(notify: Notify, notice: Notice) -> list[str]:
    """Send the notice, for at most LIMIT; return a line per error, whatever it is, which also says what went well."""
    body = json.dumps(vars(notice)).encode()
    ways: dict[str, Callable[[], str]] = {}
    if notify.command:
        ways[f"notify.command {notify.command[0]}"] = partial(_call, notify.command, notice, body)
    if notify.webhook:
        ways["notify.webhook"] = partial(_post, notify.webhook, body)
    sent = {name: in_background(way) for name, way in ways.items()}
    until = time.monotonic() + LIMIT
    problems = {}
    for name, job in sent.items():
        done = job.wait(max(0.0, until - time.monotonic()))
        problems[name] = job() if done else f"timed out after {LIMIT:g} s"
    well = "".join(f"; {name} succeeded" for name, problem in problems.items() if not problem)
    return [f"{name}: {problem}{well}" for name, problem in problems.items() if problem]


def _call(command: tuple[str, ...], notice: Notice, body: bytes) -> str:
    env = {**os.environ, "LAUNCHER_RUN": notice.run, "LAUNCHER_STATE": notice.state}
    try:
        done = subprocess.run(command, input=body, capture_output=True, timeout=COMMAND_LIMIT, check=False, env=env)
    except subprocess.TimeoutExpired:
        return f"timed out after {COMMAND_LIMIT:g} s"
    except Exception as error:  # noqa: BLE001 - said; a NUL in the command is a ValueError
        return str(error)
    output = (done.stderr or done.stdout).decode(errors="replace").strip()[-300:]
    return ": ".join(filter(None, (f"exit code {done.returncode}", output))) if done.returncode else ""


def _post(address: str, body: bytes) -> str:
    """Return what is wrong, without the address, which may contain a token."""
    try:
        request = urllib.request.Request(  # noqa: S310 - http and https only: the settings' pattern
            address, data=body, headers={"Content-Type": "application/json", "User-Agent": "launcher"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=LIMIT):  # noqa: S310
            return ""
    except urllib.error.HTTPError as error:
        return f"HTTP status {error.code}"
    except ValueError as error:
        return f"not a valid URL ({type(error).__name__})"
    except HTTPException as error:
        return f"its answer is not valid HTTP ({type(error).__name__})"
    except OSError as error:
        return str(getattr(error, "reason", error))
    except Exception as error:  # noqa: BLE001 - said
        return f"could not be sent ({type(error).__name__})"
