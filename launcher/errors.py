"""The errors a user sees, a class a kind: each says where, what happened and what to do next, and has its exit code.

A class's docstring says when it is raised. `str(error)` is the whole message.
"""

# ruff: noqa: N818 - the names state what is wrong (NodeUnreachable); the suffix Error would add nothing
from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class LauncherError(Exception):
    """The base of all errors that a user is meant to read.

    where: a node's name, `file:line`, an option. what: what happened. next_step: what the user can do about it.
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


class InvalidRequest(LauncherError):
    """The request itself is wrong."""

    exit_code = 2


class UsageError(InvalidRequest):
    """The call itself is wrong: an option, an argument."""


class JobInvalid(InvalidRequest):
    """The job file, an override of it, or a file that it names is wrong."""


class PlanInvalid(InvalidRequest):
    """The job asks for more than these nodes have."""


class RunUnknown(InvalidRequest):
    """No run, or more than one, has that name."""


class NodeError(LauncherError):
    """A node cannot be used."""

    exit_code = 3


class NodeUnreachable(NodeError):
    """No connection to the node within the time limit, or the connection was lost for good."""


class LoginLost(NodeUnreachable):
    """The connection to a cluster's login machine is gone; another one might ask for a password again."""


class HostKeyUnknown(NodeError):
    """The node's ssh host key is in no known_hosts file."""


class HostKeyChanged(NodeError):
    """The node's ssh host key is not the one in known_hosts."""


class AuthFailed(NodeError):
    """The node refused every key that was offered."""


class NodeUnfit(NodeError):
    """The node is reached but lacks what the job needs: GPUs, a free port, disk, a mount's source."""


class NoRoomHere(NodeError):
    """What belongs into runs/ cannot be written on this machine."""


class InUse(NodeUnfit):
    """A GPU or a port that the job needs is in use by another run."""


class EngineUnavailable(NodeError):
    """No container engine answers on the node."""


class EngineForbidden(NodeError):
    """The ssh user may not use the node's container engine."""


class EngineFailed(NodeError):
    """The node's container engine refused or failed a request; `what` has its message."""


class ContainerGone(EngineFailed):
    """The container was there and is not any more: it was removed from outside."""


class NameTaken(EngineFailed):
    """The node has a container of that name already."""


class DataFailed(NodeError):
    """Data did not reach a node, or its copy there is damaged."""


class ImageError(LauncherError):
    """The image cannot be used."""

    exit_code = 4


class ImageUnfit(ImageError):
    """The image lacks what the job needs, or is not the same on all nodes."""


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
    """A node did not confirm a request, so something may be left there.

    removed: what the other nodes confirmed. errors: why the rest did not.
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
    """Several nodes failed, each for its own reason. The message has all of `errors`.

    The exit code is the one that they share, 3 if they differ.
    """

    exit_code = 3

    def __init__(self, errors: Sequence[LauncherError], of: int = 0) -> None:
        """errors: at least one, in the order of the nodes; nested aggregates are flattened. of: how many nodes were
        asked, 0 to leave that out.
        """
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
