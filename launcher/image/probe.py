"""What a container of an image can do, found by running images/probe.py in one; the answers are kept by image id."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher.errors import ImageUnfit, NodeUnfit
from launcher.image.cuda import explained
from launcher.image.faults import Report
from launcher.image.names import asset
from launcher.model import labels
from launcher.model.container import ContainerSpec
from launcher.model.facts import ImageFacts, ImageInfo, Launch
from launcher.node import cache
from launcher.node.engine import Engine
from launcher.planning.gpus import devices, driver, user

MARK = "LAUNCHER-PROBE "  # images/probe.py prints it in front of its JSON
MOUNTED_MAX_AGE = 600.0  # seconds: what lies under a mount may change without the image changing
FAST_TIMEOUT = 60.0
FULL_TIMEOUT = 300.0
ANY_CONTAINER = ContainerSpec("", "", ())  # of an image as it is
# python3, else python; an image without either is a result, not a failure
FIND_PYTHON = (
    'for p in python3 python; do if command -v "$p" >/dev/null 2>&1; then exec "$p" -c "$0" "$p" "$@"; fi; done; '
    f"""echo; echo '{MARK}{{"python": ""}}'"""
)


def image_facts(engine: Engine, reference: str, info: ImageInfo | None, like: ContainerSpec) -> ImageFacts:
    """What the plan must know of an image that the engine has; for plain processes (None), of the launcher's Python.

    like: a container of the job, whose mounts, variables and user decide what Python finds.
    A warm call costs nothing: forever if torch is in the image, for MOUNTED_MAX_AGE seconds if it is under a mount
    (or is missing and a mount could bring it). Raises ImageUnfit if nothing can be run in it.
    """
    if info is None:
        argv = (sys.executable, "-c", asset("probe.py"), sys.executable, "facts")
        kept = run(engine, "", sys.executable, argv, like, FAST_TIMEOUT)
    else:
        view = [[mount.source, mount.target] for mount in like.mounts]
        where = [engine.host, view] if view else []  # the same path may hold other things on another node
        name = cache.key(info.id, where, dict(like.env), like.user, asset("probe.py"))
        kept = cache.get("facts", name)
        if kept is None or not (_in_image(kept, like) or cache.get("facts", name, MOUNTED_MAX_AGE)):
            kept = run(engine, info.id, reference, _argv("facts"), like, FAST_TIMEOUT)
            cache.put("facts", name, kept)
    found = Report.from_json(kept)
    launch = Launch.RUN if found.run else Launch.LAUNCH if found.launch else Launch.NONE
    image, entrypoint = (info.id, info.entrypoint) if info else ("", ())
    cuda = (info.cuda if info else "") or found.cuda
    return ImageFacts(reference, image, found.python, launch, found.flags, found.torch, entrypoint, cuda)


def full_report(engine: Engine, info: ImageInfo, reference: str, *, gpus: bool = True) -> Report:
    """Everything, with torch and torchvision imported and tried, on an idle GPU too if the node has one.

    gpus: False for a job without GPUs, which runs where theirs cannot be used.

    A warm call costs nothing. Raises ImageUnfit if nothing can be run in the image.
    """
    name = cache.key(info.id, engine.host, asset("probe.py"), gpus)
    kept = cache.get("full", name)
    if kept is None:
        like = _with_a_gpu(engine) if gpus else ANY_CONTAINER
        kept = run(engine, info.id, reference, _argv("full"), like, FULL_TIMEOUT)
        cache.put("full", name, kept)
    return Report.from_json(kept)


def _with_a_gpu(engine: Engine) -> ContainerSpec:
    """One of the node's GPUs, none if it has no idle one: on another one the image might fail for want of memory."""
    node = engine.facts()
    with contextlib.suppress(NodeUnfit):  # an engine without the NVIDIA Container Toolkit: the CPU alone is tried
        idle = [device for device in devices(node) if not user(node, device)]
        if idle and node.engine is not None:
            uuids = (idle[0].uuid,)
            return replace(ANY_CONTAINER, gpus=uuids, gpu_driver=driver(node, uuids))
    return ANY_CONTAINER


def _argv(mode: str) -> tuple[str, ...]:
    return ("sh", "-c", FIND_PYTHON, asset("probe.py"), mode)


def run(
    engine: Engine, image: str, reference: str, argv: tuple[str, ...], like: ContainerSpec, timeout: float
) -> Mapping[str, Any]:
    """The JSON object that images/probe.py prints in a short container of `image` (an id). Raises ImageUnfit."""
    spec = replace(
        like,
        name=f"launcher-probe-{secrets.token_hex(6)}",
        image=image,
        argv=argv,
        env={"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **like.env},
        labels={labels.PURPOSE: "probe"},
    )
    with explained(engine, reference):
        code, output = engine.run_probe(spec, timeout)
    lines = output.decode("utf-8", "replace").strip().splitlines()
    for line in reversed(lines):
        if line.startswith(MARK):
            found: Mapping[str, Any] = json.loads(line[len(MARK) :])
            return found
    raise ImageUnfit(
        f"image {reference} on {engine.node}",
        f"its Python could not be probed (exit code {code}): {' | '.join(lines[-5:]) or 'no output'}",
        "the image must have a working sh and Python 3.6 or later; try: launcher shell JOB",
    )


def _in_image(found: Mapping[str, Any], like: ContainerSpec) -> bool:
    folder = str(found.get("torch_folder", ""))
    if not folder:
        return not like.mounts
    return not any(f"{folder}/".startswith(mount.target.rstrip("/") + "/") for mount in like.mounts)
