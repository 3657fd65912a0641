"""`launcher doctor` finds a node's problems before a job does, and says how to fix them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.bed import faults
from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job

pytestmark = [pytest.mark.bed, pytest.mark.timeout(200)]

Checks = dict[tuple[str, str], dict[str, Any]]


def examined(cli: Cli, *args: object, code: int) -> Checks:
    """Return the worst result by node and check."""
    done = cli("doctor", *args, "--json", code=code)
    report = json.loads(done.stdout)
    order = ["ok", "warn", "fail"]
    assert report["level"] == max((c["level"] for c in report["checks"]), key=order.index)
    assert (report["level"] == "fail") == (code == 3)
    found: Checks = {}
    for check in sorted(report["checks"], key=lambda c: order.index(c["level"])):
        assert check["level"] == "ok" or check["fix"], check
        found[check["node"], check["name"]] = check
    return found


def job(cli: Cli, **keys: Any) -> object:
    cli.program("plain.py")
    base = bed_job(run={"script": "plain.py"})
    mounts = {**base["mounts"], **keys.pop("mounts", {})}
    return cli.job("doctor", **{**base, **keys, "mounts": mounts})


def test_a_healthy_bed_passes(bed_cli: Cli, bed: Bed) -> None:
    seen = examined(bed_cli, job(bed_cli), code=0)
    for node in bed.nodes[:2]:
        names = ("reachable", "clock", "engine", "disk", "shared memory", "gpus", "mount", "interface", "network")
        for name in (*names, "container"):
            assert seen[node.alias, name]["level"] in ("ok", "warn"), (node.alias, name)
        assert node.address in seen[node.alias, "interface"]["what"]
    assert "the same" in seen["all", "data"]["what"]
    assert bed.wait_clean(home=True) == []


def test_an_image_that_nobody_has_is_a_failure(bed_cli: Cli) -> None:
    found = examined(bed_cli, job(bed_cli, image={"ref": "launcher-bed-trian"}), code=3)["all", "image"]
    assert found["what"].startswith("image launcher-bed-trian was not found on node1, node2")
    assert "cannot pull it" in found["what"]
    assert examined(bed_cli, job(bed_cli), code=0)["all", "image"]["level"] == "ok"


def test_every_unreachable_node_is_reported(bed_cli: Cli) -> None:
    names = {
        "refused": "reachable",
        "no-such-host": "reachable",
        "unknown-host-key": "host key",
        "changed-host-key": "host key",
        "wrong-key": "login",
        "node1-nodocker": "engine rights",
    }
    seen = examined(bed_cli, "node2", *names, code=3)
    assert {alias: name for (alias, name), check in seen.items() if check["level"] == "fail"} == names
    assert seen["node2", "engine"]["level"] == "ok"


def test_mounts_data_port_and_shared_memory(bed_cli: Cli, bed: Bed) -> None:
    one, two = bed.nodes[:2]
    bed.sh(one, "mkdir -p /srv/here /srv/data /srv/closed; chmod 700 /srv/closed; echo abc > /srv/data/x")
    bed.sh(two, "mkdir -p /srv/data /srv/closed; echo abd > /srv/data/x")
    bed.docker(
        one, "run", "-d", "--name", "squatter", "--network", "host", "launcher-bed-train", "python3", "-c",
        # REUSEADDR: an earlier run's connections to this port may still be in TIME_WAIT
        "import socket,time; s=socket.socket(); s.setsockopt(1,2,1); s.bind(('',29500)); s.listen(); time.sleep(90)",
    )  # fmt: skip
    listening = "grep -q ':733C 00000000:0000 0A' /proc/net/tcp"  # 29500
    bed.sh(one, f'timeout 30 sh -c "until {listening}; do sleep 0.1; done"')
    mounts = {"/srv/here": "/here:ro", "/srv/data": "/data:ro", "/srv/closed": "/closed"}
    try:
        with faults.small_shm(bed, two):
            seen = examined(bed_cli, job(bed_cli, mounts=mounts, port=29500), code=3)
    finally:
        bed.docker(one, "rm", "-f", "squatter")
        for node in (one, two):
            bed.sh(node, "rm -rf /srv/here /srv/data /srv/closed")
    assert "/srv/here does not exist" in seen["node2", "mount"]["what"]
    assert "/srv/closed is not readable" in seen["node1", "mount"]["what"]
    # The same names and sizes, but different content.
    assert seen["all", "data"]["level"] == "warn"
    assert "differs between nodes" in seen["all", "data"]["what"]
    assert "29500" in seen["node1", "port"]["what"]
    assert (seen["node1", "port"]["level"], seen["node2", "shared memory"]["level"]) == ("fail", "warn")


def test_a_mount_source_that_no_node_has_is_not_called_the_same_data(bed_cli: Cli) -> None:
    done = bed_cli("doctor", job(bed_cli, mounts={"/srv/nowhere": "/nowhere:ro"}), "--json", code=3)
    about = [check for check in json.loads(done.stdout)["checks"] if "/srv/nowhere" in check["what"]]
    assert [(check["node"], check["name"], check["level"]) for check in about] == [
        ("node1", "mount", "fail"),
        ("node2", "mount", "fail"),
    ]


def test_a_firewall_between_the_nodes_is_found(bed_cli: Cli, bed: Bed) -> None:
    with faults.blocked_port(bed, bed.nodes[0], 29500):
        seen = examined(bed_cli, job(bed_cli), code=3)
    assert "198.18" in seen["node2", "network"]["what"]
    assert "firewall" in seen["node2", "network"]["fix"]
    with faults.blocked_port(bed, bed.nodes[1], 60999):  # of those that gloo and NCCL use
        seen = examined(bed_cli, job(bed_cli), code=3)
    assert "60999" in seen["node1", "network"]["what"]
    assert ("node1", "container") not in seen
    with faults.partition(bed, *bed.nodes[:2]):
        seen = examined(bed_cli, job(bed_cli), code=3)
    assert seen["node2", "network"]["level"] == "fail"
    assert seen["node1", "rendezvous"]["level"] == "fail"


def test_no_engine_and_missing_gpus(bed_cli: Cli, bed: Bed) -> None:
    with faults.without_engine(bed, bed.nodes[1]):
        seen = examined(bed_cli, job(bed_cli, gpus=2), code=3)
    assert seen["node2", "engine"]["level"] == "fail"
    assert "2 GPUs requested" in seen["node1", "gpus"]["what"]


def test_the_text_output_includes_the_fixes(bed_cli: Cli) -> None:
    output = bed_cli("doctor", "node1", "wrong-key", code=3).stdout
    assert "FAIL wrong-key" in output
    assert "->" in output
    assert "1 failure\n" in output


def test_what_an_engine_refuses_is_found_and_nothing_is_left(bed_cli: Cli, bed: Bed) -> None:
    seen = examined(bed_cli, job(bed_cli, docker={"devices": ["/dev/no-such-device"]}), code=3)
    for node in bed.nodes[:2]:
        assert seen[node.alias, "container"]["level"] == "fail"
        assert "/dev/no-such-device" in seen[node.alias, "container"]["what"]
    assert bed.wait_clean(home=True) == []
