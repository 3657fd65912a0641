"""An ssh-agent at a socket that the ssh config names."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import paramiko
import pytest

from launcher.node.ssh.identities import SocketAgent


@pytest.mark.skipif(shutil.which("ssh-agent") is None, reason="no OpenSSH client")
def test_keys_of_the_agent_can_sign(tmp_path: Path) -> None:
    key, path = paramiko.ECDSAKey.generate(), str(tmp_path / "agent")
    key.write_private_key_file(str(tmp_path / "key"))
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not Path(path).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        subprocess.run(["ssh-add", "-q", str(tmp_path / "key")], env={"SSH_AUTH_SOCK": path}, check=True)
        found = SocketAgent(path, 5)
        (held,) = found.get_keys()
        assert held.asbytes() == key.asbytes()
        assert key.verify_ssh_sig(b"data", paramiko.Message(held.sign_ssh_data(b"data")))
        found.close()
        assert found.get_keys() == ()
    finally:
        agent.terminate()
        agent.wait()


def test_an_unresponsive_agent_times_out(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "agent"))
        silent.listen()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            SocketAgent(str(tmp_path / "agent"), 0.3)
        assert time.monotonic() - began < 60


def test_a_missing_agent_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        SocketAgent(str(tmp_path / "agent"), 0.3)
