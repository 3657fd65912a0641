"""Real nodes in the hub: one that keeps us waiting, in whatever way, holds up no other."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from launcher.node.connect import connect
from launcher.node.hub.loop import HUB
from launcher.node.parallel import every
from launcher.node.ssh.node import Ssh
from launcher.node.ssh.pool import SshPool
from tests.bed import faults
from tests.bed.bed import Bed

pytestmark = pytest.mark.bed


def longest_wait(ssh: Ssh, deadline: float) -> float:
    """Seconds that the slowest of many commands took, one after another until then."""
    longest = 0.0
    while time.monotonic() < deadline:
        began = time.monotonic()
        assert ssh.run(["true"]).code == 0
        longest = max(longest, time.monotonic() - began)
    return longest


def test_a_node_that_takes_nothing(bed: Bed, pool: SshPool) -> None:
    good, bad = Ssh("a", "node1", pool), Ssh("b", "node2", pool)
    every([good.connect, bad.connect], [True, True])
    session, _ = bad.session(lambda channel: channel.exec_command("cat >/dev/null"))
    session.channel.settimeout(3)
    over: list[float] = []

    def send() -> float:
        try:
            for _ in range(1000):
                session.channel.sendall(b"x" * (1 << 16))
        except TimeoutError:
            over.append(1)
        return 0.0

    with faults.paused(bed.nodes[1]):
        waited, _ = every([lambda: longest_wait(good, time.monotonic() + 4), send], [True, True])
    assert over  # it did take nothing
    assert waited < 1
    session.close()
    assert bad.run(["true"]).code == 0


def test_a_person_who_has_to_confirm_a_key(
    bed: Bed, pool: SshPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    slow = tmp_path / "confirm"
    slow.write_text(f"#!/bin/sh\ntouch {asked}\nsleep 3\n")
    slow.chmod(0o755)
    socket = tmp_path / "agent"
    environment = {**os.environ, "SSH_ASKPASS": str(slow), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": ":0"}
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], env=environment, stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            time.sleep(0.02)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        subprocess.run(["ssh-add", "-q", "-c", str(bed.key)], check=True)
        file = tmp_path / "ssh_config"
        text = f"Host slow\n HostName {bed.nodes[1].address}\n User trainer\n UserKnownHostsFile {bed.known_hosts}\n"
        file.write_text(f"{text} StrictHostKeyChecking yes\n IdentityFile /nowhere\n")
        theirs = SshPool(str(file))
        good, confirmed = Ssh("a", "node1", pool), Ssh("b", "slow", theirs)
        good.connect()
        over: list[float] = []

        def confirm() -> float:
            began = time.monotonic()
            confirmed.connect()
            over.append(time.monotonic() - began)
            return 0.0

        waited, _ = every([lambda: longest_wait(good, time.monotonic() + 4), confirm], [True, True])
        theirs.close()
    finally:
        agent.terminate()
        agent.wait()
    assert asked.exists()
    assert over[0] > 2.9
    assert waited < 2


def test_nodes_behind_a_jump_host_and_others_at_once(bed: Bed) -> None:
    hosts = [("a", "node1"), ("b", "node1-via-node2"), ("c", "node2"), ("d", "local")]
    with connect(hosts, "docker", bed.ssh_config) as fleet:
        in_hub = fleet.each(lambda engine: HUB.inside, only_asks=True)
        assert in_hub == [True, False, True, False]
        assert [facts.hostname for facts in fleet.facts()][:3] == ["node1", "node1", "node2"]
        payload = os.urandom(8 << 20)

        def echo(ssh: Ssh) -> bool:
            return ssh.run(["cat"], payload).out == payload

        pool = SshPool(str(bed.ssh_config))
        nodes = [Ssh(name, host, pool) for name, host in hosts[:3]]
        assert every([partial(echo, one) for one in nodes * 2], [True, False, True] * 2) == [True] * 6
        pool.close()


def test_many_connections_come_and_go(bed: Bed) -> None:
    """Nothing is left open of them, whether they end here or there."""

    hosts = [(f"n{place}", f"node{1 + place % 2}") for place in range(8)]

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def come_and_go() -> None:
        for turn in range(3):
            with connect(hosts, "docker", bed.ssh_config) as fleet:
                fleet.facts()
                if turn == 1:
                    faults.kill_ssh_sessions(bed, bed.nodes[0])

    come_and_go()
    before, threads = open_files(), threading.active_count()
    come_and_go()
    deadline = time.monotonic() + 5
    while open_files() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert open_files() <= before
    assert threading.active_count() <= threads


def test_ctrl_c_while_nodes_are_asked_ends_at_once(bed: Bed) -> None:
    """The jobs live in the hub's thread, which nobody waits for at the end."""
    program = f"""
import os, signal, threading, time
from launcher.node.connect import connect
with connect([("a", "node1"), ("b", "node2")], "docker", {str(bed.ssh_config)!r}) as fleet:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    fleet.each(lambda engine: engine.machine.run(["sleep", "20"]), only_asks=True)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert time.monotonic() - began < 8
    assert "KeyboardInterrupt" in done.stderr
    assert done.returncode in (1, -2, 130)
