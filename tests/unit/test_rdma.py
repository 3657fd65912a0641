"""RDMA ports of a node, read from trees of sysfs by the script of all facts. Each file of rdma/ names its source."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.model import rdma
from launcher.model.facts import EngineFacts, Gpu, Interface, NodeFacts
from launcher.model.rdma import Gid, Port
from launcher.node.facts import parse, script
from launcher.planning.rdma import between, choose, of_node
from tests.unit.test_plan import CASES, job, planned
from tests.unit.test_plan import node as planned_node

TREES = Path(__file__).with_name("rdma")


def read(folder: Path, name: str, net: str = "", more: str = "") -> NodeFacts:
    """Return the facts of this machine with the recorded files. net, more: files of /sys/class/net and infiniband."""
    for kind, text in (("infiniband", (TREES / f"{name}.txt").read_text() + more), ("net", net)):
        for line in text.splitlines():
            path, _, value = line.partition(" ")
            if not line.startswith("#"):
                file = folder / kind / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(f"{value}\n" if value else "")
    text = script().replace("/sys/class/infiniband", f"{folder}/infiniband").replace("/sys/class/net", f"{folder}/net")
    done = subprocess.run(["sh", "-c", text], capture_output=True, check=True, timeout=60)
    return parse(done.stdout).node


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "connectx_roce",
            [("mlx5_0", "ACTIVE", 200.0, True, True, "ens1np0", (Gid(3, "RoCE v2", "11.0.0.72", "ens1np0"),))],
        ),
        (
            "connectx_infiniband",
            [("mlx5_0", "ACTIVE", 400.0, False, True, "", ()), ("mlx5_1", "DOWN", 40.0, True, True, "ens2", ())],
        ),
        (
            "spark_twins",
            [
                ("roceP2p1s0f0", "ACTIVE", 200.0, True, True, "enP2p1s0f0np0", ()),
                ("roceP2p1s0f1", "DOWN", 40.0, True, True, "enP2p1s0f1np1", ()),
                (
                    "rocep1s0f0",
                    "ACTIVE",
                    200.0,
                    True,
                    True,
                    "enp1s0f0np0",
                    (Gid(3, "RoCE v2", "192.168.100.10", "enp1s0f0np0"),),
                ),
                ("rocep1s0f1", "DOWN", 40.0, True, True, "enp1s0f1np1", ()),
            ],
        ),
        (
            "broadcom",
            [
                ("bnxt_re0", "ACTIVE", 100.0, True, False, "ens3f0np0", (Gid(3, "RoCE v2", "10.0.0.5", "ens3f0np0"),)),
                ("bnxt_re1", "DOWN", 2.5, True, False, "ens3f1np1", ()),
            ],
        ),
        ("none", []),
    ],
)
def test_the_ports_of_a_machine(name: str, expected: list[object], tmp_path: Path) -> None:
    def described(port: Port) -> object:
        return port.device, port.state, port.rate, port.ethernet, port.connectx, port.interface, port.addresses

    assert [described(port) for port in read(tmp_path, name).rdma] == expected


def card(device: str, link: str, *gids: tuple[str, str, str], state: str = "4: ACTIVE", extra: str = "") -> str:
    """Return the files of a ConnectX with a port, as `read` writes them. gids: address, type, interface."""
    files = {"node_type": "1: CA", "device/vendor": "0x15b3", "sys_image_guid": "1", "ports/1/state": state}
    files |= {"ports/1/link_layer": link, "ports/1/phys_state": "5: LinkUp", "ports/1/rate": "100 Gb/sec (4X EDR)"}
    for index, (address, kind, interface) in enumerate(gids):
        entries = {"gids": address, "gid_attrs/types": kind, "gid_attrs/ndevs": interface}
        files |= {f"ports/1/{name}/{index}": text for name, text in entries.items()}
    return "".join(f"{device}/{path} {text}\n" for path, text in files.items()) + (
        f"{device}/{extra}\n" if extra else ""
    )


LOCAL, IPV4 = "fe80:0000:0000:0000:0e42:a1ff:fe9a:6766", "0000:0000:0000:0000:0000:ffff:0a00:0005"


def test_a_bond_is_a_device_whose_addresses_may_be_on_a_vlan(tmp_path: Path) -> None:
    gids = (LOCAL, "IB/RoCE v1", "bond0"), (LOCAL, "RoCE v2", "bond0"), (IPV4, "RoCE v2", "bond0.503")
    facts = read(tmp_path, "none", more=card("mlx5_bond_0", "Ethernet", *gids))
    [port] = facts.rdma
    assert (port.device, port.interface, port.connectx) == ("mlx5_bond_0", "bond0", True)
    assert port.addresses == (Gid(2, "RoCE v2", "10.0.0.5", "bond0.503"),)
    interfaces = (Interface("bond0", mtu=9000, addresses=()), Interface("bond0.503", ("10.0.0.5/24",), mtu=1500))
    other = replace(facts, name="b", interfaces=(Interface("bond0.503", ("10.0.0.6/24",), mtu=9000),))
    [check] = between([replace(facts, name="a", interfaces=interfaces), other])
    assert check.what == "differs in 10.0.0.0/24: 1500 on a bond0.503; 9000 on b bond0.503"


def test_virtual_functions_are_no_twins_and_are_not_used(tmp_path: Path) -> None:
    """As in SR-IOV: they are active, but their addresses are in the virtual machines."""
    physical = card("mlx5_0", "Ethernet", (LOCAL, "RoCE v2", "ens1"), (IPV4, "RoCE v2", "ens1"))
    virtual = [
        card(f"mlx5_{number}", "Ethernet", (LOCAL, "RoCE v2", f"ens1v{number}"), extra="device/physfn")
        for number in range(1, 200)
    ]
    facts = replace(read(tmp_path, "none", more=physical + "".join(virtual)), infiniband=True, peermem=True)
    assert len(facts.rdma) == 200
    assert [port.device for port in facts.rdma if not port.virtual] == ["mlx5_0"]
    assert all(port.connectx for port in facts.rdma)
    assert [*of_node(facts)] == []
    [[chosen], _] = choose([facts, facts], "2.14.1")
    assert (chosen.name, chosen.value) == ("NCCL_IB_HCA", "=mlx5_0:1")
    assert chosen.why.startswith("not mlx5_1:1, mlx5_10:1, mlx5_100:1, mlx5_101:1 and 195 more: NCCL would")


@pytest.mark.parametrize("module", ["nvidia_peermem", "nv_peer_mem"])
def test_both_modules_for_gpudirect_are_known(module: str, tmp_path: Path) -> None:
    (tmp_path / module).mkdir()
    text = script().replace("/sys/module/", f"{tmp_path}/").replace("/proc/driver/nvidia/version", "/nonexistent")
    done = subprocess.run(["sh", "-c", text], capture_output=True, check=True, timeout=60)
    assert parse(done.stdout).node.peermem


def test_amazons_cards_are_named_in_the_plan_but_not_chosen(tmp_path: Path) -> None:
    more = card("rdmap16s27", "Unspecified").replace("0x15b3", "0x1d0f").replace("1: CA", "7: <unknown>")
    facts = [replace(having("none", rank=rank), rdma=read(tmp_path, "none", more=more).rdma) for rank in range(2)]
    assert [*of_node(facts[0])] == []
    plan = planned(job(2), facts, CASES["docker_2_nodes_gpus"][2])
    assert [each.rdma for each in plan.nodes] == [("rdmap16s27",)] * 2
    assert "NCCL_IB_HCA" not in plan.nodes[0].container.env


def test_the_speed_of_an_interface(tmp_path: Path) -> None:
    net = "lo/mtu 65536\nlo/ifindex 1\nlo/iflink 1\nlo/speed\n"
    assert all(i.mtu == 65536 and i.speed == 0 for i in read(tmp_path / "lo", "none", net).interfaces if i.name == "lo")
    fast = net.replace("lo/speed", "lo/speed 10000")
    assert all(i.speed == 10000 for i in read(tmp_path / "fast", "none", fast).interfaces if i.name == "lo")
    veth = fast.replace("iflink 1", "iflink 7")  # it reports a kernel constant
    assert all(i.speed == 0 for i in read(tmp_path / "veth", "none", veth).interfaces if i.name == "lo")


def having(*names: str, rank: int = 0, **changes: object) -> NodeFacts:
    """Return a node with the ports of these trees and a GPU."""
    lines = [line for name in names for line in (TREES / f"{name}.txt").read_text().splitlines() if line[0] != "#"]
    pairs = [line.partition(" ") for line in lines]
    text = "".join(f"./{path}:{value}\n" for path, _, value in pairs if value.strip("0:"))
    text += "".join(f"./{path.rpartition('/')[0]}\n" for path, _, _ in pairs if "gid_attrs/types" in path)
    known: dict[str, object] = {"infiniband": True, "peermem": True, "rdma": rdma.parse(text)}
    return replace(planned_node(rank, gpus=1), **{**known, **changes})  # type: ignore[arg-type]


def settings(*facts: NodeFacts, torch: str = "2.14.1") -> list[dict[str, str]]:
    return [{each.name: each.value for each in own} for own in choose(facts, torch)]


def test_nccl_is_told_nothing_where_its_own_choice_is_right() -> None:
    for name in ("connectx_roce", "connectx_infiniband", "broadcom", "none"):
        assert settings(having(name), having(name, rank=1)) == [{}, {}], name
    assert settings(having("spark_twins"), having("none", rank=1)) == [{}, {}]  # over TCP
    assert settings(having("spark_twins", infiniband=False), having("spark_twins")) == [{}, {}]
    assert settings(having("spark_twins", "broadcom"), having("spark_twins")) == [{}, {}]  # not a ConnectX


def test_a_port_that_would_fail_is_left_out_on_its_node_only() -> None:
    twins = {"NCCL_IB_HCA": "=rocep1s0f0:1"}
    assert settings(having("spark_twins"), having("spark_twins", rank=1)) == [twins, twins]
    assert settings(having("spark_twins"), having("connectx_roce", rank=1)) == [twins, {}]
    mixed = having("connectx_infiniband")
    roce = replace(having("connectx_roce").rdma[0], device="mlx5_7")
    mixed = replace(mixed, rdma=(mixed.rdma[0], roce))
    assert settings(mixed, mixed) == [{"NCCL_IB_HCA": "=mlx5_0:1"}] * 2  # InfiniBand is what both have
    assert settings(mixed, having("connectx_roce")) == [{"NCCL_IB_HCA": "=mlx5_7:1"}, {}]
    both = replace(mixed, rdma=(mixed.rdma[0], replace(roce, device=mixed.rdma[0].device, number=2)))  # of one card
    [[chosen], _] = choose([both, both], "2.14.1")
    assert (chosen.value, chosen.why[:13]) == ("=mlx5_0:1", "not mlx5_0:2:")


def test_infiniband_on_one_node_and_roce_on_the_other_is_said_and_not_used() -> None:
    facts = [having("connectx_roce"), having("connectx_infiniband", rank=1)]
    assert settings(*facts) == [{"NCCL_IB_DISABLE": "1"}] * 2
    [check] = between(facts)
    assert check.what == (
        "gpu-1 has InfiniBand, gpu-0 RoCE: NCCL cannot connect them, so `up` makes it use TCP (NCCL_IB_DISABLE: 1)"
    )
    assert "LINK_TYPE" in check.fix
    plan = planned(job(2), facts, CASES["docker_2_nodes_gpus"][2])
    assert plan.nodes[0].container.env["NCCL_IB_DISABLE"] == "1"
    said = "NCCL_IB_DISABLE is set to 1: gpu-1 has InfiniBand, gpu-0 RoCE, which do not reach each other"
    assert f"gpu-0: {said}" in plan.warnings
    assert {each.rdma for each in plan.nodes} == {()}  # else `gradients:` would tell to use them
    alike = [having("connectx_roce"), having("connectx_roce", rank=1)]
    assert [*between(alike)] == []
    assert [*between([facts[0], having("none", rank=1)])] == []  # NCCL itself uses TCP


def test_what_is_known_of_gpudirect_is_in_the_plan() -> None:
    case = CASES["docker_2_nodes_gpus"][2]
    consumer = (Gpu(0, "GPU-a", "NVIDIA GeForce RTX 4090", 24_000, "580.95"),)
    shared = (Gpu(0, "GPU-a", "NVIDIA GB10", 122_000, "580.95", shared=True),)
    for changes, wanted in (
        ({"gpus": consumer}, "never"),
        ({"gpus": shared}, "never"),
        ({"peermem": True}, "loaded"),
        ({"peermem": False}, ""),
    ):
        facts = [having("connectx_roce", rank=rank, **changes) for rank in range(2)]
        assert {each.gpudirect for each in planned(job(2), facts, case).nodes} == {wanted}


def test_an_nccl_that_takes_the_first_address_is_told_the_right_one() -> None:
    """NCCL 2.20 of torch 2.4; later ones find it, and the index may change while they run."""
    second = having("connectx_roce", rank=1)
    port = second.rdma[0]
    moved = replace(second, rdma=(replace(port, table=(*port.table[:3], Gid(5, "RoCE v2", "11.0.0.73"))),))
    assert settings(having("connectx_roce"), moved, torch="2.4.1") == [
        {"NCCL_IB_GID_INDEX": "3"},
        {"NCCL_IB_GID_INDEX": "5"},
    ]
    assert settings(having("connectx_roce"), moved, torch="") == [{}, {}]  # NCCL's version is unknown
    two = replace(moved, rdma=(*moved.rdma, replace(port, device="mlx5_1")))
    assert settings(having("connectx_roce"), two, torch="2.4.1")[1] == {}  # no index is right for both ports


def test_the_plan_has_the_settings_and_says_why_but_never_over_the_jobs() -> None:
    _, _, image = CASES["docker_2_nodes_gpus"]
    facts = [having("spark_twins", rank=rank) for rank in range(2)]
    plan = planned(job(2), facts, image)
    assert [each.container.env["NCCL_IB_HCA"] for each in plan.nodes] == ["=rocep1s0f0:1"] * 2
    said = [warning for warning in plan.warnings if "NCCL_IB_HCA" in warning]
    assert said[0].startswith("gpu-0: NCCL_IB_HCA is set to =rocep1s0f0:1: not roceP2p1s0f0")
    assert len(said) == 2
    own = planned(job(2, env={"NCCL_IB_HCA": "mlx5"}), facts, image)
    assert [each.container.env["NCCL_IB_HCA"] for each in own.nodes] == ["mlx5"] * 2
    assert not [warning for warning in own.warnings if "NCCL_IB_HCA" in warning]
    assert "NCCL_IB_HCA" not in planned(job(2, gpus="none"), facts, image).nodes[0].container.env
    assert "NCCL_IB_HCA" not in planned(job(1), facts[:1], image).nodes[0].container.env


ENGINE = EngineFacts("e", "27.0", True, (), (), "/var/lib/docker")
V1 = replace(having("connectx_roce").rdma[0], gids=("IB/RoCE v1",), table=())


@pytest.mark.parametrize(
    ("facts", "what", "fix"),
    [
        (
            having("spark_twins"),
            "roceP2p1s0f0 (enP2p1s0f0np0) has no IPv4 address, and its twin rocep1s0f0 has one: half of",
            "sudo ip addr add ADDRESS/24 dev enP2p1s0f0np0",
        ),
        (
            having("none", rdma=(Port("mlx5_0", 1, "DOWN", "Polling", card="a"),)),
            "mlx5_0 is down (Polling)",
            "check its cable",
        ),
        (
            having("none", rdma=(Port("mlx5_0", 1, "DOWN", "Disabled", card="a", ethernet=True, interface="ens1"),)),
            "mlx5_0 (ens1) is down (Disabled)",
            "sudo ip link set dev ens1 up; check its cable",
        ),
        (
            having("none", rdma=(Port("mlx5_0", 1, "INIT", "LinkUp", card="a"), Port("mlx5_1", 1, "ACTIVE", card="a"))),
            "mlx5_0 has a link, but no subnet manager has configured it (INIT)",
            "start the subnet manager",
        ),
        (having("none", rdma=(V1,)), "mlx5_0 (ens1np0) has no RoCE v2 GID", "give its interface an address"),
        (
            having("connectx_roce", infiniband=False, engine=ENGINE),
            "mlx5_0 is active, but there is no /dev/infiniband",
            "sudo modprobe ib_uverbs; its files must be open to the user of the rootless engine",
        ),
        (having("connectx_roce", peermem=False), "nvidia_peermem is not loaded", "sudo modprobe nvidia_peermem"),
    ],
)
def test_doctor_names_each_problem_of_a_port_with_its_fix(facts: NodeFacts, what: str, fix: str) -> None:
    [check] = of_node(facts)
    assert what in check.what
    assert check.fix.startswith(fix)


def test_healthy_machines_have_no_warning() -> None:
    for name in ("connectx_roce", "connectx_infiniband", "broadcom", "none"):
        assert [*of_node(having(name))] == [], name
    unknown = having("none", rdma=(Port("mlx5_0", 1),))  # its files could not be read
    assert [*of_node(unknown)] == []
    consumer = (Gpu(0, "GPU-a", "NVIDIA GeForce RTX 4090", 24_000, "580.95"),)
    assert [*of_node(having("connectx_roce", peermem=False, gpus=consumer))] == []  # it has no GPUDirect
    shared = (Gpu(0, "GPU-a", "NVIDIA GB10", 122_000, "580.95", shared=True),)
    assert [*of_node(having("connectx_roce", peermem=False, gpus=shared))] == []  # it has no GPUDirect


def test_doctor_names_mtus_that_differ_along_a_path() -> None:
    def on(rank: int, mtu: int, network: str = "11.0.0") -> NodeFacts:
        interface = Interface("ens1np0", (f"{network}.{rank + 72}/24", "fe80::1/64"), mtu=mtu)
        return having("connectx_roce", rank=rank, interfaces=(interface,))

    [check] = between([on(0, 9000), on(1, 1500)])
    assert check.what == "differs in 11.0.0.0/24: 1500 on gpu-1 ens1np0; 9000 on gpu-0 ens1np0"
    assert [*between([on(0, 9000), on(1, 9000)])] == []
    assert [*between([on(0, 9000), on(1, 1500, "12.0.0")])] == []  # no path between them
