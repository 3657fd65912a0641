"""GPUs and containers through the CLI: a stand-in nvidia-smi and toolkit, a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.bed import faults
from tests.bed.bed import Bed, Node
from tests.e2e.cli import Cli, bed_job
from tests.nvidia import Machine, cards
from tests.unit.test_gpu_containers import UNSATISFIED

pytestmark = [pytest.mark.bed, pytest.mark.timeout(120)]
IMAGE = "launcher-test-cuda:1"
SLOW = pytest.mark.slow  # one run each; the fixes are held by test_gpu_containers
TOOLKIT = "/usr/local/bin/nvidia-container-runtime-hook"


@pytest.fixture(scope="module")
def gpu_node(bed: Bed) -> Iterator[Node]:
    """A node with fake GPUs and an image that says that it has CUDA 12.4."""
    node = bed.nodes[0]
    with faults.fake_gpus(bed, node, 1):
        bed.sh(node, f"echo 'FROM launcher-bed-train\nENV CUDA_VERSION=12.4.0.041' | docker build -q -t {IMAGE} -")
        yield node
        bed.run(node, "docker", "image", "rm", "-f", IMAGE, check=False)


def driven(bed: Bed, node: Node, driver: str, cuda: str) -> None:
    """Let the node's nvidia-smi tell of this driver, for its one GPU."""
    script = Machine(cards(1, driver=driver), cuda=cuda).script()
    bed.sh(node, f"cat >/usr/local/bin/nvidia-smi <<'STAND_IN'\n{script}STAND_IN\nchmod 755 /usr/local/bin/nvidia-smi")


def toolkit_says(bed: Bed, node: Node, words: str) -> None:
    """Let the NVIDIA Container Toolkit refuse to give GPUs to a container with these words, or accept: ""."""
    failing = f"cat >&2 <<'WORDS'\n{words}\nWORDS\nexit 1\n" if words else "exit 0\n"
    bed.sh(node, f"cat >{TOOLKIT} <<'STAND_IN'\n#!/bin/sh\n{failing}STAND_IN\nchmod 755 {TOOLKIT}")


def one_node(cli: Cli, command: str = "echo it runs", **keys: object) -> object:
    run = {"command": ["sh", "-c", command]}
    return cli.job("gpu", **bed_job(nodes=["node1"], image={"ref": IMAGE}, gpus="all", run=run, **keys))


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
    [image] = [check for check in json.loads(checked.stdout)["checks"] if check["name"] == "image"]
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


@pytest.mark.parametrize(
    ("words", "told", "fix"),
    [
        pytest.param(
            UNSATISFIED,
            "NVIDIA driver 550.54.14 (CUDA 12.4) is too old for image",
            "pytorch:24.05-py3",
            id="unsatisfied condition",
        ),
        pytest.param(
            "initialization error: nvml error: driver not loaded", "not loaded", "modprobe", id="driver not loaded"
        ),
        pytest.param(
            "ldcache error: process /sbin/ldconfig.real failed", "ldconfig", "config.toml", id="ldcache", marks=SLOW
        ),
        pytest.param(
            "device error: GPU-1: unknown device", "not find the GPU", "nvidia-smi -L", id="unknown", marks=SLOW
        ),
        pytest.param(
            "container error: cgroup subsystem devices not found", "(cgroup)", "1.18", id="cgroup", marks=SLOW
        ),
    ],
)
def test_the_toolkits_errors_have_their_own_fixes_and_nothing_is_left(
    words: str, told: str, fix: str, bed_cli: Cli, bed: Bed, gpu_node: Node
) -> None:
    driven(bed, gpu_node, "550.54.14", "12.4")
    toolkit_says(bed, gpu_node, words if words is UNSATISFIED else f"nvidia-container-cli: {words}")
    try:
        refused = bed_cli("up", one_node(bed_cli), code=3).stderr
    finally:
        toolkit_says(bed, gpu_node, "")
    assert "node1" in refused
    assert told in refused
    assert fix in refused
    assert bed.docker(gpu_node, "ps", "-aq") == ""


def test_a_containers_device_files_come_from_the_engine(bed_cli: Cli, bed: Bed, gpu_node: Node) -> None:
    """Not only from the toolkit, whose are lost when systemd reloads."""
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


def test_what_cuda_says_on_a_node_is_told_with_the_node_and_the_fix(bed_cli: Cli, clean_bed: Bed) -> None:
    # https://github.com/jade-hpc-gpu/jade-hpc-gpu.github.io/issues/194
    words = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    command = f'[ "$RANK" = 0 ] && exec sleep 60; echo "Traceback (most recent call last):"; echo "{words}"; exit 1'
    failed = bed_cli("up", bed_cli.job("ecc", **bed_job(run={"command": ["sh", "-c", command]}, gpus="none")), code=1)
    assert words in failed.stderr
    assert "node2 exited with code 1: the GPU's hardware reported an uncorrectable error" in failed.stderr
    assert "nvidia-smi -q -d ECC" in failed.stderr
    bed_cli("down", "--all")
