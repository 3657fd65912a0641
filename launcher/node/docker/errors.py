"""What an engine's failure means for a person: our error, which node, the fix. Matches Docker's own messages."""

from __future__ import annotations

import http.client
import re

import docker.errors
import requests
import urllib3.exceptions

from launcher.errors import EngineFailed, EngineForbidden, EngineUnavailable, LauncherError, NameTaken, NodeUnfit
from launcher.node.docker.channel import DialFailed
from launcher.node.docker.toolkit import gpu_error

# what reading a malformed answer raises
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
_NO_COMMAND = re.compile(r"not found|no such file or directory: .*docker|unknown command|not a docker command", re.I)


def unwrap_sdk_error(error: Exception) -> Exception:
    """What docker-py, requests and urllib3 have wrapped up, as one of the kinds that explain() knows."""
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
            return ValueError(f"no HTTP: {cause!r}")
    return ConnectionError(str(error))


def is_lost(error: BaseException) -> bool:
    """The connection broke under the request: asking again on a new one may work."""
    return isinstance(error, ConnectionError) and not isinstance(error, _NO_ENGINE)


def explain(node: str, user: str, doing: str, error: Exception) -> LauncherError:
    """Our error for one that was unwrapped; `doing` completes "could not ..."."""
    if isinstance(error, LauncherError):
        return error
    if isinstance(error, _NO_ENGINE):
        return _no_engine(node, user, error)
    if isinstance(error, docker.errors.APIError):
        return _refused(node, doing, error)
    if isinstance(error, _MALFORMED):
        what = f"could not {doing}: unexpected response from the Docker API ({type(error).__name__}: {error})"
        fix = "is it Docker's own engine, without a proxy in between? on the node: docker version"
        return EngineFailed(node, what, fix)
    if isinstance(error, docker.errors.DockerException):
        return EngineFailed(node, f"could not {doing}: {error}")
    if isinstance(error, TimeoutError):
        what = f"its container engine gave no answer: could not {doing}"
        return EngineUnavailable(node, what, "is the node overloaded, or its disk full?")
    what = f"could not {doing}: the connection to its container engine broke ({error})"
    return EngineUnavailable(node, what, "try again; is dockerd up?")


def _causes(error: BaseException) -> list[BaseException]:
    """And the error itself. requests and urllib3 put a cause into args, reason or __context__."""
    found = [error]
    for one in found:  # grows meanwhile
        inner = (one.__cause__, one.__context__, getattr(one, "reason", None), *one.args)
        found += [item for item in inner if isinstance(item, BaseException) and item not in found]
    return found


def _no_engine(node: str, user: str, error: OSError) -> LauncherError:
    words = str(error)
    if _FORBIDDEN.search(words):
        fix = f"on the node: sudo usermod -aG docker {user}; it counts from the next login on"
        return EngineForbidden(node, f"user {user} may not use its container engine ({words})", fix)
    no_command = isinstance(error, DialFailed) and (error.code == 127 or _NO_COMMAND.search(words))
    if no_command and not _ABSENT.search(words):
        fix = "install Docker Engine 20.10 or newer, so that `docker version` works over ssh"
        return EngineUnavailable(node, f"no usable docker command there ({words or 'exit code 127'})", fix)
    what = f"its container engine does not answer ({words or 'no reason given'})"
    return EngineUnavailable(node, what, "on the node: sudo systemctl start docker")


def _refused(node: str, doing: str, error: docker.errors.APIError) -> LauncherError:
    words = str(error.explanation or error).strip()
    if "container name" in words and "already in use" in words:  # status 409, of podman 4 500
        return NameTaken(node, f"could not {doing}: {words}", "see what it is: launcher status")
    source = re.search(r"bind source path does not exist: (.+)", words)
    if source:
        return NodeUnfit(node, f"the mount's source {source.group(1)} is not there", "make it, or change `mounts`")
    if isinstance(error, docker.errors.NotFound) and "No such image" in words:
        return NodeUnfit(node, f"it has no such image: {words}", "ship it: launcher image ship")
    if found := gpu_error(words):
        return NodeUnfit(node, f"{found[0]}: {words}", found[1])
    if "no space left on device" in words.lower():
        return NodeUnfit(node, f"its disk is full: {words}", "make room: launcher clean, docker system df")
    return EngineFailed(node, f"could not {doing}: {words}")
