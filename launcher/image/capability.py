"""For which GPUs the torch of an image has code, by their compute capability. Pure.

torch is compiled for a list of capabilities, TORCH_CUDA_ARCH_LIST. On any other GPU its first kernel fails: "no kernel
image is available for execution on the device". Code for 8.0 also runs on 8.6, and with +PTX on all later GPUs: the
driver compiles it, without the help of the libraries that know them.
"""

from __future__ import annotations

import re

from launcher.image import versions
from launcher.model.version import version_numbers

NGC = "nvcr.io/nvidia/pytorch"
# Lists as in the variable; where newer GPUs run too, only the oldest entry counts: 7.5+PTX is 7.5 and newer.
# NVIDIA's images since a release. 25.01: "supports CUDA compute capability 7.5 and later", NVIDIA's release notes, and
# TORCH_CUDA_ARCH_LIST=7.5 8.0 8.6 9.0 10.0 12.0+PTX in the environments of 25.10 and 26.07; nvcc of 25.08 does not know
# 7.0 (Dao-AILab/fast-hadamard-transform issue 16). 20.06: 5.2 6.0 6.1 7.0 7.5 8.0+PTX in its environment; 21.12 and
# 23.10 begin alike. Before: "supports CUDA compute capability 6.0 and higher", release notes of 19.03 to 20.03.
_OF_RELEASES = (("25.01", "7.5+PTX"), ("20.06", "5.2+PTX"), ("19.01", "6.0+PTX"))
# Published wheels, by CUDA and torch since: "CUDA Support Matrix" in pytorch's RELEASE.md, with pull requests 164471,
# 175253, 182849; Volta came back for 2.8 (issue 160269) and left with 2.11 (issue 172352). Those for CUDA 12.1 to 12.6
# have no PTX (get_arch_list() in issues 167244, 182250). CUDA 11.8: 3.7 in manywheel/build_cuda.sh of pytorch/builder.
_OF_WHEELS = (
    ((13, 0), (2, 9), "7.5+PTX"),
    ((12, 8), (2, 11), "7.5+PTX"),
    ((12, 8), (2, 8), "7.0+PTX"),
    ((12, 8), (2, 7), "7.5+PTX"),
    ((12, 0), (2, 0), "5.0 6.0 7.0 7.5 8.0 8.6 9.0"),
    ((11, 8), (2, 0), "3.7+PTX"),
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
_ENTRY = re.compile(r"(\d{1,2}\.\d)([af]?)(\+PTX)?")


def code(image: str, torch: str = "", cuda: str = "", variable: str = "") -> str:
    """Return the list of an image, "" if it is not known. A name alone tells it for NVIDIA's and PyTorch's images.

    torch, cuda: the image's versions, if known. variable: TORCH_CUDA_ARCH_LIST in its environment.
    """
    if image.startswith(NGC) and (release := versions.release(image)):
        return of_release(release.tag)
    if found := _HUB.match(image):
        torch, cuda = found.groups()
    # The variable may be that of packages which were compiled in the image, for a torch from elsewhere.
    if versions.published(torch):
        own = cuda_of(torch) if versions.variant(torch) else cuda
        have = version_numbers(torch)[:2], version_numbers(own)[:2]
        return next((each for since, of, each in _OF_WHEELS if have[1] >= since and have[0] >= of), "")
    # NVIDIA's torch, 2.6.0a0+ecf3bae40a, in an image that is built on theirs: 15 characters have six of the commit.
    theirs = (each.tag for each in versions.releases() if "+" in torch and each.torch[:15] == torch[:15])
    return of_release(next(theirs, "")) or (variable if torch else "")


def of_release(tag: str) -> str:
    """Return the list of one of NVIDIA's images."""
    return next((each for since, each in _OF_RELEASES if tag >= since), "")


def cuda_of(torch: str) -> str:
    """Return the CUDA in a torch's version, 12.6 for 2.11.0+cu126, which is independent of the image's; else ""."""
    digits = versions.variant(torch).removeprefix("cu")
    return f"{digits[:-1]}.{digits[-1]}" if digits.isdigit() else ""


def runs(capability: str, listed: str) -> bool:
    """Whether a GPU runs code for this list; also if either is not known, such as entries that are names."""
    gpu, entries = version_numbers(capability), re.findall(r"[^\s;,]+", listed)
    return not gpu or not entries or any(_runs(gpu, each) for each in entries)


def _runs(gpu: tuple[int, ...], entry: str) -> bool:
    found = _ENTRY.fullmatch(entry)
    if found is None:
        return True
    own, kind, ptx = version_numbers(found[1]), found[2], found[3]
    if kind == "a":  # for this one alone
        return gpu == own
    return gpu >= own and (gpu[0] == own[0] or (ptx is not None and not kind))  # f: only for its major version


def known_since(capability: str, cuda: str) -> str:
    """Return the first CUDA that knows this GPU if `cuda` is older than that, else ""."""
    since = _KNOWN_SINCE.get(capability)
    return ".".join(map(str, since)) if since and cuda and version_numbers(cuda)[:2] < since else ""
