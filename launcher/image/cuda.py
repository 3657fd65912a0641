"""Check that a node's NVIDIA driver and GPUs support an image's CUDA, if possible before the image is pulled."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from launcher.errors import NodesFailed, NodeUnfit
from launcher.image import capability, versions
from launcher.image.capability import NGC
from launcher.model.facts import NodeFacts
from launcher.model.version import version_numbers
from launcher.node.engine import Engine

Numbers = tuple[int, ...]

# Minimum driver of each CUDA family (docs.nvidia.com/deploy/cuda-compatibility, "Minor Version Compatibility"); before
# CUDA 11, of each release (docs.nvidia.com/cuda/cuda-toolkit-release-notes, table 3)
_MINIMUM: dict[Numbers, str] = {
    (13,): "580.65.06",
    (12,): "525.60.13",
    (11,): "450.80.02",
    (10, 2): "440.33",
    (10, 1): "418.39",
    (10, 0): "410.48",
    (9, 2): "396.26",
    (9, 0): "384.81",
}
_REQUIRED = re.compile(r"unsatisfied condition: cuda ?>= ?([\d.]+)")


@dataclass(frozen=True)
class CudaVerdict:
    """Whether a node's driver and GPUs support an image's CUDA. what: the problem, "" if there is none."""

    runs: bool = True
    what: str = ""
    fix: str = ""


def verdict(node: NodeFacts, cuda: str, image: str, torch: str = "", variable: str = "") -> CudaVerdict:
    """Return whether the node's GPUs and driver support `cuda`, the image's CUDA version; assumed where unknown.

    image: "" for plain processes; `cuda` is then the version that the node's torch was built for. torch: its version.
    variable: TORCH_CUDA_ARCH_LIST of the image.
    """
    found = _driver_verdict(node, cuda, image)
    listed = capability.code(image, torch, cuda, variable)
    known = capability.cuda_of(torch) or cuda
    for gpu in node.gpus:
        has = f"GPU {gpu.index}, {gpu.name} (compute capability {gpu.capability})"
        since = capability.known_since(gpu.capability, known)
        if not capability.runs(gpu.capability, listed):
            what = f"{has}, is none of those for which {subject(node, image)} has code: "
            what += listed.replace("+PTX", " and newer")
            tag = _newest(node, (999,))
            other = f"use {NGC}:{tag}, the newest NVIDIA image for this GPU and driver" if tag else ""
            own = "an older torch or one for an older CUDA: pytorch.org/get-started/previous-versions"
            own = f"a torch for CUDA {since} or newer: pytorch.org/get-started" if since else own
            return CudaVerdict(runs=False, what=what, fix=other if image and other else f"install {own}")
        if since and found.runs and not found.what:
            what = f"{has}, is not known to the CUDA {known} of {subject(node, image)}, which may fail on it or be slow"
            found = CudaVerdict(what=what, fix=f"use an image with CUDA {since} or newer")
    return found


def _driver_verdict(node: NodeFacts, cuda: str, image: str) -> CudaVerdict:
    driver, wanted = node.nvidia.driver, version_numbers(cuda)
    if not driver or not wanted:
        return CudaVerdict()
    own, has = version_numbers(node.nvidia.cuda), _driver(node)
    if not _supports(node, wanted):
        if not _listed(driver, image):
            return _too_old(node, cuda, image)
        return CudaVerdict(
            what=f"{has} supports image {image} on data center GPUs only", fix="on other GPUs, update the driver"
        )
    if own and own[:1] == wanted[:1] and own[:2] < wanted[:2]:
        what = f"{has} is older than the CUDA {cuda} of {subject(node, image)}"
        what += ", which it supports only by minor-version compatibility"
        return CudaVerdict(what=what, fix="if kernels that are compiled at run time fail, update the driver")
    return CudaVerdict()


def subject(node: NodeFacts, image: str) -> str:
    """Return a description of the image or torch that needs the CUDA version."""
    return f"image {image}" if image else f"the torch of {node.python}"


def check(nodes: Sequence[NodeFacts], cuda: str, image: str, torch: str = "", variable: str = "") -> list[str]:
    """Return notes on these nodes. Raises NodesFailed with every node whose driver or GPU is too old for the image."""
    found = [(node, verdict(node, cuda, image, torch, variable)) for node in nodes]
    if errors := [NodeUnfit(f"node {node.name}", each.what, each.fix) for node, each in found if not each.runs]:
        raise NodesFailed(errors, of=len(nodes))
    return [f"{node.name}: {each.what}; {each.fix}" for node, each in found if each.what]


def of_name(image: str) -> str:
    """Return the CUDA version of an NVIDIA image by its tag, without the image itself; "" if unknown."""
    found = versions.release(image) if image.startswith(NGC) else None
    return found.cuda if found else ""


@contextmanager
def explaining_refused_cuda(engine: Engine, image: str) -> Iterator[None]:
    """If the engine refuses the image in this block, as NVIDIA_REQUIRE_CUDA is not met, say so as `check` does."""
    try:
        yield
    except NodeUnfit as error:
        required = _REQUIRED.search(error.what)
        if required is None:
            raise
        node = engine.facts()
        found = verdict(node, required[1], image)
        if found.runs:  # same CUDA family, but the image does not allow it on this GPU
            found = _too_old(node, required[1], image)
        raise NodeUnfit(error.where, found.what, found.fix) from error


def _driver(node: NodeFacts) -> str:
    own = f" (CUDA {node.nvidia.cuda})" if node.nvidia.cuda else ""
    return f"NVIDIA driver {node.nvidia.driver}{own}"


def _too_old(node: NodeFacts, cuda: str, image: str) -> CudaVerdict:
    driver, wanted, minimum = node.nvidia.driver, version_numbers(cuda), _minimum(version_numbers(cuda))
    tag = _newest(node, wanted)
    needs = f"a driver for CUDA {cuda}"
    if version_numbers(driver) < version_numbers(minimum):
        needs = f"{minimum} or newer"
    elif own := version_numbers(node.nvidia.cuda):
        tag = _newest(node, (own[0], own[1] + 1))
    what = f"{_driver(node)} is too old for {subject(node, image)} with CUDA {cuda}, which needs {needs}"
    other = f", or use {NGC}:{tag}, the newest NVIDIA image that it supports" if tag else ""
    if not image:
        other = ", or install a torch for an older CUDA: pytorch.org/get-started/previous-versions"
    return CudaVerdict(runs=False, what=what, fix=f"update the driver{other}")


def _supports(node: NodeFacts, cuda: Numbers) -> bool:
    """Whether the driver supports this CUDA by its version, or says so itself: that of Jetson Thor is 580.00."""
    family = 1 if cuda >= (11,) else 2
    return _runs(node.nvidia.driver, cuda) or version_numbers(node.nvidia.cuda)[:family] >= cuda[:family]


def _runs(driver: str, cuda: Numbers) -> bool:
    return version_numbers(driver) >= version_numbers(_minimum(cuda))


def _listed(driver: str, image: str) -> bool:
    """Whether the image's release notes list this driver branch, which the image supports on data center GPUs."""
    release, has = versions.release(image) if image.startswith(NGC) else None, version_numbers(driver)
    listed = [version_numbers(text) for text in re.findall(r"\d{3}(?:\.\d+)?", release.driver)] if release else []
    return any(has[:1] == each[:1] and has >= each for each in listed)


def _minimum(cuda: Numbers) -> str:
    """Return the minimum driver. A CUDA family newer than the table needs at least that of the last one listed."""
    return _MINIMUM.get(cuda[:1]) or _MINIMUM.get(cuda[:2]) or (_MINIMUM[13,] if cuda > (13,) else "0")


def _newest(node: NodeFacts, below: Numbers) -> str:
    """Return the tag of the newest NVIDIA image that this node supports, with a CUDA older than `below`."""
    driver = node.nvidia.driver
    for release in reversed(versions.releases()):
        numbers, listed = version_numbers(release.cuda), capability.of_release(release.tag)
        known = numbers and numbers[:2] < below[:2] and (not driver or _supports(node, numbers))
        fits = (
            capability.runs(gpu.capability, listed) and not capability.known_since(gpu.capability, release.cuda)
            for gpu in node.gpus
        )
        if known and all(fits):
            return release.tag
    return ""
