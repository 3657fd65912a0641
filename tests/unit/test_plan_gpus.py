"""GPUs of a plan, from nvidia-smi and the PCI bus: faults are refused, idle GPUs are chosen, and a job never runs
silently on a CPU.
"""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from launcher.cli import gpus as shown
from launcher.errors import InUse, NodesFailed
from launcher.model.facts import GpuClaim, NodeFacts
from launcher.node.facts import parse
from launcher.planning import gpu_checks, gpus
from launcher.planning.allotment import allot
from launcher.planning.build import Prepared, build
from launcher.planning.checks import Check, Level
from launcher.planning.gpu_faults import fault
from launcher.planning.rendezvous import on_one_machine
from launcher.run.begin.gpus import assume_idle
from tests import nvidia
from tests.gpu_rows import FAULTS, MIG
from tests.nvidia import Card, Machine, Process, cards
from tests.unit.test_plan import MODERN, RUN, job, planned
from tests.unit.test_plan import node as a_node

NOTEBOOK = Card("07:00.0", used=61440, running=[Process(4242, 61440, "erin")])


def on(machine: Machine, rank: int = 0, **changes: Any) -> NodeFacts:
    seen = parse(machine.output().encode()).node
    return dataclasses.replace(a_node(rank), gpus=seen.gpus, nvidia=seen.nvidia, **changes)


def refused(machine: Machine, gpus: object = "all") -> str:
    with pytest.raises(NodesFailed) as caught:
        planned(job(1, gpus=gpus), [on(machine)])
    assert caught.value.exit_code == 3
    return str(caught.value)


def checks(node: NodeFacts, wanted: Any = "all") -> dict[str, Check]:
    """Return the worst level of each check."""
    order = [Level.OK, Level.WARN, Level.FAIL]
    found = sorted(gpu_checks.of_node(node, wanted, isolated=True), key=lambda check: order.index(check.level))
    assert all(check.fix for check in found if check.level is not Level.OK)
    return {check.name: check for check in found}


@pytest.mark.parametrize("row", FAULTS)
def test_a_faulty_gpu_is_not_reported_as_no_gpu(row: str) -> None:
    machine, message, expected = FAULTS[row]
    for request in ("all", max(2, len(machine.cards)), [0, 1]):
        text = refused(machine, request)
        assert "gpu-0" in text, (row, request)
    text = refused(machine)
    what, fix = text.split("\n  -> ")
    assert message in what
    assert expected in fix
    assert "gpus: none" in fix
    check = checks(on(machine))["gpus"]
    assert (check.level, check.what in what) == (Level.FAIL, True)
    plan = planned(job(1, gpus="none"), [on(machine)])
    assert (plan.nodes[0].container.gpus, plan.warnings) == ((), ())


@pytest.mark.parametrize(
    "machine",
    [
        Machine(smi=False, files=()),
        Machine(cards(8)),
        Machine([*cards(4), *cards(2, kernel="vfio-pci", listed=False)]),  # these two are a virtual machine's
        Machine([*cards(7, listed=False), Card("3f:00.0")], files=("/dev/nvidia7", "/dev/nvidiactl")),  # a container
        Machine([Card("07:00.0", temperature="[N/A]")]),
    ],
    ids=["no GPU", "all work", "some in a virtual machine", "some in other containers", "no thermometer"],
)
def test_no_fault(machine: Machine) -> None:
    assert fault(on(machine)) is None


def test_an_unrelated_error_of_nvidia_smi_is_a_warning() -> None:
    # manual page of nvidia-smi, RETURN VALUE 14; the text: forums.developer.nvidia.com, "infoROM is corrupted"
    text = (
        Machine(cards(2)).output().replace("@exit 0", "WARNING: infoROM is corrupted at gpu 0000:07:00.0\n@exit 14", 1)
    )
    seen = parse(text.encode()).node
    plan = planned(job(1), [dataclasses.replace(a_node(0), gpus=seen.gpus, nvidia=seen.nvidia)])
    assert len(plan.nodes[0].container.gpus) == 2
    assert any("infoROM is corrupted" in warning and "(exit code 14)" in warning for warning in plan.warnings)


def test_working_gpus_of_a_faulty_machine_can_be_selected() -> None:
    fallen = on(Machine([*cards(7), Card("3f:00.0", listed=False)]))
    for request in (2, [fallen.gpus[6].uuid]):
        plan = planned(job(1, gpus=request), [fallen])
        assert len(plan.nodes[0].container.gpus) == len(request if isinstance(request, list) else range(request))
        assert any("0000:3f:00.0 has fallen off the bus" in warning for warning in plan.warnings)
    # An index counts only the listed GPUs, so it may mean another GPU than before the fault.
    assert "name GPUs by their UUID" in refused(Machine([*cards(7), Card("3f:00.0", listed=False)]), [6])
    broken = Machine([*cards(1), Card("0f:00.0", temperature=nvidia.RESET)])
    assert planned(job(1, gpus=[0]), [on(broken)]).nodes[0].container.gpus == (on(broken).gpus[0].uuid,)
    assert checks(on(broken), [0])["gpus"].level is Level.WARN


def test_all_is_refused_if_only_some_nodes_have_gpus() -> None:
    with pytest.raises(NodesFailed) as caught:
        planned(job(3), [on(Machine(cards(2)), 0), a_node(1), on(Machine(cards(2)), 2)])
    assert [error.where for error in caught.value.errors] == ["node gpu-1"]
    assert "gpus: none" in str(caught.value)
    mixed = job(2, nodes=["gpu-0", {"host": "gpu-1", "gpus": "none"}])
    assert [len(n.container.gpus) for n in planned(mixed, [on(Machine(cards(2))), a_node(1)]).nodes] == [2, 0]


def test_a_number_takes_idle_gpus() -> None:
    seen = on(Machine([NOTEBOOK, *cards(3)[1:], Card("1f:00.0", used=1500), Card("27:00.0")]))
    claimed = dataclasses.replace(seen, claims=(GpuClaim(seen.gpus[1].uuid, "cifar-1", "ada@laptop", 7200.0),))
    assert gpus.select(claimed, 2) == (seen.gpus[2].uuid, seen.gpus[4].uuid)
    with pytest.raises(InUse) as caught:
        gpus.select(claimed, 3)
    assert caught.value.what == (
        "3 GPUs requested, 2 of 5 are idle: GPU 0: 60.0 GiB by erin, python3 (pid 4242) for 3:00:00; GPU 1: the "
        "run cifar-1 of ada@laptop for 2:00:00; GPU 3: 1.5 GiB by processes that are not visible"
    )
    assert "--wait" in caught.value.next_step


def test_gpus_and_port_in_use_are_told_together() -> None:
    with pytest.raises(NodesFailed) as caught:
        allot(job(1, gpus=2, port=29500), [on(Machine([NOTEBOOK, *cards(2)[1:]]), listening=(29500,))])
    assert [type(error) for error in caught.value.errors] == [InUse, InUse]


def test_a_plan_has_the_gpus_that_were_chosen_before_anything_was_copied() -> None:
    """What others have taken since is found when the run claims its GPUs."""
    one = job(1, gpus=1)
    chosen = allot(one, [on(Machine(cards(2)))])
    taken = on(Machine([NOTEBOOK, *cards(2)[1:]]), listening=(chosen.port,))
    prepared = Prepared(dataclasses.replace(chosen, facts=[taken]), MODERN, on_one_machine(1, chosen.port))
    plan = build(one, RUN, prepared, code="", owner="", created=0)
    assert [node.container.gpus for node in plan.nodes] == list(chosen.gpus)
    assert plan.rendezvous.port == chosen.port


def test_the_variant_that_holds_a_gpu_is_named() -> None:
    seen = on(Machine(cards(1)))
    held = GpuClaim(seen.gpus[0].uuid, "night-1", "ada@laptop", 60.0, "lr=0.1")
    [device] = gpus.devices(seen)
    assert gpus.user(dataclasses.replace(seen, claims=(held,)), device) == (
        "the run night-1 (lr=0.1) of ada@laptop for 1:00"
    )


def test_a_preview_lists_the_users_of_the_gpus() -> None:
    busy, idle = on(Machine([NOTEBOOK, *cards(2)[1:]])), on(Machine(cards(2)), 1)
    allotment, notes = assume_idle(job(2, gpus=2), [busy, idle])
    assert [len(each) for each in allotment.gpus] == [2, 2]
    assert "node gpu-0: 2 GPUs requested, 1 of 2 are idle: GPU 0: 60.0 GiB by erin, python3 (pid 4242)" in notes[0]
    assert "`up --wait` waits" in notes[0]
    assert assume_idle(job(2, gpus=1), [busy, idle]) == (allot(job(2, gpus=1), [busy, idle]), ())
    with pytest.raises(NodesFailed, match="but the node has: 0: NVIDIA A100"):  # waiting does not help
        assume_idle(job(2, gpus=3), [busy, idle])


def test_all_and_a_list_take_a_gpu_in_use_with_a_warning() -> None:
    machine = Machine([NOTEBOOK, *cards(2)[1:]])
    for request, warned in (("all", True), ([0], True), ([1], False), (1, False)):
        plan = planned(job(1, gpus=request), [on(machine)])
        line = "gpu-0: GPU 0: 60.0 GiB by erin, python3 (pid 4242) for 3:00:00"
        assert (line in plan.warnings) == warned, request
    assert "GPU 0: 60.0 GiB" in checks(on(machine))["gpu in use"].what


def test_a_desktop_does_not_make_a_gpu_busy() -> None:
    desktop = Card("07:00.0", used=400, running=[Process(1, 300, kind="G", name="/usr/lib/xorg/Xorg")])
    assert len(gpus.select(on(Machine([desktop])), 1)) == 1
    with pytest.raises(InUse, match="GiB by processes that are not visible"):
        gpus.select(on(Machine([Card("07:00.0", used=gpus.LITTLE)])), 1)


def test_an_instance_is_idle_whatever_the_other_instances_of_its_gpu_use() -> None:
    seen = on(Machine(MIG[:1]))
    full = dataclasses.replace(seen, gpus=tuple(dataclasses.replace(gpu, used_mib=9000) for gpu in seen.gpus))
    assert gpus.in_use(full, gpus.devices(full)) == []


def test_all_in_mig_mode_selects_the_instances_with_one_worker_each() -> None:
    node = on(Machine([*MIG, Card("0f:00.0", "GPU-whole")]))
    plan = planned(job(1), [node])
    uuids = [part.uuid for gpu in node.gpus[:2] for part in gpu.instances]
    container = plan.nodes[0].container
    assert container.gpus == (*uuids, "GPU-whole")
    assert plan.nodes[0].processes == 5
    assert container.env["LAUNCHER_MIG"] == ",".join(container.gpus)
    assert any("NCCL does not support two ranks on one GPU" in warning for warning in plan.warnings)
    one = planned(job(1, gpus=[uuids[2]], processes=2), [node])
    assert one.nodes[0].container.env["LAUNCHER_MIG"] == f"{uuids[2]},{uuids[2]}"
    assert planned(job(1, gpus=[uuids[2]]), [node]).warnings == ()
    assert "GPU 0, 1 is in MIG mode: name its instances by UUID" in refused(Machine(MIG), [0])
    assert "MIG-a686709d" in checks(on(Machine(MIG[:1])))["mig"].what


def test_differing_machines_are_listed_in_one_warning() -> None:
    other = Machine(cards(2, name="NVIDIA H100 80GB HBM3", mib=81559, driver="535.161.08", mode="Exclusive_Process"))
    nodes = [on(Machine(cards(2)), 0), on(other, 1, name="gpu-b")]
    warning = next(line for line in planned(job(2), nodes).warnings if "differ" in line)
    for text in ("gpu-0 NVIDIA A100-SXM4-80GB, gpu-b NVIDIA H100", "gpu-0 550, gpu-b 535", "gpu-b Exclusive_Process"):
        assert text in warning
    assert gpu_checks.differences([on(Machine(cards(2, driver="550.90.07"))), nodes[0]]) == ""  # the same branch
    for for_a_job, level in ((False, Level.WARN), (True, Level.FAIL)):  # which `up` refuses
        [check] = gpu_checks.alike([nodes[0], a_node(1)], job=for_a_job)
        assert (check.what, check.level) == ("no GPU: gpu-1", level)
    assert gpu_checks.alike([nodes[0], on(Machine(failure=nvidia.MISMATCH), 1)], job=True) == []  # that has a fault


def test_doctor_reports_driver_toolkit_persistence_fabric_manager_and_peers() -> None:
    more = '\n@@nvidia_toolkit\nNVIDIA Container Toolkit CLI version 1.17.8\nmode = "auto"\n@@nvidia_fabric\ninactive\n'
    node = on(Machine(cards(8), more=more, switches=["85:00.0"]))
    found = checks(node)
    assert "550.54.14, runs CUDA up to 12.4" in found["gpu driver"].what
    assert found["container toolkit"].what.startswith("nvidia, 1.17.8, mode auto")
    assert (found["fabric manager"].level, found["persistence"].level) == (Level.FAIL, Level.OK)
    assert "802" in found["fabric manager"].what
    assert found["infiniband"].what == "none"
    # `nvidia-smi topo -p2p r` as in github.com/stas00/ml-engineering, its chapter on P2P
    rows = " \tGPU0\tGPU1\tGPU2\t\n GPU0\tX\tOK\tCNS\t\n GPU1\tOK\tX\tCNS\t\n GPU2\tCNS\tCNS\tX\t\n"
    matrix = f"{rows}\nLegend:\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n"
    check = gpu_checks.peers("gpu-0", matrix)
    assert check is not None
    assert (check.level, check.what[:19]) == (Level.WARN, "2 of 6 pairs of GPU")
    assert gpu_checks.peers("gpu-0", rows.replace("CNS", "OK")).level is Level.OK  # type: ignore[union-attr]
    assert gpu_checks.peers("gpu-0", "Failed to initialize NVML\n") is None


def drawn(node: NodeFacts) -> str:
    """Return the table in 80 columns."""
    console = Console(file=io.StringIO(), width=80)
    console.print(shown.table([node]))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_table_fits_80_columns() -> None:
    four = [NOTEBOOK, *cards(2)[1:], *MIG[:1], Card("3f:00.0", temperature=nvidia.RESET)]
    node = on(Machine(four, mig_list=nvidia.MIG_LIST.replace("GPU 0", "GPU 2")))
    lines = drawn(node).splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    text = " ".join(" ".join(lines).split())
    for message in ("60.0/80 GiB", "by erin", "pid 4242", "MIG 1g.10gb", "requires reset"):
        assert message in text, text
    assert [line.split()[1] for line in lines if line.startswith("gpu-0")] == ["0", "1", "2", "2", "3"]
    assert "MIG mode, without instances" in drawn(on(Machine(MIG[:1], mig_list="")))
    assert [row["index"] for row in shown.rows([node])] == [0, 1, 2, 3]
    assert shown.rows([node])[0]["processes"][0]["user"] == "erin"


def spark(**changes: Any) -> NodeFacts:
    seen = parse(f"@@memory\n{nvidia.SPARK_MEMORY}{Machine([nvidia.SPARK]).output()}".encode()).node
    return dataclasses.replace(
        a_node(0), gpus=seen.gpus, nvidia=seen.nvidia, memory=seen.memory, arch="aarch64", **changes
    )


def test_a_gpu_that_shares_the_machines_memory_leaves_8_gib_to_the_host() -> None:
    plan = planned(job(1, gpus=1), [spark()])
    assert plan.master.container.memory == 127600748 * 1024 - (8 << 30)
    [said] = [warning for warning in plan.warnings if "shares the machine's memory" in warning]
    assert said.startswith("gpu-0: its GPU shares the machine's memory, so the container is limited to 114 of 122 GiB")
    assert "What CUDA allocates is not limited by it" in said
    chosen = planned(job(1, gpus=1, resources={"memory": "32g"}), [spark()])
    assert chosen.master.container.memory == 32 << 30
    assert not [warning for warning in chosen.warnings if "shares" in warning]
    for other in (planned(job(1, gpus="none"), [spark()]), planned(job(1), [on(Machine(cards(1)))])):
        assert other.master.container.memory is None
    small = dataclasses.replace(spark(), memory=12 << 30)  # 8 of these would be most of it
    assert planned(job(1, gpus=1), [small]).master.container.memory is None


def test_a_gpu_that_shares_the_machines_memory_is_idle_however_much_of_it_is_used() -> None:
    """Its own use is that of its processes: the machine's memory has other users, and the page cache's is free."""
    full = spark()
    assert full.gpus[0].used_mib > gpus.LITTLE
    assert gpus.in_use(full, gpus.devices(full)) == []
    file = io.StringIO()
    Console(file=file, width=120).print(shown.table([full]))
    assert "9/122 GiB shared" in file.getvalue()
