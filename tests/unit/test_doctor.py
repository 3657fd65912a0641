"""Checks of `launcher doctor`: the port that it tries between two nodes, disks, Docker of a snap, machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.errors import NodesFailed
from launcher.model.facts import EngineFacts, Interface, MountedAs
from launcher.planning.allotment import refuse_unfit
from launcher.planning.checks import Level, alike, of_node, output
from launcher.run.doctor import high_port
from tests.unit.test_plan import job, node

ENGINE = EngineFacts("e", "27.0", False, (), (), "/var/lib/docker", 1 << 40)


@pytest.mark.parametrize(
    ("text", "listening", "port"),
    [
        ("32768\t60999\n", (), 60999),
        ("32768\t60999\n", (22, 60999, 60998), 60997),
        ("50000 50009", (), 50009),
        ("50000 50000", (50000,), 50000),
        ("", (), 60999),
        ("0 70000", (), 60999),
        ("welcome 1 2 3", (), 60999),
    ],
)
def test_a_port_of_the_nodes_own_range_on_which_nothing_listens(
    text: str, listening: tuple[int, ...], port: int
) -> None:
    assert high_port(text, listening) == port


def test_what_is_wrong_with_the_disk_of_the_output_folders() -> None:
    fine = node(0, engine=ENGINE)
    assert output(fine) == []
    [full] = output(replace(fine, output_inodes=0))
    assert (full.level, full.what) == (Level.FAIL, "the disk of /home/ada/.launcher has no inodes left (`df -i`)")
    noexec = replace(fine, output_mount=MountedAs("ext4", noexec=True))
    script = job(1, run={"command": ["./train.sh"]})
    jobs = (None, job(1), job(1, run={"command": ["bash", "./train.sh"]}), script)
    assert [output(noexec, each)[0].level for each in jobs] == [*[Level.WARN] * 3, Level.FAIL]
    with pytest.raises(NodesFailed, match="is on a disk that is mounted noexec"):
        refuse_unfit(script, [noexec])
    network = replace(fine, output_mount=MountedAs("nfs4"))
    [shared] = output(network)
    assert (shared.level, "root_squash" in shared.what) == (Level.WARN, True)
    assert output(replace(network, engine=replace(ENGINE, rootless=True))) == []
    assert output(replace(network, engine=None)) == []  # plain processes are the user's
    images = replace(fine, engine=replace(ENGINE, disk_free=1 << 40, inodes_free=0))
    assert [check.level for check in of_node(images) if check.name == "disk"] == [Level.FAIL]


def test_docker_of_a_snap_is_refused_before_anything_is_started() -> None:
    """canonical/docker-snap issues 334 and 189."""
    snap = node(0, engine=replace(ENGINE, root_dir="/var/snap/docker/common/var-lib-docker"))
    with pytest.raises(NodesFailed, match="Docker was installed by snap, which cannot mount hidden folders") as refused:
        refuse_unfit(job(1), [snap])
    assert "Docker's own packages" in str(refused.value)
    assert [check.level for check in of_node(snap) if check.name == "engine"] == [Level.FAIL]


def test_two_names_of_one_machine_are_told() -> None:
    interfaces = (Interface("eth0", ("10.0.0.5/24",)),)
    first = replace(node(0, engine=ENGINE), boot="a", interfaces=interfaces)
    second = replace(first, name="gpu-b", host="gpu-b")
    with pytest.raises(NodesFailed, match="gpu-0 and gpu-b are the same machine") as refused:
        refuse_unfit(job(2), [first, second])
    assert "`processes` sets its number of workers" in str(refused.value)
    assert [check.level for check in alike([first, second])] == [Level.FAIL]
    others = (
        replace(
            second, interfaces=(Interface("eth0", ("10.0.0.6/24",)),)
        ),  # containers, or clones of a virtual machine
        replace(second, boot="b"),
        replace(second, boot=""),
    )
    for other in others:
        refuse_unfit(job(2), [first, other])
    refuse_unfit(job(2), [replace(each, interfaces=()) for each in (first, second)])  # their addresses are not known
    processes = [replace(each, host="local") for each in (first, second)]
    refuse_unfit(job(2, runtime="process", nodes=["local", "local"], image=None), processes)
    assert alike(processes) == []
