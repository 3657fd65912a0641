"""The gate through which docker-py and paramiko are imported: container engines on this machine and over ssh.

node.connect imports it when it needs one, and for hosts over ssh while `ssh -G` runs. Plain processes never pass it.
"""

from __future__ import annotations

from functools import partial

from launcher.model.home import user_name
from launcher.model.limits import AnswerLimits
from launcher.node.docker.channel import dial_local, dial_over_ssh
from launcher.node.docker.engine import DockerEngine
from launcher.node.machine import LocalMachine
from launcher.node.ssh.connection import SshPool
from launcher.node.ssh.machine import SshMachine


def local_engine(node: str, host: str, limits: AnswerLimits) -> DockerEngine:
    """Return the engine of DOCKER_HOST, of the current docker context, or at the default socket."""
    return DockerEngine(node, host, LocalMachine(node, user_name(), limits), partial(dial_local, node))


def remote_engine(node: str, host: str, pool: SshPool, limits: AnswerLimits) -> DockerEngine:
    """Connect to a machine and return the engine of its ssh user. Raises NodeUnreachable and other NodeErrors."""
    machine = SshMachine(node, host, pool, limits)
    machine.connect()
    return DockerEngine(
        node, host, machine, partial(dial_over_ssh, machine.command), (machine.host, machine.ssh_config)
    )
