"""An ssh-agent at a socket that the ssh config names."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest

from launcher.errors import AuthFailed
from launcher.node.ssh.connection import SshPool
from launcher.node.ssh.identities import SocketAgent
from launcher.node.ssh.machine import SshMachine
from tests.unit.ssh_server import ssh_server

needs_openssh = pytest.mark.skipif(shutil.which("ssh-agent") is None, reason="no OpenSSH client")


@contextlib.contextmanager
def agent_with(folder: Path, count: int) -> Iterator[tuple[str, list[paramiko.PKey]]]:
    """Run an ssh-agent with new keys, which are also in the files key0, key1, ...; yield its socket and the keys."""
    path, keys = str(folder / "agent"), [paramiko.ECDSAKey.generate() for _ in range(count)]
    files = [str(folder / f"key{number}") for number in range(count)]
    for key, file in zip(keys, files, strict=True):
        key.write_private_key_file(file)
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not Path(path).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        subprocess.run(["ssh-add", "-q", *files], env={"SSH_AUTH_SOCK": path}, check=True)
        yield path, [*keys]
    finally:
        agent.terminate()
        agent.wait()


@needs_openssh
def test_keys_of_the_agent_can_sign(tmp_path: Path) -> None:
    with agent_with(tmp_path, 1) as (path, (key,)):
        found = SocketAgent(path, 5)
        (held,) = found.get_keys()
        assert held.asbytes() == key.asbytes()
        assert key.verify_ssh_sig(b"data", paramiko.Message(held.sign_ssh_data(b"data")))
        found.close()
        assert found.get_keys() == ()


@needs_openssh
def test_of_eight_keys_in_the_agent_the_one_that_the_config_names_is_offered_first(tmp_path: Path) -> None:
    """sshd closes the connection after six (MaxAuthTries)."""
    with agent_with(tmp_path, 8) as (path, keys), ssh_server(tmp_path) as server:
        server.accepts, server.most_tries = keys[7].asbytes(), 6
        (tmp_path / "key7.pub").write_text(f"{keys[7].get_name()} {keys[7].get_base64()}\n")
        (tmp_path / "key7").unlink()  # only the agent has it
        for options, works in (({"IdentityFile": tmp_path / "key7"}, True), ({}, False)):
            config = server.config(IdentityAgent=path, **options)
            with contextlib.closing(SshPool(config, 30)) as pool:
                if works:
                    assert SshMachine("a", "node", pool).run(["true"]).code == 0
                    assert server.methods == ["none", "publickey"]
                    continue
                with pytest.raises(AuthFailed) as refused:
                    SshMachine("a", "node", pool).run(["true"])
                assert "IdentitiesOnly yes" in refused.value.next_step


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
