"""One connection per server: made once, replaced when lost, closed when the server is silent. On localhost."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest

from launcher.errors import AuthFailed, HostKeyChanged, NodeUnfit, NodeUnreachable
from launcher.node.parallel import run_all
from launcher.node.ssh.connection import CHANNELS, SshPool
from launcher.node.ssh.machine import SshMachine
from tests.unit.ssh_server import SshServer, ssh_server

Make = Callable[..., SshMachine]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    with ssh_server(tmp_path) as made:
        yield made


@pytest.fixture
def make(server: SshServer) -> Iterator[Make]:
    """A node `a` on that server; keyword arguments are ssh config options."""
    pools: list[SshPool] = []

    def made(**options: object) -> SshMachine:
        pools.append(SshPool(server.config(**options), 30))
        return SshMachine("a", "node", pools[-1])

    yield made
    for pool in pools:
        pool.close()


def test_concurrent_threads_share_one_connection(server: SshServer, make: Make) -> None:
    ssh = make()
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(ssh.run(["true"]).code)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 20
    assert server.accepted == 1


def test_a_lost_connection_is_replaced_and_the_host_key_verified_again(server: SshServer, make: Make) -> None:
    ssh = make()
    assert ssh.run(["true"]).code == 0
    server.cut()
    assert ssh.run(["true"]).code == 0
    assert server.accepted == 2
    server.key = paramiko.ECDSAKey.generate()
    server.cut()
    with pytest.raises(HostKeyChanged, match="man-in-the-middle"):
        ssh.run(["true"])


def test_the_command_of_a_message_works_as_it_is_typed(tmp_path: Path) -> None:
    """With an ssh config of its own, of a host that only this config has."""
    file = tmp_path / "an ssh config"
    # sh: ssh calls `exec`, and an `exec echo >&2` closes its stdout, at which ssh ends it, before it has printed
    file.write_text("Host nowhere\n ProxyCommand sh -c 'echo it is night here >&2; exit 1'\n")
    pool = SshPool(str(file))
    with pytest.raises(NodeUnreachable, match="its ProxyCommand failed: it is night here") as caught:
        SshMachine("a", "nowhere", pool).host_key()
    pool.close()
    command = caught.value.next_step.removeprefix("run: ")
    done = subprocess.run(command, shell=True, check=False, capture_output=True, stdin=subprocess.DEVNULL)
    assert b"it is night here" in done.stderr


def test_connecting_to_a_busy_sshd_is_retried(server: SshServer, make: Make) -> None:
    server.drop = 2
    make().host_key()
    assert server.accepted == 3


def test_connecting_to_a_server_that_closes_every_connection_times_out(server: SshServer, make: Make) -> None:
    server.drop = 1000
    began = time.monotonic()
    with pytest.raises(NodeUnreachable, match="closes connections before sending an SSH banner"):
        make(ConnectTimeout=1).host_key()
    assert time.monotonic() - began < 60


def test_connecting_to_a_silent_server_times_out(server: SshServer, make: Make) -> None:
    server.frozen.set()
    began = time.monotonic()
    with pytest.raises(NodeUnreachable, match="no response within 1 s"):
        make(ConnectTimeout=1).host_key()
    assert time.monotonic() - began < 60


def test_a_session_refused_by_a_full_sshd_is_retried(server: SshServer, make: Make) -> None:
    ssh = make()
    ssh.host_key()
    server.refuse_sessions = 3
    assert ssh.run(["true"]).code == 0
    assert server.refuse_sessions == 0


def test_concurrent_commands_beyond_the_session_limit_use_further_connections(server: SshServer, make: Make) -> None:
    server.most_sessions = 3
    ssh = make()
    for stream in run_all([lambda: ssh.open(["sleep"])] * CHANNELS):
        stream.close()
    assert server.accepted > 1


def test_a_command_opens_exactly_one_session(server: SshServer, make: Make) -> None:
    ssh = make()
    for _ in range(3):
        ssh.run(["true"])
    assert server.sessions == 3


def test_a_quiet_connection_stays_open_while_the_server_answers(server: SshServer, make: Make) -> None:
    ssh = make(ServerAliveInterval=1, ServerAliveCountMax=1)
    assert ssh.run(["true"]).code == 0
    time.sleep(3)
    assert ssh.run(["true"]).code == 0
    assert server.accepted == 1


def test_waiting_calls_fail_when_the_server_becomes_silent(server: SshServer, make: Make) -> None:
    ssh = make(ServerAliveInterval=1, ServerAliveCountMax=1)
    ssh.host_key()
    frozen = threading.Timer(0.5, server.frozen.set)
    frozen.start()
    began = time.monotonic()
    with pytest.raises(NodeUnreachable, match="was lost"):
        ssh.run(["sleep"], timeout=60)
    assert 1 < time.monotonic() - began < 40


def test_a_resumed_launcher_pings_before_it_gives_up(server: SshServer) -> None:
    pool = SshPool(server.config(), 5)
    ssh = SshMachine("a", "node", pool)
    assert ssh.run(["true"]).code == 0
    wire = pool.connection("node").live[1]  # type: ignore[index]
    wire.heard -= 3600
    deadline = time.monotonic() + 60
    while wire.heard < deadline - 1000:
        assert time.monotonic() < deadline, "no ping"
        time.sleep(0.05)
    assert ssh.run(["true"]).code == 0
    assert server.accepted == 1
    pool.close()


def test_closing_a_pool_leaves_nothing_open(server: SshServer) -> None:
    before = set(threading.enumerate())
    pool = SshPool(server.config(), 5)
    SshMachine("a", "node", pool).run(["true"])
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 30

    def ours() -> list[str]:
        return [t.name for t in set(threading.enumerate()) - before if t.name == "ssh keepalive"]

    while ours() and time.monotonic() - began < 60:
        time.sleep(0.02)
    assert not ours()


def test_a_host_key_is_unknown_if_the_server_forwards_no_connections(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    ssh = make()
    assert ssh.has_host_key("127.0.0.1", 1, ssh.host_key(), 2) is None
    assert capfd.readouterr() == ("", "")  # paramiko logs the refusal as an error


def test_a_server_that_knows_the_user_already_gets_no_key(server: SshServer, make: Make) -> None:
    server.accepts_none = True
    assert make().run(["true"]).code == 0
    assert server.methods == ["none"]


def test_other_servers_get_a_key_next(server: SshServer, make: Make) -> None:
    assert make().run(["true"]).code == 0
    assert server.methods == ["none", "publickey"]


def test_a_second_factor_is_told_from_a_rejected_key(server: SshServer, make: Make) -> None:
    server.factors = ("keyboard-interactive",)
    with pytest.raises(AuthFailed) as refused:
        make().run(["true"])
    told = str(refused.value)
    assert "/id for user me, which is not enough; it requires keyboard-interactive as well" in told
    assert "AuthenticationMethods publickey" in told
    assert "no ControlMaster is used" in told
    assert "ssh-copy-id" not in told


def test_a_second_key_is_offered_if_the_server_wants_one(server: SshServer, make: Make, tmp_path: Path) -> None:
    server.factors = ("publickey",)
    paramiko.ECDSAKey.generate().write_private_key_file(str(tmp_path / "second"))
    assert make(IdentityFile=tmp_path / "second").run(["true"]).code == 0
    assert server.methods == ["none", "publickey", "publickey"]


def test_a_server_that_accepts_no_keys_needs_no_copy_of_one(server: SshServer, make: Make) -> None:
    server.wants = "password"
    with pytest.raises(AuthFailed, match="it accepts only password, no keys") as refused:
        make().run(["true"])
    assert "PubkeyAuthentication yes" in refused.value.next_step


class _Agent:
    """An ssh-agent that lists a key and never signs with it; silent: it does not even list one."""

    def __init__(self, path: Path, *, silent: bool) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._key = paramiko.ECDSAKey.generate().asbytes()
        self._silent = silent
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            self._held, _ = self._listener.accept()
            self._held.recv(5)  # length and type: asks for its keys
            if not self._silent:
                body = b"\x0c" + struct.pack(">II", 1, len(self._key)) + self._key + struct.pack(">I", 4) + b"work"
                self._held.sendall(struct.pack(">I", len(body)) + body)


@pytest.mark.parametrize("silent", [True, False])
def test_a_hanging_agent_is_named(server: SshServer, make: Make, tmp_path: Path, *, silent: bool) -> None:
    (tmp_path / "id").unlink()
    agent = _Agent(tmp_path / "agent", silent=silent)
    with pytest.raises(AuthFailed, match="no ssh-agent responds at") as refused:
        make(IdentityAgent=tmp_path / "agent", ConnectTimeout=2).run(["true"])
    assert "ssh-add -l" in refused.value.next_step
    assert "ssh-copy-id" not in refused.value.next_step
    assert ("did not sign with work (agent)" in refused.value.what) != silent
    assert agent is not None


def test_endless_output_is_given_up(make: Make) -> None:
    machine = make()
    began = time.monotonic()
    with pytest.raises(NodeUnreachable, match=r"a: `drip` did not exit within 1 s"):
        machine.run(["drip"], timeout=1)
    assert time.monotonic() - began < 30
    with pytest.raises(NodeUnfit, match=r"a: `flood` printed over 64 MiB"):
        machine.run(["flood"], timeout=60)
