"""Data on the nodes of the bed: pushed, listed, verified, repaired, removed; and in a job."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job

pytestmark = [pytest.mark.bed, pytest.mark.timeout(300)]
MIB = 1 << 20
NODES = ("--nodes", "node1,node2")
IMAGE = ("--image", "launcher-bed-train")


def make_data(folder: Path, size: int = 3 * MIB) -> Path:
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "images.tar").write_bytes(os.urandom(size))
    (folder / "labels.txt").write_text("cat\n")
    return folder


def test_data_is_pushed_listed_verified_repaired_and_removed(bed_cli: Cli, bed: Bed) -> None:
    make_data(bed_cli.cwd / "pets")
    done = json.loads(bed_cli("data", "push", "./pets", *NODES, *IMAGE, "--json").stdout)
    assert 3 * MIB < done["sent"] < 1.05 * 3 * MIB, "one copy leaves the source"
    assert set(done["paths"]) == {"node1", "node2"}
    listed = json.loads(bed_cli("data", "ls", *NODES, "--json").stdout)
    assert [(copy["node"], copy["whole"], copy["size"]) for copy in listed] == [
        ("node1", True, 3 * MIB + 4),
        ("node2", True, 3 * MIB + 4),
    ]
    name = done["content"][:12]
    assert bed_cli("data", "verify", "./pets", *NODES).stdout.count("is whole") == 2
    path = done["paths"]["node2"]
    bed.sh(bed.nodes[1], f"printf x | dd of={path}/train/images.tar bs=1 seek={2 * MIB} conv=notrunc")
    found = bed_cli("data", "verify", name, *NODES, code=3).stderr
    assert "train/images.tar" in found
    (advised,) = re.findall("-> .*, run: launcher (data push .*/pets --nodes node2 .*)", found)
    repaired = json.loads(bed_cli("data", "push", "./pets", *NODES, *IMAGE, "--json").stdout)
    assert repaired["content"] == done["content"]
    assert repaired["received"] == {"node1": 0, "node2": MIB + 4}, "only the damaged piece is sent again, from node1"
    assert repaired["sent"] < MIB / 4
    assert bed_cli("data", "verify", name, *NODES).stdout.count("is whole") == 2
    assert "nothing had to be sent" in bed_cli(*shlex.split(advised)).stdout
    mounted = f"{done['paths']['node1']}:/d:ro"
    bed.docker(bed.nodes[0], "create", "--name", "user", "-v", mounted, "launcher-bed-train", "true")
    refused = bed_cli("data", "rm", name, *NODES, code=3).stderr
    assert "is mounted in container user" in refused
    bed.docker(bed.nodes[0], "rm", "user")
    bed_cli("data", "rm", name, "--nodes", "node1")
    assert json.loads(bed_cli("data", "ls", *NODES, "--json").stdout) == []


def test_a_jobs_data_is_on_every_node_before_the_start_and_cannot_be_written(bed_cli: Cli, bed: Bed) -> None:
    """Data from a node, which uses it in place, and a file from this machine."""
    bed.sh(bed.nodes[0], "mkdir -p ~/pets && echo cat >~/pets/labels.txt", user="trainer")
    (bed_cli.cwd / "words.txt").write_text("hello\n")
    script = "cat /data/pets/labels.txt /data/words.txt; ! touch /data/pets/new 2>/dev/null && echo read only"
    data = {
        "pets": {"from": "node1:~/pets", "at": "/data/pets"},
        "words": {"from": "words.txt", "at": "/data/words.txt"},
    }
    job = bed_cli.job("pets", **bed_job(run={"command": ["sh", "-c", script]}, gpus="none", data=data))
    bed_cli("up", job)
    for node in ("node1", "node2"):
        printed = bed_cli("logs", "--node", node, "--no-follow").stdout
        assert [word in printed for word in ("cat", "hello", "read only")] == [True] * 3, printed
    listed = json.loads(bed_cli("data", "ls", *NODES, "--json").stdout)
    assert sorted((copy["node"], copy["source"].rpartition("/")[2]) for copy in listed) == [
        ("node1", "words.txt"),
        ("node2", "pets"),
        ("node2", "words.txt"),
    ]
    bed.sh(bed.nodes[0], "rm -r ~/pets", user="trainer")


@pytest.mark.slow
def test_nodes_reachable_only_by_ssh_get_the_data_from_this_machine(bed_cli: Cli, bed: Bed) -> None:
    source = make_data(bed_cli.cwd / "pets")
    rule = "INPUT -p tcp --syn ! --dport 22 -i eth0 -j DROP"
    for node in bed.nodes[:2]:
        bed.sh(node, f"iptables -I {rule}")
    try:
        done = bed_cli("data", "push", source, *NODES, *IMAGE, "--json")
    finally:
        for node in bed.nodes[:2]:
            bed.sh(node, f"iptables -D {rule}")
    assert set(json.loads(done.stdout)["paths"]) == {"node1", "node2"}
    assert "is not reachable from the other nodes: sending from this machine" in done.stderr
