"""Whose a run is: the ssh user's uid on the node decides; the caller counts too where no run is named."""

from __future__ import annotations

import getpass
import os
import re
import socket
from enum import IntEnum

from launcher.model.labels import RunLabels


class Owner(IntEnum):
    """The nearer, the smaller."""

    SELF = 0  # this user of the node, and this caller
    ACCOUNT = 1  # this user of the node, another caller
    OTHER = 2  # another user of the node


def owner(labels: RunLabels, uid: int) -> Owner:
    """uid: the ssh user's on the node with these labels."""
    if labels.uid != uid:
        return Owner.OTHER
    return Owner.SELF if labels.owner == caller() else Owner.ACCOUNT


def caller() -> str:
    """user@host, as it fits into a label."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in a container
        user = str(os.getuid())
    return re.sub(r"[^!-~]", "_", f"{user}@{socket.gethostname()}")[:400]
