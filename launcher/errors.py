"""Errors for users, one class per kind. Each has an exit code and reports where and what happened, and the next step.

The docstring of a class describes when it is raised. `str(error)` is the complete message.
"""

# ruff: noqa: N818 - the names state the problem (NodeUnreachable); the suffix Error would add nothing
from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class LauncherError(Exception):
    """Base class of all errors that are shown to the user.

    where: a node's name, `file:line`, an option. what: what happened. next_step: how to fix it.
    """

    exit_code: int = 1

    def __init__(self, where: str, what: str, next_step: str = "") -> None:
        super().__init__(where, what, next_step)  # all arguments, so that pickle and copy can rebuild the error
        self.where = where
        self.what = what
        self.next_step = next_step

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n  -> {self.next_step}" if self.next_step else head

    def is_of(self, node: str) -> bool:
        """Return whether it is this node's."""
        return self.where in (node, f"node {node}")


class InvalidRequest(LauncherError):
    """The request is invalid."""

    exit_code = 2


class UsageError(InvalidRequest):
    """An option or argument of the call is invalid."""


class JobInvalid(InvalidRequest):
    """The job file, an override of it, or a file that it names is invalid."""


class PlanInvalid(InvalidRequest):
    """The job requests more than these nodes have."""


class RunUnknown(InvalidRequest):
    """No run, or more than one run, has this name."""


class NodeError(LauncherError):
    """A node cannot be used."""

    exit_code = 3


class NodeUnreachable(NodeError):
    """No connection to the node within the time limit, or the connection was lost permanently."""


class LoginLost(NodeUnreachable):
    """The connection to a cluster's login node was lost; a new one might ask for a password again."""


class HostKeyUnknown(NodeError):
    """The node's ssh host key is not in a known_hosts file."""


class HostKeyChanged(NodeError):
    """The node's ssh host key differs from the one in known_hosts."""


class AuthFailed(NodeError):
    """The node refused every key that was offered."""


class NodeUnfit(NodeError):
    """The node is reachable but lacks a requirement of the job: GPUs, a free port, disk space, a mount's source."""


class OutputKept(NodeUnfit):
    """The start of a run was taken back, but its program had begun there, and its output folder is kept."""


class NoRoomHere(NodeError):
    """Files in runs/ cannot be written on this machine."""


class InUse(NodeUnfit):
    """A GPU or a port that the job needs is in use, mostly by another run: waiting may help. runs: these runs."""

    def __init__(self, where: str, what: str, next_step: str = "", runs: tuple[str, ...] = ()) -> None:
        super().__init__(where, what, next_step)
        self.args = (*self.args, runs)
        self.runs = runs


class EngineUnavailable(NodeError):
    """No container engine responds on the node."""


class EngineAbsent(EngineUnavailable):
    """No container engine is installed on this machine."""


class EngineForbidden(NodeError):
    """The ssh user may not use the node's container engine."""


class EngineFailed(NodeError):
    """The node's container engine refused or failed a request; `what` has its message."""


class ContainerGone(EngineFailed):
    """The container no longer exists: it was removed by another process."""


class NameTaken(EngineFailed):
    """The node already has a container of this name."""


class DataFailed(NodeError):
    """Data did not reach a node, or the node's copy is damaged."""


class ImageError(LauncherError):
    """The image cannot be used."""

    exit_code = 4


class ImageUnfit(ImageError):
    """The image lacks a requirement of the job, or is not the same on all nodes."""


class ImageBuildFailed(ImageError):
    """The image could not be built."""


class ImageShipFailed(ImageError):
    """The image did not reach a node."""


class NoRoom(ImageShipFailed):
    """The node's disk is too full for the image: a retry would fail the same way."""


class StoppedByUser(LauncherError):
    """The user stopped the run."""

    exit_code = 5


class NotConfirmed(LauncherError):
    """A node did not confirm a request, so cleanup may be incomplete there.

    removed: what was removed on the other nodes. errors: of the nodes that did not confirm.
    """

    exit_code = 6

    def __init__(
        self,
        where: str,
        what: str,
        next_step: str = "",
        *,
        removed: Sequence[Any] = (),
        errors: Sequence[LauncherError] = (),
    ) -> None:
        super().__init__(where, what, next_step)
        self.removed = tuple(removed)
        self.errors = tuple(errors)


class NodesFailed(LauncherError):
    """Nodes failed, each for its own reason. The message contains all of `errors`, none of which is a NodesFailed: what
    such an error contains takes its place.

    The exit code is that of the errors, or 3 if they differ.
    """

    exit_code = 3

    def __init__(self, errors: Sequence[LauncherError], of: int = 0) -> None:
        """errors: at least one, in the order of the nodes. of: total number of nodes, 0 to omit it."""
        if not errors:
            raise ValueError("NodesFailed without an error")
        self.errors: tuple[LauncherError, ...] = tuple(
            inner for error in errors for inner in (error.errors if isinstance(error, NodesFailed) else (error,))
        )
        count = f"{len(self.errors)} of {of} nodes" if of else f"{len(self.errors)} node{'s' * (len(self.errors) > 1)}"
        super().__init__(count, "failed")
        self.args = (errors, of)
        codes = {error.exit_code for error in self.errors}
        if len(codes) == 1:
            self.exit_code = codes.pop()

    def __str__(self) -> str:
        if len(self.errors) == 1:
            return str(self.errors[0])
        return "\n".join([f"{self.where} {self.what}:", *(str(error) for error in self.errors)])
