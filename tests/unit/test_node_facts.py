"""Parsing of a node's facts, whatever the node sends."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.model.facts import Gpu, Interface, MountedAs, Route
from launcher.node.facts import free_inodes, free_space, mounted_as, parse, script

OUTPUT = """Welcome to gpu-a!
@@time
1795261519.250000000

@@user
carol
1001
1002
1002 27 102

@@home
/home/carol

@@host
gpu-a
x86_64

@@cpus
64

@@memory
MemTotal:       527942812 kB
MemFree:        1 kB

@@shm
Filesystem     1024-blocks  Used Available Capacity Mounted on
tmpfs               65536     0     65536       0% /dev/shm

@@docker_disk
Filesystem     1024-blocks      Used Available Capacity Mounted on
/dev/nvme0n1p2   959786032 100000000 811000000      11% /

@@addresses
1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever
2: eno1    inet 10.0.0.5/24 brd 10.0.0.255 scope global eno1\\       valid_lft forever
2: eno1    inet6 fe80::1/64 scope link \\       valid_lft forever
3: tun0    inet 10.8.0.2 peer 10.8.0.1/32 scope global tun0\\       valid_lft forever
4: bond0.7@bond0    inet 10.7.0.5/16 scope global bond0.7\\       valid_lft forever

@@routes
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eno1\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0
eno1\t0000000A\t00000000\t0001\t0\t0\t101\t00FFFFFF\t0\t0\t0
dead\t0000010A\t00000000\t0000\t0\t0\t0\t00FFFFFF\t0\t0\t0

@@tcp
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1
   1: 0500000A:733C 0600000A:C350 01 00000000:00000000 00:00000000 00000000     0        0 2
  sl  local_address                         remote_address                        st
   0: 00000000000000000000000000000000:733C 00000000000000000000000000000000:0000 0A 00000000:00000000 00

@@output_disk
Filesystem     1024-blocks      Used Available Capacity Mounted on
/dev/md0        1000000000 100000000  90000000      53% /home

@@output_inodes
Filesystem         Inodes   IUsed     IFree IUse% Mounted on
/dev/md0       1000000000 1000000         0  100% /home

@@output_mount
/dev/md0 /home xfs rw,nosuid,noexec,relatime 0 0

@@boot
0f7a4bd2-5b1c-4d0e-9a3f-000000000001

@@infiniband
yes

@@gpus
0, GPU-8f3a, NVIDIA H100 80GB HBM3, 81559, 580.65.06
1, GPU-9b11, NVIDIA H100 80GB HBM3, 81559, 580.65.06
Unable to determine the device handle for GPU 0000:02:00.0: Unknown Error

@@end
"""


def test_complete_output() -> None:
    seen = parse(OUTPUT.encode())
    assert seen.complete
    facts = seen.node
    assert (facts.user, facts.uid, facts.gid, facts.groups) == ("carol", 1001, 1002, (1002, 27, 102))
    assert (facts.home, facts.hostname, facts.arch, facts.cpus) == ("/home/carol", "gpu-a", "x86_64", 64)
    assert facts.memory == 527942812 * 1024
    assert (facts.shm_size, seen.docker_disk_free) == (64 << 20, 811000000 * 1024)
    assert facts.output_free == 90000000 * 1024
    assert (facts.output_inodes, facts.output_mount) == (0, MountedAs("xfs", noexec=True))
    assert facts.boot == "0f7a4bd2-5b1c-4d0e-9a3f-000000000001"
    assert facts.interfaces == (
        Interface("lo", ("127.0.0.1/8",)),
        Interface("eno1", ("10.0.0.5/24", "fe80::1/64")),
        Interface("tun0", ("10.8.0.2/32",)),
        Interface("bond0.7", ("10.7.0.5/16",)),
    )
    assert facts.routes == (Route("0.0.0.0/0", "eno1", 100), Route("10.0.0.0/24", "eno1", 101))
    assert facts.listening == (22, 29500)
    assert facts.infiniband
    assert facts.gpus == (
        Gpu(0, "GPU-8f3a", "NVIDIA H100 80GB HBM3", 81559, "580.65.06"),
        Gpu(1, "GPU-9b11", "NVIDIA H100 80GB HBM3", 81559, "580.65.06"),
    )


def test_a_file_system_that_counts_no_inodes_has_no_last_one() -> None:
    head = "Filesystem     Inodes IUsed IFree IUse% Mounted on\n"
    assert free_inodes(f"{head}/dev/sda1           0     0     0     - /home\n") == -1  # Btrfs
    assert free_inodes(f"{head}/dev/sda1         100    58    42   58% /home\n") == 42
    assert free_inodes("") == -1


def test_routes_of_both_families() -> None:
    zero, up = "0" * 32, "00000001"
    lines = [
        f"fd00{'0' * 28} 40 {zero} 00 {zero} 00000100 00000001 00000000 {up}     eno1",
        f"{zero} 00 {zero} 00 fe80{'0' * 27}1 00000400 00000001 00000000 00000003     eno1",
        f"{zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200       lo",  # no default route: unreachable
    ]
    routes = parse(("@@routes\n" + "\n".join(lines) + "\n@@end\n").encode()).node.routes
    assert routes == (Route("fd00::/64", "eno1", 256), Route("::/0", "eno1", 1024))


def test_the_clock_is_compared_with_the_callers() -> None:
    assert parse(OUTPUT.encode(), now=1795261509.25).node.clock_offset == pytest.approx(10.0)


def test_without_ip_the_addresses_are_read_from_proc() -> None:
    trie = """@@addresses
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     |-- 10.0.0.5
        /32 host LOCAL
     |-- 10.0.0.255
        /32 link BROADCAST
     |-- 127.0.0.1
        /32 host LOCAL
"""
    routes = OUTPUT[OUTPUT.index("@@routes") : OUTPUT.index("@@tcp")]
    assert parse((trie + routes).encode()).node.interfaces == (Interface("eno1", ("10.0.0.5/24",)),)


def test_this_machine_reports_its_facts() -> None:
    done = subprocess.run(["sh", "-c", script()], capture_output=True, check=True)
    assert parse(done.stdout).complete
    facts = parse(done.stdout).node
    assert facts.clock_offset > 1.7e9
    assert facts.cpus > 0
    assert facts.memory > 0
    assert any("127.0.0.1/8" in interface.addresses for interface in facts.interfaces)
    assert len(facts.boot) == 36
    assert facts.output_mount.kind


@pytest.mark.parametrize("cut", range(0, len(OUTPUT), 37))
def test_truncated_output_is_detected(cut: int) -> None:
    assert not parse(OUTPUT.encode()[:cut]).complete


@settings(max_examples=300)
@given(st.binary())
def test_any_output_is_handled(data: bytes) -> None:
    parse(data)
    free_space(data.decode("utf-8", "replace"))
    free_inodes(data.decode("utf-8", "replace"))
    mounted_as(data.decode("utf-8", "replace"))


TOKEN = st.one_of(
    st.text(max_size=12),
    st.integers().map(str),
    st.sampled_from(
        ["inet", "inet6", "peer", "0A", "/32 host LOCAL", "|-- 10.0.0.1", "MemTotal:", "1:", "9" * 5000, "²"]
    ),
    st.from_regex(r"[0-9A-F]{8}", fullmatch=True),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OUTPUT.split("@@")[1:]), st.lists(st.lists(TOKEN, max_size=12), max_size=6))))
def test_any_section_is_handled(sections: list[tuple[str, list[list[str]]]]) -> None:
    text = "".join(
        f"@@{real.splitlines()[0]}\n" + "".join(" ".join(tokens) + "\n" for tokens in lines) for real, lines in sections
    )
    parse(text.encode("utf-8", "surrogatepass"))
