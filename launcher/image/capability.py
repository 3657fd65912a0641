"""For which GPUs the torch of an image has code, by their compute capability. Pure.

torch is compiled for a list of capabilities, TORCH_CUDA_ARCH_LIST. On an older GPU its first kernel fails: "no kernel
image is available for execution on the device". A list's oldest entry is what a GPU needs; a newer GPU than the image's
CUDA knows may run code that the driver compiles, without the libraries' help.
"""

from __future__ import annotations

import re

from launcher.image import versions
from launcher.model.version import version_numbers

NGC = "nvcr.io/nvidia/pytorch"
# The oldest capability of NVIDIA's images since a release. 25.01: "supports CUDA compute capability 7.5 and later",
# NVIDIA's release notes, and TORCH_CUDA_ARCH_LIST=7.5 8.0 8.6 9.0 10.0 12.0+PTX in the environments of 25.10 and 26.07;
# nvcc of 25.08 does not know 7.0 (Dao-AILab/fast-hadamard-transform issue 16). 20.06: 5.2 6.0 6.1 7.0 7.5 8.0+PTX in
# its environment; those of 21.12 and 23.10 begin alike. Before: "supports CUDA compute capability 6.0 and higher",
# release notes of 19.03 to 20.03.
_OF_RELEASES = (("25.01", "7.5"), ("20.06", "5.2"), ("19.01", "6.0"))
# The oldest capability of published wheels, by CUDA and torch since: "CUDA Support Matrix" in pytorch's RELEASE.md,
# with pull requests 164471, 175253, 182849; Volta came back for 2.8 (issue 160269) and left with 2.11 (issue 172352).
_OF_WHEELS = (
    ((13, 0), (2, 9), "7.5"),
    ((12, 8), (2, 11), "7.5"),
    ((12, 8), (2, 8), "7.0"),
    ((12, 8), (2, 7), "7.5"),
    ((11, 8), (2, 0), "5.0"),
)
# The first CUDA that knows a capability: release notes of the CUDA toolkit.
_KNOWN_SINCE = {
    "8.0": (11, 0),
    "8.6": (11, 1),
    "8.9": (11, 8),
    "9.0": (11, 8),
    "10.0": (12, 8),
    "12.0": (12, 8),
    "10.3": (12, 9),
    "12.1": (12, 9),
}
_HUB = re.compile(r"(?:docker\.io/)?pytorch/pytorch:(\d+\.\d+\.\d+)-cuda(\d+\.\d+)-")
_ENTRY = re.compile(r"\d{1,2}\.\d")

Numbers = tuple[int, ...]


def oldest(image: str, torch: str = "", cuda: str = "", variable: str = "") -> str:
    """Return the oldest capability, "" if it is not known. A name alone tells it for NVIDIA's and PyTorch's images.

    torch, cuda: the image's versions, if known. variable: TORCH_CUDA_ARCH_LIST in its environment.
    """
    if image.startswith(NGC) and (release := versions.release(image)):
        return of_release(release.tag)
    if found := _HUB.match(image):
        torch, cuda = found.groups()
    if versions.published(torch):  # the variable of such an image is about what was compiled in it
        have = version_numbers(torch)[:2], version_numbers(cuda)[:2]
        return next((each for since, of, each in _OF_WHEELS if have[1] >= since and have[0] >= of), "")
    return min(_ENTRY.findall(variable), key=version_numbers, default="") if torch else ""


def of_release(tag: str) -> str:
    """Return the oldest capability of one of NVIDIA's images."""
    return next((each for since, each in _OF_RELEASES if tag >= since), "")


def older(capability: str, least: str) -> bool:
    """Whether a GPU is older than this capability; not if either is unknown."""
    return bool(capability and least) and version_numbers(capability) < version_numbers(least)


def known_since(capability: str, cuda: str) -> str:
    """Return the first CUDA that knows this GPU if `cuda` is older than that, else ""."""
    since = _KNOWN_SINCE.get(capability)
    return ".".join(map(str, since)) if since and cuda and version_numbers(cuda)[:2] < since else ""
