"""Real ssh: jump hosts, keys, host keys, agents, broken connections, many channels."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
import time
from pathlib import Path

import pytest

from launcher.errors import AuthFailed, HostKeyUnknown, LauncherError, NodeUnreachable, UsageError
from launcher.node.connect import connect
from launcher.node.files import Files
from launcher.node.ssh.connection import CHANNELS, SshPool
from launcher.node.ssh.machine import SshMachine
from tests.bed import faults
from tests.bed.bed import Bed

pytestmark = pytest.mark.bed


@pytest.fixture
def ssh(pool: SshPool) -> SshMachine:
    return SshMachine("a", "node1", pool)


def config(bed: Bed, folder: Path, text: str) -> str:
    """Writes an ssh config with this text, and the bed's key and known hosts as defaults."""
    file = folder / "ssh_config"
    defaults = f"Host *\n User trainer\n UserKnownHostsFile {bed.known_hosts}\n GlobalKnownHostsFile /dev/null\n"
    file.write_text(f"{text}\n{defaults} IdentitiesOnly yes\n StrictHostKeyChecking yes\n IdentityFile {bed.key}\n")
    return str(file)


def refused(config_file: str, host: str) -> LauncherError:
    pool = SshPool(config_file)
    try:
        with pytest.raises(LauncherError) as caught:
            SshMachine("the-node", host, pool).host_key()
        return caught.value
    finally:
        pool.close()


def test_a_command_and_both_of_its_streams(ssh: SshMachine) -> None:
    done = ssh.run(["sh", "-c", 'echo "$1"; cat; echo err >&2; exit 3', "sh", "it's; $HOME"], b"in")
    assert (done.code, done.out, done.err) == (3, b"it's; $HOME\nin", b"err\n")


def test_big_streams_in_all_directions_do_not_block(ssh: SshMachine) -> None:
    data = os.urandom(1 << 20) * 12
    done = ssh.run(["sh", "-c", "head -c 12582912 /dev/zero >&2; cat"], data, timeout=60)
    assert done.out == data
    assert len(done.err) == 12582912


def test_a_command_that_does_not_read_its_input(ssh: SshMachine) -> None:
    assert ssh.run(["true"], b"x" * (32 << 20), timeout=30).code == 0


def test_a_timeout_names_the_node_and_stops_the_wait(ssh: SshMachine) -> None:
    began = time.monotonic()
    with pytest.raises(NodeUnreachable, match="a: `sleep 60` did not exit within 1 s"):
        ssh.run(["sleep", "60"], timeout=1)
    assert time.monotonic() - began < 30


def test_connecting_and_a_first_command_are_fast(bed: Bed) -> None:
    times = [1.0]
    while min(times) >= 0.35 and len(times) < 20:  # repeated, as a busy machine slows down every program
        pool = SshPool(str(bed.ssh_config))
        began = time.monotonic()
        SshMachine("a", "node1", pool).run(["true"])
        times.append(time.monotonic() - began)
        pool.close()
    assert min(times) < 0.35


def test_more_commands_than_channels_take_turns(ssh: SshMachine) -> None:
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda: codes.append(ssh.run(["sleep", "0.3"]).code)) for _ in range(3 * CHANNELS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * (3 * CHANNELS)


def test_a_node_behind_another_shares_its_connection(bed: Bed, pool: SshPool) -> None:
    direct, behind = SshMachine("a", "node2", pool), SshMachine("b", "node1-via-node2", pool)
    assert behind.run(["hostname"]).out.strip() == b"node1"
    assert direct.run(["sh", "-c", "ps -C sshd -o args= | grep -c trainer@notty || true"]).code == 0
    assert pool.connection("node1-via-node2").hop is pool.connection("node2")


def test_a_chain_of_jump_hosts(bed: Bed, tmp_path: Path) -> None:
    one, two = bed.nodes[0].address, bed.nodes[1].address
    file = config(bed, tmp_path, f"Host end\n HostName {one}\n ProxyJump trainer@{one}:22,{two}\n")
    pool = SshPool(file)
    assert SshMachine("a", "end", pool).run(["hostname"]).out.strip() == b"node1"
    pool.close()


def test_a_cycle_of_jump_hosts_is_a_usage_error(bed: Bed, tmp_path: Path) -> None:
    file = config(bed, tmp_path, "Host x\n ProxyJump y\nHost y\n ProxyJump x\n")
    with pytest.raises(UsageError, match="cycle"):
        SshPool(file).connection("x")


def test_a_jump_host_that_fails_is_named_with_the_node(bed: Bed, tmp_path: Path) -> None:
    file = config(
        bed,
        tmp_path,
        f"Host end\n HostName {bed.nodes[0].address}\n ProxyJump hop\n"
        f"Host hop\n Port 1\n HostName {bed.nodes[1].address}\n",
    )
    error = refused(file, "end")
    assert isinstance(error, NodeUnreachable)
    assert str(error).startswith("the-node (through hop): ")
    assert "refuses connections" in error.what


def test_a_node_that_the_jump_host_cannot_reach(bed: Bed, tmp_path: Path) -> None:
    file = config(
        bed, tmp_path, f"Host end\n HostName {bed.nodes[0].address}\n Port 1\n ProxyJump {bed.nodes[1].address}\n"
    )
    error = refused(file, "end")
    assert isinstance(error, NodeUnreachable)
    assert "cannot reach" in error.what


def test_a_proxy_command(bed: Bed, tmp_path: Path) -> None:
    script = tmp_path / "proxy.py"
    script.write_text(
        "import os, socket, sys, threading\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n"
        "    while d := os.read(0, 65536): s.sendall(d)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while d := s.recv(65536): os.write(1, d)\n"
    )
    text = f"Host end\n HostName {bed.nodes[0].address}\n ProxyCommand python3 {shlex.quote(str(script))} %h %p\n"
    pool = SshPool(config(bed, tmp_path, text))
    assert SshMachine("a", "end", pool).run(["hostname"]).out.strip() == b"node1"
    pool.close()


def test_a_proxy_command_that_fails_says_why(bed: Bed, tmp_path: Path) -> None:
    error = refused(config(bed, tmp_path, "Host end\n ProxyCommand sh -c 'echo no way >&2; exit 1'\n"), "end")
    assert "its ProxyCommand failed: no way" in error.what


def test_an_encrypted_key_is_reported_with_a_fix(bed: Bed, tmp_path: Path) -> None:
    key = tmp_path / "id_locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "a passphrase", "-f", str(key)], check=True)
    text = f"Host end\n HostName {bed.nodes[0].address}\n IdentityFile {key}\nHost *\n IdentityAgent none\n"
    file = config(bed, tmp_path, text)
    Path(file).write_text(Path(file).read_text().replace(f" IdentityFile {bed.key}\n", ""))
    error = refused(file, "end")
    assert isinstance(error, AuthFailed)
    assert f"{key} is encrypted" in error.what
    assert error.next_step == f"add it to your ssh-agent: ssh-add {key}"


def test_a_key_that_only_the_agent_has_is_used(bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    socket = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not socket.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        subprocess.run(["ssh-add", "-q", str(bed.key)], check=True)
        file = Path(config(bed, tmp_path, f"Host end\n HostName {bed.nodes[0].address}\n IdentitiesOnly no\n"))
        file.write_text(file.read_text().replace(f"IdentityFile {bed.key}", "IdentityFile /nowhere"))
        pool = SshPool(str(file))
        assert SshMachine("a", "end", pool).run(["hostname"]).out.strip() == b"node1"
        pool.close()
    finally:
        agent.terminate()
        agent.wait()


def test_a_dead_agent_does_not_prevent_the_use_of_a_key_file(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "dead"))
    pool = SshPool(config(bed, tmp_path, f"Host end\n HostName {bed.nodes[0].address}\n"))
    assert SshMachine("a", "end", pool).run(["true"]).code == 0
    pool.close()


def test_accept_new_records_a_host_and_refuses_a_changed_key(bed: Bed, tmp_path: Path) -> None:
    known = tmp_path / "known"
    text = (
        f"Host end\n HostName {bed.nodes[0].address}\n UserKnownHostsFile {known}\n StrictHostKeyChecking accept-new\n"
    )
    file = config(bed, tmp_path, text)
    pool = SshPool(file)
    SshMachine("a", "end", pool).host_key()
    pool.close()
    # OpenSSH accepts what was recorded
    assert bed.nodes[0].address in known.read_text()
    subprocess.run(["ssh", "-F", file, "-o", "StrictHostKeyChecking=yes", "end", "true"], check=True, timeout=20)
    known.write_text(
        known.read_text().replace(known.read_text().split()[2], bed.key.with_suffix(".pub").read_text().split()[1])
    )
    assert type(refused(file, "end")).__name__ == "HostKeyChanged"


def test_the_suggested_fix_for_an_unknown_host_key_works(bed: Bed, tmp_path: Path) -> None:
    known = tmp_path / "known"
    text = f"Host end\n HostName {bed.nodes[0].address}\n UserKnownHostsFile {known}\n"
    file = config(bed, tmp_path, text)
    error = refused(file, "end")
    assert isinstance(error, HostKeyUnknown)
    command = error.next_step.split("accept it: ")[1].split()
    command[command.index("StrictHostKeyChecking=ask")] = "StrictHostKeyChecking=accept-new"  # the answer "yes"
    subprocess.run(command, check=True, timeout=20)
    pool = SshPool(file)
    SshMachine("a", "end", pool).host_key()
    pool.close()


def test_a_host_key_that_a_known_authority_has_signed_is_accepted(bed: Bed, tmp_path: Path) -> None:
    node, known, authority = bed.nodes[0], tmp_path / "known", tmp_path / "ca"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", authority], check=True)
    host = tmp_path / "host.pub"
    host.write_text(
        bed.sh(node, "cat /etc/ssh/ssh_host_ed25519_key.pub || ssh-keygen -yf /etc/ssh/ssh_host_ed25519_key")
    )
    subprocess.run(["ssh-keygen", "-q", "-s", authority, "-I", "x", "-h", "-n", node.address, host], check=True)
    certificate = (tmp_path / "host-cert.pub").read_text()
    bed.sh(node, f"echo '{certificate.strip()}' > /etc/ssh/host-cert.pub")
    known.write_text(f"@cert-authority * {authority.with_suffix('.pub').read_text()}")
    file = config(bed, tmp_path, f"Host end\n HostName {node.address}\n UserKnownHostsFile {known}\n")
    assert isinstance(refused(file, "end"), HostKeyUnknown)  # the node shows no certificate yet
    with faults.sshd_setting(bed, node, "HostCertificate /etc/ssh/host-cert.pub"):
        pool = SshPool(file)
        assert SshMachine("a", "end", pool).run(["hostname"]).out.strip() == b"node1"
        pool.close()
        subprocess.run(["ssh", "-F", file, "end", "true"], check=True, timeout=20)  # OpenSSH agrees


def test_a_private_key_that_others_may_read_is_refused_as_by_openssh(bed: Bed, tmp_path: Path) -> None:
    key = tmp_path / "id_open"
    key.write_bytes(bed.key.read_bytes())
    key.chmod(0o644)
    file = Path(config(bed, tmp_path, f"Host end\n HostName {bed.nodes[0].address}\n"))
    file.write_text(file.read_text().replace(f"IdentityFile {bed.key}", f"IdentityFile {key}"))
    error = refused(str(file), "end")
    assert isinstance(error, AuthFailed)
    assert f"{key} is ignored: its permissions are too open (mode 0644)" in error.what
    assert error.next_step == f"run: chmod 600 {key}"
    assert subprocess.run(["ssh", "-F", str(file), "end", "true"], capture_output=True, check=False).returncode == 255
    key.chmod(0o600)
    pool = SshPool(str(file))
    SshMachine("a", "end", pool).host_key()
    pool.close()


def test_broken_sessions_are_replaced_by_the_next_call(bed: Bed, ssh: SshMachine) -> None:
    files = Files(ssh)
    assert ssh.run(["true"]).code == 0
    assert files.read("/etc/hostname", below="/etc")
    faults.kill_ssh_sessions(bed, bed.nodes[0])
    assert ssh.run(["true"]).code == 0
    faults.kill_ssh_sessions(bed, bed.nodes[0])
    assert files.read("/etc/hostname", below="/etc")


def test_a_connection_lost_while_a_command_runs_is_an_immediate_error(bed: Bed, ssh: SshMachine) -> None:
    ssh.host_key()
    cut = threading.Timer(1.0, faults.kill_ssh_sessions, (bed, bed.nodes[0]))
    cut.start()
    began = time.monotonic()
    with pytest.raises(NodeUnreachable, match="was lost"):
        ssh.run(["sleep", "60"], timeout=60)
    assert time.monotonic() - began < 50
    cut.join()


@pytest.mark.slow
def test_a_node_that_disappears_silently_is_detected(bed: Bed, ssh: SshMachine) -> None:
    ssh.host_key()
    began = time.monotonic()
    with faults.isolated(bed, bed.nodes[0]), pytest.raises(NodeUnreachable, match="was lost"):
        ssh.run(["sleep", "120"], timeout=120)
    assert 20 < time.monotonic() - began < 60


def test_all_unreachable_nodes_are_reported_together_within_the_time_limit(bed: Bed) -> None:
    names = ["refused", "blackhole", "no-such-host", "unknown-host-key", "changed-host-key", "wrong-key", "node1"]
    began = time.monotonic()
    with pytest.raises(LauncherError) as caught:
        connect([(name, name) for name in names], "docker", bed.ssh_config, timeout=4)
    assert time.monotonic() - began < 40
    message = str(caught.value)
    assert "6 of 7 nodes failed" in message
    for name in names[:-1]:
        assert f"\n{name}: " in message


def test_reachable_nodes_are_returned_if_failures_are_allowed(bed: Bed) -> None:
    with connect([("a", "node1"), ("b", "refused")], "docker", bed.ssh_config, allow_failures=True) as fleet:
        assert [engine.node for engine in fleet.engines] == ["a"]
        assert list(fleet.failed) == ["b"]
