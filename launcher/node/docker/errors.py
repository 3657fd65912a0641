"""Translates errors of an engine into LauncherErrors with node and fix. Matches Docker's own messages."""

from __future__ import annotations

import http.client
import re

import docker.errors
import requests
import urllib3.exceptions

from launcher.errors import EngineFailed, EngineForbidden, EngineUnavailable, LauncherError, NameTaken, NodeUnfit
from launcher.faults import disk
from launcher.faults.lookup import cause_of_report
from launcher.faults.table import ENGINE
from launcher.node.docker.channel import DialFailed

# raised while a malformed response is read
_MALFORMED = (
    *(docker.errors.StreamParseError, LookupError, TypeError, ValueError),
    *(AttributeError, OverflowError, RecursionError),
)
SDK_ERRORS = (
    *(docker.errors.DockerException, requests.RequestException, urllib3.exceptions.HTTPError),
    *(OSError, EOFError, *_MALFORMED),
)
_NO_ENGINE = (DialFailed, PermissionError, FileNotFoundError, ConnectionRefusedError)
_TIMEOUTS = (TimeoutError, requests.Timeout, urllib3.exceptions.TimeoutError, urllib3.exceptions.EmptyPoolError)
_CUT = (ConnectionError, http.client.IncompleteRead)
_FORBIDDEN = re.compile(r"permission denied|operation not permitted", re.IGNORECASE)
_ABSENT = re.compile(r"cannot connect|connection refused|no such file|is the docker daemon running", re.IGNORECASE)
_NOT_RUN = (126, 127)  # exit codes of a shell that cannot run a command
_NO_COMMAND = re.compile(
    r"command not found|no such file or directory: .*docker|(unknown|unrecognized) command|not a docker command", re.I
)
_ELSEWHERE = re.compile(
    r"\bcontext not found|\btcp://|/desktop/docker|\bunix://(?!(/var)?/run/(user/\d+/)?(docker|podman/podman)\.sock\b)"
)


def unwrap_sdk_error(error: Exception) -> Exception:
    """Return the cause wrapped by docker-py, requests or urllib3, as a type that explain() handles."""
    if isinstance(error, _MALFORMED):
        return error
    causes = _causes(error)
    for cause in causes:
        if isinstance(cause, (LauncherError, docker.errors.APIError, *_NO_ENGINE)):
            return cause
    if any(isinstance(cause, _TIMEOUTS) for cause in causes):
        return TimeoutError(str(error))
    if isinstance(error, docker.errors.DockerException):
        return error
    for cause in causes:
        if isinstance(cause, http.client.HTTPException) and not isinstance(cause, _CUT):
            return ValueError(f"not HTTP: {cause!r}")
    return ConnectionError(str(error))


def is_lost(error: BaseException) -> bool:
    """Whether the connection broke during the request: a retry on a new one may succeed."""
    return isinstance(error, ConnectionError) and not isinstance(error, _NO_ENGINE)


def explain(node: str, user: str, doing: str, error: Exception) -> LauncherError:
    """Return the LauncherError for an unwrapped error. `doing` completes "could not ..."."""
    if isinstance(error, LauncherError):
        return error
    if isinstance(error, _NO_ENGINE):
        return _no_engine(node, user, error)
    if isinstance(error, docker.errors.APIError):
        return _refused(node, doing, error)
    if isinstance(error, _MALFORMED):
        what = f"could not {doing}: unexpected response from the Docker API ({type(error).__name__}: {error})"
        fix = "check that it is a Docker engine, without a proxy in between; on the node: docker version"
        return EngineFailed(node, what, fix)
    if isinstance(error, docker.errors.DockerException):
        return EngineFailed(node, f"could not {doing}: {error}")
    if isinstance(error, TimeoutError):
        what = f"its container engine did not respond: could not {doing}"
        return EngineUnavailable(node, what, "check whether the node is overloaded or its disk full")
    what = f"could not {doing}: the connection to its container engine broke ({error})"
    return EngineUnavailable(node, what, "try again; if it persists, on the node: systemctl status docker")


def _causes(error: BaseException) -> list[BaseException]:
    """Return the error and its causes. requests and urllib3 put a cause into args, reason or __context__."""
    found = [error]
    for each in found:  # grows during iteration
        inner = (each.__cause__, each.__context__, getattr(each, "reason", None), *each.args)
        found += [item for item in inner if isinstance(item, BaseException) and item not in found]
    return found


def _no_engine(node: str, user: str, error: OSError) -> LauncherError:
    lines = str(error).splitlines()
    text = "\n".join(line for line in lines if not line.startswith("WARNING: ")) or str(error)  # of its own config
    code = error.code if isinstance(error, DialFailed) else None
    no_command = code in _NOT_RUN or (code is not None and _NO_COMMAND.search(text))
    if _FORBIDDEN.search(text) and not no_command:
        fix = f"on the node: sudo usermod -aG docker {user}; it takes effect at the next login"
        return EngineForbidden(node, f"user {user} may not use its container engine ({text})", fix)
    if no_command and (code in _NOT_RUN or not _ABSENT.search(text)):
        fix = "install Docker Engine 20.10 or newer; `docker version` must work over ssh"
        return EngineUnavailable(node, f"no usable docker command ({text or f'exit code {code}'})", fix)
    what = f"its container engine does not answer ({text or 'no reason given'})"
    return EngineUnavailable(node, what, f"on the node: {_start(text)}")


def _start(text: str) -> str:
    """Return how the engine is started that docker's message names: rootless, podman's, or elsewhere."""
    if _ELSEWHERE.search(text):
        return "`docker context ls` and DOCKER_HOST name the engine that is asked: correct them, or start that one"
    user = "systemctl --user" if "/run/user/" in text else "sudo systemctl"
    return f"{user} start {'podman.socket' if 'podman.sock' in text else 'docker'}"


def _refused(node: str, doing: str, error: docker.errors.APIError) -> LauncherError:
    text = str(error.explanation or error).strip()
    if "container name" in text and "already in use" in text:  # status 409; podman 4: 500
        return NameTaken(node, f"could not {doing}: {text}", "find its run with: launcher status")
    if found := cause_of_report(ENGINE, text):
        return NodeUnfit(node, f"{found.what}: {text}", found.fix)
    source = re.search(r"bind source path does not exist: (.+)", text)
    if source:
        return NodeUnfit(node, f"mount source {source.group(1)} does not exist", "create it, or change `mounts`")
    if isinstance(error, docker.errors.NotFound) and "No such image" in text:
        return NodeUnfit(node, f"the image is missing: {text}", "copy it to the node: launcher image ship")
    if disk.is_full(text):
        found = disk.full(disk.ENGINE)
        fix = f"{found.fix}, `docker system df` shows the rest"
        return NodeUnfit(node, f"{found.what}: could not {doing}", fix)
    return EngineFailed(node, f"could not {doing}: {text}")
