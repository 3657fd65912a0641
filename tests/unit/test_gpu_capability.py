"""GPUs for which an image's torch has no code, or whose CUDA does not know them: said before the image is pulled.

The images' lists are public, their sources in launcher/image/capability.py; none was seen on hardware of ours.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import NodesFailed
from launcher.image import capability, cuda, versions
from launcher.image.capability import NGC
from launcher.model.facts import NodeFacts, NvidiaFacts
from launcher.model.version import version_numbers
from launcher.node.docker.values import image_info
from tests.unit.test_plan import node

TO_HOPPER = "5.0 6.0 7.0 7.5 8.0 8.6 9.0"
V100, T4, H100, RTX_5090 = (
    ("Tesla V100-SXM2-32GB", "7.0"),
    ("Tesla T4", "7.5"),
    ("NVIDIA H100 80GB HBM3", "9.0"),
    ("NVIDIA GeForce RTX 5090", "12.0"),
)


def machine(*gpus: tuple[str, str], driver: str = "580.65.06", newest: str = "13.0") -> NodeFacts:
    facts = node(0, gpus=len(gpus), name="gpu-0", nvidia=NvidiaFacts(driver=driver, cuda=newest))
    named = zip(facts.gpus, gpus, strict=True)
    return replace(facts, gpus=tuple(replace(gpu, name=name, capability=has) for gpu, (name, has) in named))


@pytest.mark.parametrize(
    ("image", "torch", "version", "variable", "listed"),
    [
        (f"{NGC}:26.09-py3", "", "", "", "7.5+PTX"),
        (f"{NGC}:25.01-py3", "", "", "", "7.5+PTX"),
        (f"{NGC}:24.12-py3@sha256:00", "", "", "", "5.2+PTX"),
        (f"{NGC}:19.05-py3", "", "", "", "6.0+PTX"),
        (f"{NGC}:99.01-py3", "", "", "", ""),  # not in the table
        ("pytorch/pytorch:2.11.0-cuda12.8-cudnn9-devel", "", "", "", "7.5+PTX"),
        ("docker.io/pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime", "", "", "", "7.0+PTX"),
        ("pytorch/pytorch:2.11.0-cuda12.6-cudnn9-runtime", "", "", "", TO_HOPPER),
        ("mine:1", "2.9.0+cu130", "13.0", "", "7.5+PTX"),
        ("mine:1", "2.6.0+cu124", "12.4", "8.0", TO_HOPPER),  # the variable is about what was compiled in that image
        ("mine:1", "2.11.0+cu126", "12.8", "", TO_HOPPER),  # a wheel has its own CUDA
        ("mine:1", "2.7.1+cu128", "12.4", "", "7.5+PTX"),
        ("mine:1", "2.1.0", "11.8", "", "3.7+PTX"),
        ("mine:1", "2.6.0a0+ecf3bae40a.nv25.01", "12.8", "9.0", "7.5+PTX"),  # built on NVIDIA's
        ("mine:1", "2.10.0+cpu", "", "8.0", ""),
        ("mine:1", "2.10.0+cpu", "12.4", "", ""),
        ("mine:1", "2.13.0a0+9186a08", "13.3", "9.0a", "7.5+PTX"),
        ("mine:1", "2.13.0a0+git9186a08", "13.3", "7.5 8.0 12.0+PTX", "7.5 8.0 12.0+PTX"),  # one's own build
        ("mine:1", "2.1.0a0+32f93b1", "12.2.2", "native", "5.2+PTX"),
        ("mine:1", "2.1.0", "", "native", ""),
        ("mine:1", "2.12.0a0+git32f93b1", "12.2.2", "native", "native"),
        ("mine:1", "", "", "8.0", ""),  # which torch it has is not known yet
    ],
)
def test_the_code_in_an_image(image: str, torch: str, version: str, variable: str, listed: str) -> None:
    assert capability.code(image, torch, version, variable) == listed


EVERY = ["3.7", "5.2", "6.1", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"]


@pytest.mark.parametrize(
    ("listed", "lacking"),
    [
        ("7.5+PTX", ["3.7", "5.2", "6.1", "7.0"]),
        (TO_HOPPER, ["3.7", "10.0", "10.3", "12.0", "12.1"]),
        ("8.0;8.6;9.0a", ["3.7", "5.2", "6.1", "7.0", "7.5", "10.0", "10.3", "12.0", "12.1"]),
        ("9.0a", [each for each in EVERY if each != "9.0"]),
        ("10.0a 12.0f", [each for each in EVERY if each not in ("10.0", "12.0", "12.1")]),
        ("10.0, 12.0", EVERY[:-4]),
        ("8.0+PTX;9.0a", ["3.7", "5.2", "6.1", "7.0", "7.5"]),
        ("Volta;8.0", []),  # names of architectures are not read
        ("native", []),
        (" ; ", []),
        ("", []),
    ],
)
def test_the_gpus_that_run_code_for_a_list(listed: str, lacking: list[str]) -> None:
    assert [each for each in EVERY if not capability.runs(each, listed)] == lacking
    assert capability.runs("", listed)
    assert capability.runs("[N/A]", listed)


@given(*[st.text(max_size=30) for _ in range(4)])
def test_any_text_is_an_image(image: str, torch: str, version: str, variable: str) -> None:
    assert capability.runs("7.0", capability.code(f"{NGC}:{image}", torch, version, variable)) in (True, False)
    assert capability.runs("7.0", variable) in (True, False)
    assert isinstance(cuda.verdict(machine(("x", torch)), version, image, torch, variable).runs, bool)


def test_a_volta_gpu_is_refused_with_the_last_image_that_has_code_for_it() -> None:
    with pytest.raises(NodesFailed) as refusal:
        cuda.check([machine(T4, V100)], cuda.of_name(f"{NGC}:26.09-py3"), f"{NGC}:26.09-py3")
    assert refusal.value.exit_code == 3
    told = str(refusal.value)
    assert "node gpu-0: GPU 1, Tesla V100-SXM2-32GB (compute capability 7.0), is none of those for which" in told
    assert f"image {NGC}:26.09-py3 has code: 7.5 and newer" in told
    last = max(each.tag for each in versions.releases() if each.tag < "25.01" and each.cuda)
    assert f"use {NGC}:{last}, the newest NVIDIA image for this GPU and driver" in told


def test_the_image_that_is_named_also_fits_the_driver() -> None:
    old = machine(V100, driver="470.82.01", newest="11.4")
    found = cuda.verdict(old, "13.4", f"{NGC}:26.09-py3")
    assert "22.12-py3" in found.fix
    found = cuda.verdict(machine(V100, driver="535.104.05", newest="12.2"), "12.9", "mine:1", "2.11.0+cu129")
    assert not found.runs
    # a driver that is too old for this image: what is advised has code for the GPU too, unlike 25.06 with CUDA 12.9
    found = cuda.verdict(machine(V100, driver="535.104.05", newest="12.2"), "13.0", "mine:1")
    assert "25.0" not in found.fix
    assert f"use {NGC}:24." in found.fix


def test_a_driver_supports_the_cuda_that_it_names_itself() -> None:
    """That of Jetson Thor is 580.00, although CUDA 13 needs 580.65.06 elsewhere."""
    thor = ("NVIDIA Thor", "11.0")
    assert cuda.verdict(machine(thor, driver="580.00", newest="13.0"), "13.0", "mine:1").runs
    assert not cuda.verdict(machine(thor, driver="580.00", newest=""), "13.0", "mine:1").runs
    assert not cuda.verdict(machine(V100, driver="418.00", newest="10.1"), "10.2", "mine:1").runs


def test_a_gpu_that_is_newer_than_a_wheel_is_refused() -> None:
    """pytorch issue 167244: a published wheel for CUDA 12.4 and an RTX 5090."""
    name = "pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime"
    for image, torch in ((name, ""), ("mine:1", "2.6.0+cu124")):
        found = cuda.verdict(machine(RTX_5090, driver="570.86.10", newest="12.8"), "12.8", image, torch)
        assert not found.runs
        assert found.what.endswith(f"is none of those for which image {image} has code: {TO_HOPPER}")
        chosen = next(each for each in versions.releases() if f"{each.tag}, the newest" in found.fix)
        assert version_numbers(chosen.cuda)[:2] in ((12, 8), (12, 9))
    own = cuda.verdict(machine(RTX_5090), "12.4", "", "2.6.0+cu124")
    assert own.fix == "install a torch for CUDA 12.8 or newer: pytorch.org/get-started"
    for capable in (RTX_5090, ("NVIDIA GB10", "12.1"), ("NVIDIA B300", "10.3")):
        assert cuda.verdict(machine(capable), "12.4", "mine:1", "2.8.0+cu128").runs


def test_an_own_torch_is_replaced_not_an_image() -> None:
    found = cuda.verdict(machine(V100), "13.0", "", "2.9.0+cu130")
    assert not found.runs
    assert found.fix == "install an older torch or one for an older CUDA: pytorch.org/get-started/previous-versions"


@pytest.mark.parametrize(
    ("gpus", "image"),
    [
        ((T4, H100), f"{NGC}:26.09-py3"),
        ((V100,), f"{NGC}:24.05-py3"),
        ((RTX_5090,), f"{NGC}:25.02-py3"),
        ((("Graphics Device", ""),), f"{NGC}:26.09-py3"),  # older drivers do not report it
    ],
)
def test_gpus_that_fit_or_are_not_known_say_nothing(gpus: tuple[tuple[str, str], ...], image: str) -> None:
    assert cuda.check([machine(*gpus, newest="13.4")], cuda.of_name(image), image) == []


def test_a_gpu_that_is_newer_than_the_images_cuda_is_a_note() -> None:
    [note] = cuda.check([machine(RTX_5090)], "12.4.1.003", f"{NGC}:24.05-py3")
    assert "GPU 0, NVIDIA GeForce RTX 5090 (compute capability 12.0), is not known to the CUDA 12.4.1.003 of" in note
    assert note.endswith("use an image with CUDA 12.8 or newer")


def test_the_list_is_read_from_an_images_environment() -> None:
    found = {
        "Id": "sha256:0",
        "Config": {"Env": ["TORCH_CUDA_ARCH_LIST=7.5 8.0+PTX", "CUDA_VERSION=13.0", "A", "B=1=2"]},
    }
    assert (image_info(found).gpu_code, image_info(found).cuda) == ("7.5 8.0+PTX", "13.0")
    assert image_info({"Id": "sha256:0"}).gpu_code == ""
