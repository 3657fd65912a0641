"""Plans: the exact containers, variables and commands, compared with golden files.

After an intended change: UPDATE_GOLDEN=1 python -m pytest tests/unit/test_plan.py, then read the diff.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import LauncherError, NodesFailed, NodeUnfit, PlanInvalid
from launcher.job.models import Job
from launcher.model.container import Mount
from launcher.model.facts import EngineFacts, Gpu, ImageFacts, Interface, Launch, NodeFacts, Probe, Reach, Route
from launcher.model.plan import Plan, Rendezvous
from launcher.planning import build, checks, command, gpus
from launcher.planning.allotment import allot
from launcher.planning.offline import offline
from launcher.planning.rendezvous import candidates, choose, on_one_machine, source_address
from launcher.run.begin.start import _kit_of, kit

GOLDEN = Path(__file__).parent / "golden"
RUN = "job-20260131-120000-00aa"
MODERN = ImageFacts(
    reference="launcher/job:1",
    id="sha256:" + "1" * 64,
    python="python3",
    launch=Launch.RUN,
    flags=frozenset({"no_python", "rdzv_backend", "max_restarts", "log_dir"}),
    torch="2.14.1",
    entrypoint=("/opt/nvidia/nvidia_entrypoint.sh",),
)
TORCH_1_8 = dataclasses.replace(
    MODERN, python="python", launch=Launch.LAUNCH, flags=frozenset({"use_env", "no_python"}), torch="1.8.0a0"
)
TORCH_1_1 = dataclasses.replace(
    MODERN, python="python", launch=Launch.LAUNCH, flags=frozenset({"use_env"}), torch="1.1.0", entrypoint=()
)


def node(rank: int, *, gpus: int = 0, **changes: Any) -> NodeFacts:
    facts = NodeFacts(
        name=f"gpu-{rank}",
        host=f"gpu-{rank}",
        hostname=f"host{rank}",
        arch="x86_64",
        user="ada",
        uid=1001,
        gid=1002,
        groups=(1002, 999),
        home="/home/ada",
        cpus=16,
        memory=64 << 30,
        shm_size=32 << 30,
        clock_offset=0.01,
        interfaces=(
            Interface("lo", ("127.0.0.1/8",)),
            Interface("docker0", ("172.17.0.1/16",)),
            Interface(f"ens{rank}", (f"10.0.0.{rank + 10}/24",)),
        ),
        routes=(
            Route("0.0.0.0/0", f"ens{rank}"),
            Route("10.0.0.0/24", f"ens{rank}"),
            Route("172.17.0.0/16", "docker0"),
        ),
        listening=(22,),
        gpus=tuple(Gpu(i, f"GPU-{rank}{i}", "Tesla T4", 15360, "535.54") for i in range(gpus)),
        infiniband=False,
        engine=EngineFacts("e", "27.0", False, ("runc", "nvidia"), (), "/var/lib/docker", 1 << 40),
        ulimits=(("memlock", -1), ("stack", 67108864)),
    )
    return dataclasses.replace(facts, **changes)


def job(count: int = 2, **keys: Any) -> Job:
    return Job.model_validate(
        {
            "name": "job",
            "image": {"ref": "launcher/job:1"},
            "nodes": [f"gpu-{rank}" for rank in range(count)],
            "run": {"module": "train", "args": {"data": "/data/imagenet", "batch_size": 256, "amp": True}},
            "mounts": {"/data/imagenet": "/data/imagenet:ro"},
            "env": {"NCCL_DEBUG": "INFO"},
        }
        | keys
    )


def planned(a_job: Job, facts: list[NodeFacts], image: ImageFacts = MODERN) -> Plan:
    reached = [Probe(f.name, facts[0].name, "10.0.0.10", a_job.port, Reach.REFUSED) for f in facts[1:]]
    meeting = choose(facts, reached, a_job.port)
    return build.build(
        a_job,
        RUN,
        build.Prepared(allot(a_job, facts), image, meeting),
        code="c0de",
        owner="ada@laptop",
        created=1769860800,
    )


CASES = {
    "docker_1_node_cpu": (job(1), [node(0)], MODERN),
    "docker_1_node_4_gpus": (job(1), [node(0, gpus=4)], MODERN),
    "docker_2_nodes_cpu": (job(2), [node(0), node(1)], MODERN),
    "docker_2_nodes_gpus": (job(2, restarts=3, timeout="24h", env={}), [node(r, gpus=1) for r in range(2)], MODERN),
    "docker_8_nodes_8_gpus": (job(8), [node(r, gpus=8) for r in range(8)], MODERN),
    "docker_2_nodes_torch_1_8": (job(2), [node(r, gpus=2) for r in range(2)], TORCH_1_8),
    "docker_2_nodes_torch_1_1": (job(2), [node(r, gpus=2) for r in range(2)], TORCH_1_1),
    "docker_2_nodes_command": (job(2, run={"command": ["./go.sh", "--x"]}), [node(0), node(1)], MODERN),
    "docker_3_nodes_and_a_spare": (
        job(3, min_nodes=3, spares=["gpu-3"], hang_timeout="15m"),
        [node(r, gpus=1) for r in range(4)],
        MODERN,
    ),
    "docker_2_nodes_everything": (
        job(
            2,
            run={"script": "tools/main.py", "args": ["a", "b c"]},
            nodes=[{"host": "gpu-0", "gpus": [1]}, {"host": "gpu-1", "env": {"NCCL_DEBUG": "WARN"}}],
            gpus=1,
            resources={"memory": "64g", "cpus": 16, "shm": "16g"},
            docker={
                "ipc": "private",
                "extra_hosts": {"db": "10.0.0.9"},
                "devices": ["/dev/fuse"],
                "cap_add": ["SYS_NICE"],
            },
        ),
        [node(r, gpus=2, infiniband=True) for r in range(2)],
        MODERN,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_plan_equals_the_golden_file(name: str) -> None:
    text = planned(*CASES[name]).to_json() + "\n"
    golden = GOLDEN / f"{name}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_a_key_of_docker_that_is_left_at_an_empty_default_is_not_in_the_plan() -> None:
    """So the golden files do not change with a new key."""
    assert planned(job(1), [node(0)]).nodes[0].container.docker == {"ipc": "host", "devices": ()}


def test_min_nodes_requires_equal_numbers_of_workers() -> None:
    with pytest.raises(PlanInvalid, match="but they have: gpu-0 1, gpu-1 1, gpu-2 2"):
        planned(job(3, min_nodes=2), [node(0, gpus=1), node(1, gpus=1), node(2, gpus=2)])


def test_process_runtime_on_one_machine() -> None:
    two = Job.model_validate(
        {"name": "quick", "runtime": "process", "nodes": ["local", "local"], "run": {"module": "train"}}
    )
    facts = [
        node(0, gpus=2, name=f"local-{rank}", host="local", engine=None, python="/venv/bin/python", ulimits=())
        for rank in range(2)
    ]
    image = dataclasses.replace(MODERN, reference="", id="", python="/venv/bin/python", entrypoint=())
    prepared = build.Prepared(allot(two, facts), image, on_one_machine(2, 29500))
    plan = build.build(two, RUN, prepared, code="c", owner="o", created=1)
    text = plan.to_json() + "\n"
    golden = GOLDEN / "process_2_nodes.json"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert [n.container.env["CUDA_VISIBLE_DEVICES"] for n in plan.nodes] == ["GPU-00", "GPU-01"]


def test_the_command_for_an_old_torch_has_no_unknown_option() -> None:
    plan = planned(job(2), [node(0, gpus=2), node(1, gpus=2)], TORCH_1_1)
    argv = " ".join(plan.nodes[1].container.argv)
    assert "python -m torch.distributed.launch --nnodes 2 --node_rank 1 --nproc_per_node 2" in argv
    assert "--use_env -m train" in argv
    assert "rdzv" not in argv
    assert "--no_python" not in argv


def test_an_image_without_torch_is_refused_for_modules_but_not_for_commands() -> None:
    bare = dataclasses.replace(MODERN, launch=Launch.NONE, torch="")
    with pytest.raises(PlanInvalid, match=r"has no torch\.distributed"):
        planned(job(1), [node(0)], bare)
    processes = dataclasses.replace(bare, reference="", id="", python="/venv/bin/python")
    with pytest.raises(PlanInvalid, match=r"/venv/bin/python: has no torch\.distributed") as refused:
        planned(job(1, runtime="process", nodes=["local"], image=None), [node(0)], processes)
    assert refused.value.next_step == "install torch for this Python, or use run.command"
    assert planned(job(1, run={"command": ["true"]}), [node(0)], bare).master.container.argv[-1] == "true"


def test_the_address_in_the_network_that_all_nodes_share_is_used() -> None:
    facts = [node(0), node(1)]
    assert candidates(facts) == ("10.0.0.10",)
    meeting = choose(facts, [Probe("gpu-1", "gpu-0", "10.0.0.10", 29500, Reach.REFUSED)], 29500)
    assert meeting == Rendezvous("10.0.0.10", 29500, ("10.0.0.10", "10.0.0.11"), ("ens0", "ens1"), probed=True)


def test_an_address_of_another_machine_is_not_used() -> None:
    facts = [_with(rank, ("ens0", f"10.0.0.1{rank}/24"), ("ens1", "192.168.0.1/24")) for rank in (0, 1)]
    probes = [
        Probe("gpu-1", "gpu-0", "10.0.0.10", 29500, Reach.SILENT),
        Probe("gpu-1", "gpu-0", "192.168.0.1", 29500, Reach.OTHER),
    ]
    with pytest.raises(NodeUnfit) as caught:
        choose(facts, probes, 29500)
    assert "gpu-1 (10.0.0.10 silent, 192.168.0.1 other)" in str(caught.value)
    assert "address:" in str(caught.value)


@pytest.mark.parametrize("bridge", ["docker0", "docker_gwbridge", "br-0123456789ab", "virbr0", "podman1", "lxcbr0"])
def test_an_address_of_a_bridge_of_the_machine_is_never_used(bridge: str) -> None:
    """Not even where a probe of another machine with the same address was refused, or where probes are forbidden."""
    routes = (Route("0.0.0.0/0", "ens0"),)
    facts = [
        _with(rank, (bridge, f"172.{18 + rank}.0.1/16"), ("ens0", f"10.0.{rank}.5/24"), routes=routes)
        for rank in (0, 1)
    ]
    assert candidates(facts) == ("10.0.0.5",)
    seen = [
        Probe("gpu-1", "gpu-0", "10.0.0.5", 1, Reach.SILENT),
        Probe("gpu-1", "gpu-0", "172.18.0.1", 1, Reach.REFUSED),
    ]
    with pytest.raises(NodeUnfit, match=r"cannot be reached from gpu-1 \(10\.0\.0\.5 silent\)"):
        choose(facts, seen, 1)
    alone = [dataclasses.replace(facts[0], interfaces=facts[0].interfaces[:1]), facts[1]]
    with pytest.raises(NodeUnfit, match="has no IPv4 address that other machines could reach") as caught:
        choose(alone, [Probe("gpu-1", "gpu-0", "172.18.0.1", 1, Reach.UNKNOWN)], 1)
    assert "172.18" not in str(caught.value)
    named = [_with(rank, ("br-lan", f"10.1.0.{rank + 1}/24")) for rank in (0, 1)]  # holds the machine's own address
    assert candidates(named) == ("10.1.0.1",)


def test_an_untested_address_is_used_with_a_warning_if_probes_are_forbidden() -> None:
    facts = [node(0), node(1)]
    meeting = choose(facts, [Probe("gpu-1", "gpu-0", "10.0.0.10", 29500, Reach.UNKNOWN)], 29500)
    assert (meeting.address, meeting.probed) == ("10.0.0.10", False)
    prepared = build.Prepared(allot(job(2), facts), MODERN, meeting)
    plan = build.build(job(2), RUN, prepared, code="", owner="", created=0)
    assert any("is assumed to be reachable" in warning for warning in plan.warnings)


def test_an_address_in_the_job_file_takes_precedence() -> None:
    facts = [node(0), node(1)]
    meeting = choose(facts, [Probe("gpu-1", "gpu-0", "172.17.0.1", 1, Reach.OPEN)], 1, ["172.17.0.1", "10.0.0.11"])
    assert meeting.interfaces == ("docker0", "ens1")
    with pytest.raises(NodeUnfit, match=r"no interface with the address 10\.9\.9\.9"):
        choose(facts, [Probe("gpu-1", "gpu-0", "10.9.9.9", 1, Reach.OPEN)], 1, ["10.9.9.9", None])


def _with(rank: int, *interfaces: tuple[str, str], routes: tuple[Route, ...] = ()) -> NodeFacts:
    return node(rank, interfaces=tuple(Interface(name, (address,)) for name, address in interfaces), routes=routes)


def test_an_address_on_the_loopback_interface_never_makes_it_the_interface() -> None:
    """With BGP to the host, the machine's address is on lo, and gloo would use 127.0.0.1 there."""
    facts = [
        _with(
            rank,
            ("lo", "127.0.0.1/8"),
            ("lo", f"10.9.0.{rank + 1}/32"),
            ("ens1", f"169.254.{rank}.1/31"),
            ("ens2", f"10.1.{rank}.1/31"),
            routes=(Route("0.0.0.0/0", "ens1", 10), Route("0.0.0.0/0", "ens2", 20)),
        )
        for rank in range(2)
    ]
    assert candidates(facts) == ("10.1.0.1", "10.9.0.1")
    meeting = choose(facts, [Probe("gpu-1", "gpu-0", "10.9.0.1", 1, Reach.REFUSED)], 1)
    assert (meeting.address, meeting.interfaces) == ("10.9.0.1", ("ens2", "ens2"))
    given = choose(facts, [Probe("gpu-1", "gpu-0", "10.9.0.1", 1, Reach.OPEN)], 1, ["10.9.0.1", "10.9.0.2"])
    assert (given.addresses, given.interfaces) == (("10.9.0.1", "10.9.0.2"), ("ens2", "ens2"))
    bare = dataclasses.replace(facts[0], interfaces=facts[0].interfaces[:2])
    with pytest.raises(NodeUnfit, match=r"has its address 10\.9\.0\.1 on lo"):
        choose([bare, facts[1]], [Probe("gpu-1", "gpu-0", "10.9.0.1", 1, Reach.OPEN)], 1)


def test_a_network_in_which_two_nodes_have_the_same_address_is_not_shared() -> None:
    """As the bridge of a virtual machine monitor is on each machine."""
    facts = [_with(rank, ("xbr0", "10.0.0.1/24"), ("ens0", f"192.168.0.{rank + 1}/24")) for rank in range(2)]
    assert candidates(facts) == ("192.168.0.1", "10.0.0.1")


@pytest.mark.parametrize("tunnel", ["wg0", "tailscale0", "tun0", "ztabcdef12", "ppp0"])
def test_a_tunnel_is_tried_after_other_networks_and_named(tunnel: str) -> None:
    routes = (Route("0.0.0.0/0", "ens0"), Route("10.8.0.0/24", tunnel))
    facts = [
        _with(rank, (tunnel, f"10.8.0.{rank + 1}/24"), ("ens0", f"10.{rank}.0.5/24"), routes=routes) for rank in (0, 1)
    ]
    assert candidates(facts) == ("10.0.0.5", "10.8.0.1")
    seen = [Probe("gpu-1", "gpu-0", "10.0.0.5", 1, Reach.SILENT), Probe("gpu-1", "gpu-0", "10.8.0.1", 1, Reach.OPEN)]
    meeting = choose(facts, seen, 1)
    assert meeting.interfaces == (tunnel, tunnel)
    prepared = build.Prepared(allot(job(2), facts), MODERN, meeting)
    plan = build.build(job(2), RUN, prepared, code="", owner="", created=0)
    assert any(f"over {tunnel}, a tunnel" in warning for warning in plan.warnings)


def test_nodes_with_ipv6_alone_use_the_address_that_the_message_shows() -> None:
    facts = [
        _with(rank, ("ens0", f"fd00::{rank + 1}/128"), ("ens0", "fe80::1/64"), routes=(Route("::/0", "ens0"),))
        for rank in (0, 1)
    ]
    with pytest.raises(NodeUnfit, match=r"nodes: \[\{host: gpu-0, address: fd00::1\}"):
        choose(facts, [], 1)
    meeting = choose(facts, [Probe("gpu-1", "gpu-0", "fd00::1", 1, Reach.OPEN)], 1, ["fd00::1", None])
    assert (meeting.addresses, meeting.interfaces) == (("fd00::1", "fd00::2"), ("ens0", "ens0"))


def test_source_address_follows_the_longest_prefix_then_the_metric() -> None:
    facts = node(
        0,
        interfaces=(
            Interface("a", ("10.0.0.1/24",)),
            Interface("b", ("10.0.1.1/24",)),
            Interface("c", ("192.168.0.1/16",)),
        ),
        routes=(Route("0.0.0.0/0", "a", 100), Route("0.0.0.0/0", "b", 50), Route("192.168.0.0/16", "c")),
    )
    assert source_address(facts, "8.8.8.8") == "10.0.1.1"
    assert source_address(facts, "192.168.7.7") == "192.168.0.1"
    assert source_address(facts, "10.0.0.1") == "10.0.0.1"


@pytest.mark.parametrize(
    ("request_", "chosen"),
    [("all", ("GPU-00", "GPU-01")), ("none", ()), (1, ("GPU-00",)), ((1,), ("GPU-01",)), (("GPU-01",), ("GPU-01",))],
)
def test_gpus_are_chosen_by_uuid(request_: Any, chosen: tuple[str, ...]) -> None:
    assert gpus.select(node(0, gpus=2), request_) == chosen


def test_every_node_that_lacks_gpus_is_named() -> None:
    with pytest.raises(NodesFailed) as caught:
        planned(job(3, gpus=2), [node(0, gpus=2), node(1, gpus=1), node(2)])
    assert "gpu-1" in str(caught.value)
    assert "gpu-2" in str(caught.value)
    assert "gpu-0" not in str(caught.value)
    assert caught.value.exit_code == 3


def test_gpus_of_one_machine_are_divided_evenly_and_completely() -> None:
    for count in range(9):
        for parts in range(1, 5):
            uuids = [str(i) for i in range(count)]
            shares = [gpus.share(uuids, parts, index) for index in range(parts)]
            assert [u for share in shares for u in share] == uuids
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_port_in_use_on_the_master_is_reported_before_anything_starts() -> None:
    with pytest.raises(LauncherError, match="port 29500") as caught:
        planned(job(2, port=29500), [node(0, listening=(22, 29500)), node(1)])
    assert caught.value.exit_code == 3


def test_gpus_without_a_container_toolkit_are_refused_with_a_fix() -> None:
    engine = EngineFacts("e", "27", False, ("runc",), (), "/var/lib/docker", 1)
    with pytest.raises(NodeUnfit, match="nvidia-ctk"):
        planned(job(1), [node(0, gpus=1, engine=engine)])
    with pytest.raises(NodeUnfit, match="podman's Docker API"):
        planned(job(1), [node(0, gpus=1, engine=dataclasses.replace(engine, kind="podman"))])


@pytest.mark.parametrize(
    ("kind", "version", "restarts", "message"),
    [
        ("Docker", "19.03.1", 0, r"Docker 19.03.1 is too old\s+-> 20.10 or newer"),
        ("Docker", "20.10.0", 2, ""),
        ("podman", "3.4.4", 0, r"podman 3.4.4 is too old\s+-> 4.0 or newer"),
        ("podman", "4.3.1", 0, ""),
        ("podman", "4.3.1", 2, r"restarts cannot be followed\s+-> set restarts: 0"),
    ],
)
def test_an_engine_that_cannot_run_the_job_is_refused(kind: str, version: str, restarts: int, message: str) -> None:
    nodes = [node(0), node(1, engine=EngineFacts("e", version, False, (), (), "/x", 1 << 40, kind))]
    with pytest.raises(NodesFailed, match=message) if message else contextlib.nullcontext() as caught:
        planned(job(2, restarts=restarts), nodes)
    assert not caught or "gpu-1" in str(caught.value)


def test_every_node_without_room_for_the_output_is_named() -> None:
    nodes = [
        node(0, output_free=60 << 30),
        node(1, output_free=9 << 30),
        node(2, output_free=-1),
        node(3, output_free=0),
    ]
    with pytest.raises(NodesFailed) as caught:
        planned(job(4, resources={"output": "50g"}), nodes)
    text = str(caught.value)
    assert "gpu-1: 9.0 GiB free in /home/ada/.launcher, and the job needs 50.0 GiB (resources.output)" in text
    assert [f"gpu-{rank}" in text for rank in range(4)] == [False, True, False, True]
    assert caught.value.exit_code == NodeUnfit.exit_code
    assert planned(job(2, resources={"output": "50g"}), [nodes[0], nodes[2]])


def test_containers_of_a_rootless_engine_run_as_root() -> None:
    engine = EngineFacts("e", "27", True, ("runc",), (), "/x", 1)
    assert planned(job(1), [node(0, engine=engine)]).master.container.user == "0:0"


def test_containers_of_a_remapping_engine_use_the_users_of_the_node() -> None:
    engine = EngineFacts("e", "27", False, ("runc",), (), "/x", 1, remapped=True)
    container = planned(job(1), [node(0, engine=engine)]).master.container
    assert (container.userns, container.user) == ("host", "1001:1002")
    assert planned(job(1), [node(0)]).master.container.userns == ""


@pytest.mark.parametrize(("remapped", "modes"), [(False, {0o700, 0o600, 0o755}), (True, {0o777, 0o666})])
def test_the_program_can_read_its_secrets_if_their_owner_is_remapped(remapped: bool, modes: set[int]) -> None:
    with tarfile.open(fileobj=io.BytesIO(kit("/kit", "1001:1002", {"A": "b"}, remapped=remapped))) as tar:
        found = tar.getmembers()
    assert {member.mode for member in found} == modes
    assert {(member.uid, member.gid) for member in found} == {(1001, 1002)}


def test_the_folder_beside_the_code_belongs_to_the_user() -> None:
    """A program may write to ../data; a folder of a node, without a container, is left as it is."""
    with tarfile.open(fileobj=io.BytesIO(kit("/kit", "1001:1002", {}, remapped=False, beside="/workspace"))) as tar:
        beside = tar.getmember("workspace")
    assert (beside.isdir(), beside.mode, beside.uid, beside.gid) == (True, 0o755, 1001, 1002)
    containers = [planned(job(1), [node(0)]).master.container, offline(job(1, runtime="process"), "c").master.container]
    assert [_kit_of(container)[3] for container in containers] == ["/workspace", ""]


def test_a_script_outside_the_code_is_refused() -> None:
    with pytest.raises(PlanInvalid, match="outside the code folder"):
        planned(job(1, code="src", run={"script": "main.py"}), [node(0)])
    inside = planned(job(1, code="src", run={"script": "src/main.py"}), [node(0)])
    assert inside.master.container.argv[-1] == "main.py"


def test_offline_contacts_no_node_and_lists_assumptions() -> None:
    plan = offline(job(2), "c0de")
    assert plan.warnings[0].startswith("offline:")
    assert plan.rendezvous.addresses == ("192.0.2.1", "192.0.2.2")


def test_offline_gives_each_node_the_gpus_that_the_job_names() -> None:
    for request, count in ((2, 2), ([1, 3], 2), (["GPU-a"], 1), ("all", 8), ("none", 0)):
        plan = offline(job(2, gpus=request), "c0de")
        assert [len(n.container.gpus) for n in plan.nodes] == [count, count], request
        assert [n.processes for n in plan.nodes] == [max(1, count)] * 2
        assumed = [warning for warning in plan.warnings if "to be 8 GPUs" in warning]
        assert assumed == (["gpus: all is assumed to be 8 GPUs per machine (gpu-0, gpu-1)"] if request == "all" else [])


def test_ranks_are_numbered_across_nodes() -> None:
    plan = planned(job(3, gpus="all"), [node(0, gpus=2), node(1, gpus=4), node(2, gpus=1)])
    assert [(n.first_rank, n.processes) for n in plan.nodes] == [(0, 2), (2, 4), (6, 1)]
    assert any("different numbers of GPUs" in warning for warning in plan.warnings)


def test_plain_commands_have_the_rendezvous_in_their_environment() -> None:
    assert command.variables_without_torchrun("10.0.0.1", 1234, nodes=2, rank=1)["RANK"] == "1"


def test_variables_that_a_shell_would_expand_are_noted() -> None:
    env = {"A": "${HOME}/data", "B": "~/data", "C": "$USER", "D": "cost: $ 5, ~", "E": "a~/b"}
    plan = planned(job(1, env=env), [node(0)])
    assert [line.split(":")[0] for line in plan.warnings if "not expanded" in line] == ["env A", "env B", "env C"]
    assert plan.nodes[0].container.env["A"] == "${HOME}/data"


def test_limits_that_engines_refuse_are_told_once_for_all_nodes() -> None:
    facts = [node(0, gpus=1), *(node(rank, gpus=1, ulimits=(("stack", 67108864),)) for rank in (1, 2))]
    limited = [line for line in planned(job(3), facts).warnings if "limited" in line]
    assert limited == ["locked memory is limited on gpu-1, gpu-2"]


def test_locked_memory_is_no_matter_for_a_job_on_cpus() -> None:
    """NCCL and RDMA register memory; gloo does not."""
    facts = [node(rank, ulimits=(("stack", 67108864),)) for rank in range(2)]
    assert not [line for line in planned(job(2), facts).warnings if "limited" in line]
    [other] = [line for line in planned(job(1), [node(0, ulimits=())]).warnings if "limited" in line]
    assert other == "the stack is limited on gpu-0"
    rdma = [node(0, infiniband=True, ulimits=(("stack", 67108864),))]
    assert [line for line in planned(job(1), rdma).warnings if "locked memory" in line]


def test_newer_facts_keep_what_was_prepared() -> None:
    """The GPUs are those of the newer facts; limits, image and data are not known to them."""
    ready = node(0, ulimits=(("stack", 1),), image="sha256:1", data=(Mount("/d", "/data"),))
    prepared = build.Prepared(allot(job(1), [ready]), MODERN, on_one_machine(1, 29500))
    newer = prepared.at(allot(job(1), [node(0, gpus=2, listening=(29500,))]))
    [kept] = newer.allotment.facts
    assert kept == dataclasses.replace(ready, gpus=node(0, gpus=2).gpus, listening=(29500,))
    assert newer.allotment.gpus == [("GPU-00", "GPU-01")]
    assert newer.rendezvous.port == 29501


def test_the_plan_says_that_the_trainer_would_decode_slowly():
    facts = [node(0), node(1)]

    def said(a_job: Job, decoder: str | None) -> list[str]:
        plan = planned(a_job, facts, dataclasses.replace(MODERN, decoder=decoder))
        return [warning for warning in plan.warnings if "decode" in warning]

    [warning] = said(job(), "")
    assert "its own decoder, roi, is about 1.8 times as fast" in warning
    assert "gcc libc6-dev libjpeg-dev" in warning
    assert not any(said(job(), decoder) for decoder in (None, "image", "compiler"))
    assert not said(job(run={"module": "train", "args": {"decoder": "pil"}}), "")
    assert not said(job(run={"command": ["true"]}), "")
    check = checks.decoder(job(), dataclasses.replace(MODERN, decoder="image"))
    assert check == checks.Check("all", "decoder", checks.Level.OK, check.what)
    assert check.what == "roi, in the image: about 1.8 times as fast as torchvision's"
