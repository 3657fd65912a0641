"""Notify when a run has ended, by a command or a webhook from the user's settings file.

Job files cannot set these: a job file may be untrusted, and the command runs on the caller's machine.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException, RemoteDisconnected
from urllib.parse import urlsplit

from launcher.job.problems import printable
from launcher.job.settings import Notify
from launcher.model.limits import settings_file
from launcher.node.parallel import in_background

LIMIT = 15.0  # seconds for the command and the webhook together; a server may send a byte a second
KILLED = 1.0  # seconds more, in which a command that was killed ends

Problem = tuple[str, str]  # what is wrong, and how to mend it in the settings file; "", "": nothing is
_WELL = ("", "")


@dataclass(frozen=True)
class Notice:
    """How a run ended. Excludes its output, which may contain anything."""

    run: str
    state: str
    exit_code: int
    text: str  # one line to display; chat webhooks show this key


def send(notify: Notify, notice: Notice) -> list[str]:
    """Send the notice, for about LIMIT; return a line per error, whatever it is, which also says what went well."""
    body = json.dumps(vars(notice)).encode()
    ways: dict[str, Callable[[], Problem]] = {}
    if notify.command:
        ways[f"notify.command {notify.command[0]}"] = partial(_call, notify.command, notice, body)
    if notify.webhook:
        ways["notify.webhook"] = partial(_post, notify.webhook, body)
    sent = {name: in_background(way) for name, way in ways.items()}
    until = time.monotonic() + LIMIT + KILLED
    problems: dict[str, Problem] = {}
    for name, job in sent.items():
        done = job.wait(max(0.0, until - time.monotonic()))
        problems[name] = job() if done else (_timed_out(), "")
    well = "".join(f"; {name} succeeded" for name, (what, _) in problems.items() if not what)
    place = settings_file(os.environ)
    return [
        f"{name}: {what}{well}" + (f"\n  -> in {place}, {fix}" if fix else "")
        for name, (what, fix) in problems.items()
        if what
    ]


def _timed_out() -> str:
    return f"timed out after {LIMIT:g} s"


def _call(command: tuple[str, ...], notice: Notice, body: bytes) -> Problem:
    env = {**os.environ, "LAUNCHER_RUN": notice.run, "LAUNCHER_STATE": notice.state}
    argv = [os.path.expanduser(word) if word.startswith("~/") else word for word in command]  # noqa: PTH111 - may be no path
    try:
        with tempfile.TemporaryFile() as output:  # a pipe would end with what the command leaves in the background
            subprocess_of = partial(subprocess.run, stdout=output, stderr=output, timeout=LIMIT, check=False, env=env)
            done = subprocess_of(argv, input=body)
            output.seek(max(0, output.seek(0, os.SEEK_END) - 300))
            said = output.read().decode(errors="replace").strip()
    except subprocess.TimeoutExpired:
        return _timed_out(), ""
    except (FileNotFoundError, PermissionError) as error:
        return str(error), "correct notify.command"
    except Exception as error:  # noqa: BLE001 - said; a NUL in the command is a ValueError
        return str(error), ""
    return (": ".join(filter(None, (f"exit code {done.returncode}", said))), "") if done.returncode else _WELL


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without the notice: what redirects is an error with its status."""

    def redirect_request(self, *_: object) -> None:
        return None


def _post(address: str, body: bytes) -> Problem:
    """Return what is wrong, without the address, which may contain a token."""
    try:
        request = urllib.request.Request(  # noqa: S310 - http and https only: checked with the settings
            address, data=body, headers={"Content-Type": "application/json", "User-Agent": "launcher"}, method="POST"
        )
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=LIMIT):
            return _WELL
    except urllib.error.HTTPError as error:
        return _refused(error)
    except RemoteDisconnected:
        return "the server closed the connection without an answer", ""
    except HTTPException as error:
        return f"its answer is not valid HTTP ({type(error).__name__})", ""
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):  # of one read; a server may send a byte just before each
            return _timed_out(), ""
        unknown = isinstance(reason, (socket.gaierror, ConnectionRefusedError))
        return str(reason), "check the host and port of notify.webhook" if unknown else ""
    except Exception as error:  # noqa: BLE001 - said
        return f"could not be sent ({type(error).__name__})", ""


def _refused(error: urllib.error.HTTPError) -> Problem:
    what = f"HTTP status {error.code}"
    if error.code in (301, 302, 303, 307, 308):
        try:
            target = urlsplit(error.headers.get("Location", ""))
            place = f" to {printable(f'{target.scheme}://{target.hostname}')}" if target.hostname else ""
        except ValueError:
            place = ""
        return f"{what}: it redirects{place}, which is not followed", "set notify.webhook to where it redirects"
    gone = error.code in (400, 401, 403, 404, 405, 410)
    return what, "check the address in notify.webhook" if gone else ""
