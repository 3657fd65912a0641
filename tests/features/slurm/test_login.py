"""A cluster's login machine, reached with the installed OpenSSH, and a server."""

from __future__ import annotations

import contextlib
import shutil

import pytest

from launcher.features.slurm.login import Login, LoginMachine
from launcher.node.ssh.machine import SshMachine
from tests.unit.ssh_server import SshServer
from tests.unit.test_node_ssh_session import machine, server, sockets

__all__ = ["machine", "server", "sockets"]
pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="no OpenSSH client")


def test_a_login_machine_is_reached_alike(server: SshServer, machine: SshMachine) -> None:
    with contextlib.closing(Login("node", machine.ssh_config, 30, ask=False)) as login:
        assert LoginMachine("login", login).run(["id", "-u"]).code == 0
    assert sorted(server.requests) == ["cat", "id -u"]
