"""Check the packages that a job adds to its image: each can be imported, and pip finds no new conflict.

flash-attn, transformer-engine, torchaudio and others are compiled for one torch. A wheel for another one installs
without a word, and the run would fail with "undefined symbol" after the image was sent to every node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.errors import ImageUnfit
from launcher.image.builder import Repair
from launcher.image.names import asset
from launcher.image.probe import ANY_CONTAINER, FIND_PYTHON, run, with_a_gpu
from launcher.model.facts import ImageInfo
from launcher.model.progress import Log

TIMEOUT = 900.0  # seconds, of all imports
NEEDS_A_GPU = re.compile(
    r"libcuda\.so|libnvidia-ml|no nvidia driver|no cuda gpus|no cuda-capable device", re.IGNORECASE
)


def check(repair: Repair, built: ImageInfo, tag: str, log: Log, *, gpus: bool) -> None:
    """Log what is odd about the packages of a built image. Raises ImageUnfit if one of them cannot be imported.

    gpus: whether an idle GPU may be used.
    """
    packages, engine = repair.lock.packages, repair.builder
    log(f"image {tag}: importing {', '.join(packages)}")
    like = with_a_gpu(engine) if gpus else ANY_CONTAINER

    def probe(image: ImageInfo, *requirements: str) -> Mapping[str, Any]:
        argv = ("sh", "-c", FIND_PYTHON, asset("packages.py"), *requirements)
        return run(engine, image.id, tag, argv, like, TIMEOUT)

    after = probe(built, *packages)
    known = set(probe(repair.info).get("conflicts", ())) if after.get("conflicts") else set()
    for note in notes(after, known, gpu=bool(like.gpus)):
        log(f"image {tag}: note: {note}")
    if broken := faults(after, gpu=bool(like.gpus)):
        fix = f"in image.packages, choose versions for torch {repair.lock.torch or 'of the base'}, or remove them"
        raise ImageUnfit(f"image {tag}", "; ".join(broken), fix)


def faults(found: Mapping[str, Any], *, gpu: bool) -> list[str]:
    """Return why packages do not work. Without a GPU, what needs one is no fault."""
    errors: Mapping[str, str] = found.get("imports") or {}
    return [
        f"package {name} cannot be imported: {error}"
        for name, error in errors.items()
        if error and (gpu or not NEEDS_A_GPU.search(error))
    ]


def notes(found: Mapping[str, Any], known: set[str], *, gpu: bool) -> Iterator[str]:
    """Yield what was not checked, and the conflicts that the packages brought. known: those of the base."""
    for requirement in found.get("unknown", ()):
        yield f"package {requirement} was not imported, as the name of its module is not known"
    errors: Mapping[str, str] = found.get("imports") or {}
    for name, error in errors.items():
        if error and not gpu and NEEDS_A_GPU.search(error):
            yield f"package {name} was not checked, as it cannot be imported without a GPU: {error}"
    for line in found.get("conflicts", ()):
        if line not in known:
            yield f"pip check: {line}"
