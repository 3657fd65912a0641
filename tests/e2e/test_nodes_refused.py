"""Problems of nodes are reported before anything starts: exit 3, every failing node with a fix, in time."""

from __future__ import annotations

import time

import pytest

from tests.bed import faults
from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job

pytestmark = [pytest.mark.bed, pytest.mark.timeout(120)]

CASES = {
    "blackhole": ["no response", "->"],
    "refused": ["refused", "->"],
    "no-such-host": ["->"],
    "unknown-host-key": ["host key", "ssh-keyscan"],
    "changed-host-key": ["host key", "ssh-keygen -R"],
    "wrong-key": ["->"],
    "node1-nodocker": ["docker", "->"],
}


@pytest.mark.parametrize("alias", CASES)
def test_an_unusable_node(bed_cli: Cli, alias: str) -> None:
    bed_cli.program("plain.py")
    keys = bed_job(run={"script": "plain.py"}, nodes=["node1" if alias != "node1-nodocker" else "node2", alias])
    start = time.monotonic()
    failed = bed_cli("up", bed_cli.job("refused", **keys), code=3)
    assert time.monotonic() - start < 30
    assert alias in failed.stderr
    for text in CASES[alias]:
        assert text.lower() in failed.stderr.lower(), failed.stderr
    assert "Traceback" not in failed.stderr
    assert not bed_cli.runs()


def test_all_failing_nodes_are_reported_together(bed_cli: Cli, bed: Bed) -> None:
    bed_cli.program("plain.py")
    keys = bed_job(run={"script": "plain.py"}, nodes=["node1", "refused", "wrong-key", "unknown-host-key"])
    failed = bed_cli("up", bed_cli.job("several", **keys), code=3)
    for alias in ("refused", "wrong-key", "unknown-host-key"):
        assert alias in failed.stderr
    assert "3 of 4 nodes failed" in failed.stderr
    assert bed.wait_clean(home=True) == []


def test_no_engine_and_no_docker(bed_cli: Cli, bed: Bed) -> None:

    bed_cli.program("plain.py")
    job = bed_cli.job("noengine", **bed_job(run={"script": "plain.py"}))
    with faults.without_engine(bed, bed.nodes[1]):
        failed = bed_cli("up", job, code=3)
    assert "node2" in failed.stderr
    assert "systemctl start docker" in failed.stderr or "docker" in failed.stderr.lower()


def test_a_port_in_use_is_reported_with_a_fix(bed_cli: Cli, bed: Bed) -> None:
    python = (
        "import socket,time; s=socket.socket(); s.setsockopt(1,2,1); s.bind(('',29500)); s.listen(); time.sleep(60)"
    )
    bed.docker(
        bed.nodes[0],
        "run",
        "-d",
        "--rm",
        "--name",
        "squatter",
        "--network",
        "host",
        "launcher-bed-train",
        "python3",
        "-c",
        python,
    )
    try:
        failed = bed_cli("up", bed_cli.job("port", **bed_job(run={"command": ["echo", "works"]}, port=29500)), code=3)
        assert "port 29500" in failed.stderr
        assert "--set port=" in failed.stderr
        other = bed_cli("up", bed_cli.cwd / "port.yaml", "--set", "port=")
        assert other.stdout == "works\n"
        assert ":29501" in other.stderr
    finally:
        bed.docker(bed.nodes[0], "rm", "-f", "squatter")


def test_a_firewall_is_found_before_anything_is_done_for_the_image(bed_cli: Cli, bed: Bed) -> None:
    keys = bed_job(run={"command": ["true"]}, image={"ref": "localhost:1/on-no-node:1"})
    with faults.blocked_port(bed, bed.nodes[0], 29500):
        failed = bed_cli("up", bed_cli.job("blocked", **keys), code=3)
    assert "node1: cannot be reached from node2" in failed.stderr
    assert "open TCP 29500 and the ephemeral ports" in failed.stderr
    assert "image" not in failed.stderr
