"""What an engine's failure means for a person: our error, which node, the cure. Reads the words that Docker uses."""

from __future__ import annotations

import re

from launcher.errors import EngineFailed, EngineForbidden, EngineUnavailable, LauncherError, NameTaken, NodeUnfit
from launcher.node.docker.api import Refused
from launcher.node.docker.dialstdio import DialFailed

FAILURES = (Refused, EOFError, OSError)
NONSENSE = (LookupError, TypeError, ValueError, AttributeError)  # what reading an answer of another shape raises
_LOST = (ConnectionError, EOFError)
NOBODY_THERE = (DialFailed, PermissionError, FileNotFoundError, ConnectionRefusedError)
_FORBIDDEN = re.compile(r"permission denied|operation not permitted", re.IGNORECASE)
_ABSENT = re.compile(r"cannot connect|connection refused|no such file|is the docker daemon running", re.IGNORECASE)
_NO_COMMAND = re.compile(r"not found|no such file or directory: .*docker|unknown command|not a docker command", re.I)


def is_lost(error: BaseException) -> bool:
    """The connection broke under the request: asking again on a new one may work."""
    return isinstance(error, _LOST) and not isinstance(error, NOBODY_THERE)


def explain(node: str, user: str, doing: str, error: BaseException) -> LauncherError:
    """Our error for it; `doing` completes "could not ..."."""
    if isinstance(error, LauncherError):
        return error
    if isinstance(error, DialFailed):
        return _engine(node, user, error.words, no_command=error.code == 127 or bool(_NO_COMMAND.search(error.words)))
    if isinstance(error, NOBODY_THERE):
        return _engine(node, user, str(error), no_command=False)
    if isinstance(error, Refused):
        return _refused(node, doing, error)
    if isinstance(error, TimeoutError):
        return EngineUnavailable(
            node, f"its container engine gave no answer: could not {doing}", "is the node overloaded, or its disk full?"
        )
    return EngineUnavailable(
        node, f"could not {doing}: the connection to its container engine broke ({error})", "try again; is dockerd up?"
    )


def nonsense(node: str, doing: str, error: BaseException) -> EngineFailed:
    """Our error for an answer that is none of the Engine API's."""
    return EngineFailed(
        node,
        f"could not {doing}: its engine's answer makes no sense ({type(error).__name__}: {error})",
        "is it Docker's own engine, without a proxy in between? on the node: docker version",
    )


def _engine(node: str, user: str, words: str, *, no_command: bool) -> LauncherError:
    if _FORBIDDEN.search(words):
        return EngineForbidden(
            node,
            f"user {user} may not use its container engine ({words})",
            f"on the node: sudo usermod -aG docker {user}; it counts from the next login on",
        )
    if no_command and not _ABSENT.search(words):
        return EngineUnavailable(
            node,
            f"no usable docker command there ({words or 'exit code 127'})",
            "install Docker Engine 18.09 or newer, so that `docker version` works over ssh",
        )
    return EngineUnavailable(
        node,
        f"its container engine does not answer ({words or 'no reason given'})",
        "on the node: sudo systemctl start docker",
    )


def _refused(node: str, doing: str, error: Refused) -> LauncherError:
    words, status = error.words, error.status
    if status == 409 and "name" in words and "in use" in words:
        return NameTaken(node, f"could not {doing}: {words}", "see what it is: launcher status")
    source = re.search(r"bind source path does not exist: (.+)", words)
    if source:
        return NodeUnfit(node, f"the mount's source {source.group(1)} is not there", "make it, or change `mounts`")
    if status == 404 and "No such image" in words:
        return NodeUnfit(node, f"it has no such image: {words}", "ship it: launcher image ship")
    if "could not select device driver" in words or "nvidia-container-cli" in words:
        return NodeUnfit(
            node,
            f"its engine cannot give GPUs to containers: {words}",
            "install the NVIDIA Container Toolkit there: nvidia-ctk runtime configure --runtime=docker",
        )
    if "no space left on device" in words:
        return NodeUnfit(node, f"its disk is full: {words}", "make room: launcher clean, docker system df")
    return EngineFailed(node, f"could not {doing}: {words}")
