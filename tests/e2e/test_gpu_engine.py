"""GPUs and containers through the CLI: a stand-in nvidia-smi and toolkit, a real engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.bed import faults
from tests.bed.bed import Bed, Node
from tests.e2e.cli import Cli, bed_job
from tests.e2e.drill import Drill
from tests.gpu_rows import MIG, TOOLKIT, UNSATISFIED
from tests.nvidia import MIG_LIST, Card, Machine, Process, cards

pytestmark = [pytest.mark.bed, pytest.mark.timeout(300)]
IMAGE = "launcher-test-cuda:1"
SLOW = pytest.mark.slow
HOOK = "/usr/local/bin/nvidia-container-runtime-hook"


@pytest.fixture(scope="module")
def gpu_node(bed: Bed) -> Iterator[Node]:
    """Return a node with fake GPUs and an image that declares CUDA 12.4."""
    node = bed.nodes[0]
    with faults.fake_gpus(bed, node, 1):
        bed.sh(node, f"echo 'FROM launcher-bed-train\nENV CUDA_VERSION=12.4.0.041' | docker build -q -t {IMAGE} -")
        yield node
        bed.run(node, "docker", "image", "rm", "-f", IMAGE, check=False)


def answering(bed: Bed, node: Node, machine: Machine) -> None:
    """Make the node's nvidia-smi print the output of this machine."""
    text = f"cat >/usr/local/bin/nvidia-smi <<'STAND_IN'\n{machine.script()}STAND_IN\n"
    bed.sh(node, f"{text}chmod 755 /usr/local/bin/nvidia-smi")


def driven(bed: Bed, node: Node, driver: str, cuda: str) -> None:
    """Make the node's nvidia-smi report this driver, for its only GPU."""
    answering(bed, node, Machine(cards(1, driver=driver), cuda=cuda))


def toolkit_says(bed: Bed, node: Node, message: str) -> None:
    """Make the NVIDIA Container Toolkit fail with this message, or succeed if it is ""."""
    failing = f"cat >&2 <<'END'\n{message}\nEND\nexit 1\n" if message else "exit 0\n"
    bed.sh(node, f"cat >{HOOK} <<'STAND_IN'\n#!/bin/sh\n{failing}STAND_IN\nchmod 755 {HOOK}")


def one_node(cli: Cli, command: str = "echo it runs", **keys: object) -> object:
    run = {"command": ["sh", "-c", command]}
    return cli.job("gpu", **bed_job(**{"nodes": ["node1"], "image": {"ref": IMAGE}, "gpus": "all", "run": run, **keys}))


def test_a_driver_too_old_for_the_image_is_refused_before_anything_is_created(
    bed_cli: Cli, bed: Bed, gpu_node: Node
) -> None:
    driven(bed, gpu_node, "470.82.01", "11.4")
    before = bed.docker(gpu_node, "ps", "-aq")
    refused = bed_cli("up", one_node(bed_cli), code=3).stderr
    assert f"node node1: NVIDIA driver 470.82.01 (CUDA 11.4) is too old for image {IMAGE} with CUDA 12.4" in refused
    assert "525.60.13 or newer" in refused
    assert "nvcr.io/nvidia/pytorch:22.12-py3" in refused
    assert bed.docker(gpu_node, "ps", "-aq") == before == ""
    checked = bed_cli("doctor", one_node(bed_cli), "--json", code=3)
    seen = json.loads(checked.stdout)["checks"]
    [image] = [check for check in seen if (check["node"], check["name"]) == ("node1", "image")]
    assert (image["node"], image["level"]) == ("node1", "fail")
    assert "470.82.01 (CUDA 11.4) is too old" in image["what"]
    bed_cli("up", one_node(bed_cli), "--set", "gpus=none")
    bed_cli("down", "--all")


def test_a_driver_of_the_same_family_is_noted(bed_cli: Cli, bed: Bed, gpu_node: Node) -> None:
    driven(bed, gpu_node, "535.104.05", "12.2")
    done = bed_cli("up", one_node(bed_cli))
    assert "minor-version compatibility" in done.stderr
    assert "it runs" in done.stdout
    bed_cli("down", "--all")


def refused_by_toolkit(cli: Cli, bed: Bed, node: Node, message: str) -> str:
    """Return the message of `up` if the toolkit fails with this message; nothing remains on the node."""
    driven(bed, node, "550.54.14", "12.4")
    toolkit_says(bed, node, message)
    try:
        refused = cli("up", one_node(cli), code=3).stderr
    finally:
        toolkit_says(bed, node, "")
    assert bed.docker(node, "ps", "-aq") == ""
    assert f"{node.alias}: " in refused
    return refused


def test_an_images_driver_requirement_is_reported_as_a_launcher_error(bed_cli: Cli, bed: Bed, gpu_node: Node) -> None:
    refused = refused_by_toolkit(bed_cli, bed, gpu_node, UNSATISFIED)
    assert f"NVIDIA driver 550.54.14 (CUDA 12.4) is too old for image {IMAGE} with CUDA 12.8" in refused
    assert "pytorch:24.05-py3" in refused


@pytest.mark.parametrize(
    ("source", "message", "what", "fix"),
    [
        pytest.param(*row, id=row[0], marks=[] if "driver not loaded" in row[1] else SLOW)
        for row in TOOLKIT
        if row[1] != UNSATISFIED
    ],
)
def test_the_toolkits_errors_have_their_own_fixes(
    source: str, message: str, what: str, fix: str, bed_cli: Cli, bed: Bed, gpu_node: Node
) -> None:
    refused = refused_by_toolkit(bed_cli, bed, gpu_node, message.rpartition("stderr: ")[2])
    assert what in refused
    assert fix in refused


@SLOW
def test_an_engine_without_the_toolkit(bed_cli: Cli, bed: Bed) -> None:
    """Its settings have the runtime, but its programs are missing: Docker's own error."""
    node = bed.nodes[1]
    with faults.fake_gpus(bed, node, 1, toolkit=False):
        refused = bed_cli("up", bed_cli.job(**bed_job(nodes=[node.alias], run={"command": ["true"]})), code=3).stderr
    assert f"{node.alias}: " in refused
    assert "could not select device driver" in refused
    assert "install the NVIDIA Container Toolkit" in refused


def test_a_containers_device_files_come_from_the_engine(bed_cli: Cli, bed: Bed, gpu_node: Node) -> None:
    """Those that only the toolkit adds are lost when systemd reloads."""
    driven(bed, gpu_node, "550.54.14", "12.4")
    information = "Bus Location: \t 0000:07:00.0\nDevice Minor: \t 3\n"
    files = "/dev/nvidia3 /dev/nvidia4 /dev/nvidiactl /dev/nvidia-uvm"
    bed.sh(
        gpu_node,
        f"for file in {files}; do mknod -m 666 $file c 1 3; done; mount -t tmpfs none /proc/driver; "
        f"mkdir -p /proc/driver/nvidia/gpus/0; printf '{information}' >/proc/driver/nvidia/gpus/0/information",
    )
    try:
        done = bed_cli("up", one_node(bed_cli, "ls /dev/nvidia*"))
    finally:
        bed.sh(gpu_node, f"umount /proc/driver; rm -f {files}")
    assert done.stdout.split() == ["/dev/nvidia-uvm", "/dev/nvidia3", "/dev/nvidiactl"]
    bed_cli("down", "--all")


@SLOW
def test_gpus_in_use_by_others(bed_cli: Cli, bed: Bed, gpu_node: Node) -> None:
    pid = int(bed.sh(gpu_node, "sleep 600 >/dev/null 2>&1 & echo $!", user="trainer"))
    notebook = Process(pid, 61440)
    machine = Machine([Card("07:00.0", "GPU-a", used=61440, running=[notebook]), Card("0f:00.0", "GPU-b")])
    answering(bed, gpu_node, machine)
    who = f"GPU 0: 60.0 GiB by trainer, python3 (pid {pid})"
    job = one_node(bed_cli, "echo GPUs: $NVIDIA_VISIBLE_DEVICES.")
    assert "GPUs: GPU-b." in bed_cli("up", job, "--set", "gpus=1").stdout
    taken = bed_cli("up", job)
    assert "GPUs: GPU-a,GPU-b." in taken.stdout
    assert f"warning: node1: {who}" in taken.stderr
    assert f"warning: node1: {who}" in bed_cli("up", job, "--set", "gpus=[0]").stderr
    refused = bed_cli("up", job, "--set", "gpus=2", code=3).stderr
    assert f"node node1: 2 GPUs requested, 1 of 2 are idle: {who} for " in refused
    assert f"1 of 2 are idle: {who}" in bed_cli("plan", job, "--set", "gpus=2").stdout
    for shown in (bed_cli("status", "--nodes", "node1,node2"), bed_cli("doctor", "node1")):
        table = " ".join(shown.stdout.split())
        assert f"node1 0 A100-SXM4-80GB 60.0/80 GiB 60.0 GiB by trainer, python3 (pid {pid})" in table
        assert "node1 1 A100-SXM4-80GB 0.0/80 GiB" in table
    waits = Drill.follow(bed_cli, "up", "--wait", job, "--set", "gpus=2")
    waits.sees("waiting: node node1: 2 GPUs requested")
    bed.sh(gpu_node, f"kill {pid}")
    answering(bed, gpu_node, Machine([Card("07:00.0", "GPU-a"), Card("0f:00.0", "GPU-b")]))
    waits.sees("GPUs: GPU-a,GPU-b")
    waits.end(0)
    bed_cli("down", "--all")


@SLOW
def test_instances_of_gpus_in_mig_mode(bed_cli: Cli, bed: Bed, gpu_node: Node) -> None:
    answering(bed, gpu_node, Machine(MIG))
    uuids = re.findall(r"UUID: (MIG-[^)]+)", MIG_LIST)
    (bed_cli.cwd / "worker.py").write_text('import os\nprint("worker", os.environ["CUDA_VISIBLE_DEVICES"])\n')
    done = bed_cli("up", one_node(bed_cli, run={"script": "worker.py"}))
    assert sorted(re.findall("worker (MIG-.*)", done.stdout)) == sorted(uuids)
    assert "NCCL does not support two ranks on one GPU" in done.stderr
    one = one_node(bed_cli, "echo GPUs: $NVIDIA_VISIBLE_DEVICES.", gpus=[uuids[2]])
    assert f"GPUs: {uuids[2]}." in bed_cli("up", one).stdout
    bed_cli("down", "--all")


@SLOW
def test_differing_machines_are_named(bed_cli: Cli, bed: Bed, gpu_node: Node) -> None:
    other = bed.nodes[1]
    machines = [
        Machine(cards(1, driver="580.95.05"), cuda="13.0"),
        Machine(cards(1, name="NVIDIA H100 80GB HBM3", mib=98304, driver="590.44.01", mode="Exclusive_Process")),
    ]
    with faults.fake_gpus(bed, other, 1):
        for node, machine in zip((gpu_node, other), machines, strict=True):
            answering(bed, node, machine)
        file = bed_cli.job(**bed_job(run={"command": ["true"]}))
        [line] = [line for line in bed_cli("up", file).stderr.splitlines() if "GPUs differ" in line]
        report = json.loads(bed_cli("doctor", file, "--json").stdout)
        bed_cli("down", "--all")
    [check] = [check for check in report["checks"] if check["name"] == "gpus differ"]
    for message in (
        "node1 NVIDIA A100-SXM4-80GB, node2 NVIDIA H100 80GB HBM3",
        "node1 80 GiB, node2 96 GiB",
        "node1 580, node2 590",
        "node1 Default, node2 Exclusive_Process",
    ):
        assert message in line
        assert message in check["what"]


@SLOW
def test_doctor_warns_about_a_toolkit_whose_containers_lose_their_gpus(bed_cli: Cli, bed: Bed, gpu_node: Node) -> None:
    driven(bed, gpu_node, "550.54.14", "12.4")
    program = "/usr/local/bin/nvidia-ctk"
    says = "NVIDIA Container Toolkit CLI version 1.17.8"  # github.com/NVIDIA/nvidia-container-toolkit/issues/1066
    bed.sh(gpu_node, f"printf '#!/bin/sh\necho {says}\n' >{program}; chmod 755 {program}")
    try:
        with faults.systemd_cgroups(bed, gpu_node):
            report = json.loads(bed_cli("doctor", "node1", "--json").stdout)
    finally:
        bed.sh(gpu_node, f"rm {program}")
    found = {check["name"]: check for check in report["checks"]}
    assert found["systemd reload"]["level"] == "warn"
    assert "with NVIDIA Container Toolkit 1.17.8, containers lose their GPUs" in found["systemd reload"]["what"]
    assert "1.18" in found["systemd reload"]["fix"]
    assert "nvidia, 1.17.8, cgroup driver systemd" in found["container toolkit"]["what"]
