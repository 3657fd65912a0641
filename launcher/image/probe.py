"""Probe an image by running images/probe.py in a container of it; results are cached by image ID."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher.errors import EngineFailed, ImageUnfit, NodeUnfit
from launcher.faults.lookup import cause_of_report
from launcher.faults.table import ENGINE
from launcher.image.cuda import explaining_refused_cuda
from launcher.image.faults import Report
from launcher.image.names import asset
from launcher.model import labels
from launcher.model.container import CODE, ContainerSpec
from launcher.model.facts import ImageFacts, ImageInfo, Launch
from launcher.node import cache
from launcher.node.engine import Engine
from launcher.planning.gpus import devices, driver, user

MARK = "LAUNCHER-PROBE "  # images/probe.py prints this before its JSON
MOUNTED_MAX_AGE = 600.0  # seconds: mounted files may change while the image does not
FAST_TIMEOUT = 60.0
FULL_TIMEOUT = 300.0
ANY_CONTAINER = ContainerSpec("", "", ())  # an image with its defaults
# python3, else python, also if only that one has torch; an image without Python is a result, not an error
FIND_PYTHON = f"""
has_torch() {{ "$1" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null; }}
used=$(command -v python3) other=$(command -v python)
if [ -n "$used" ] && [ -n "$other" ] && [ "$(readlink -f "$used")" != "$(readlink -f "$other")" ]; then
    if has_torch "$other" && ! has_torch "$used"; then used=; fi
fi
if [ -n "$used" ]; then exec python3 -c "$0" python3 "$@"; fi
if [ -n "$other" ]; then exec python -c "$0" python "$@"; fi
echo; echo '{MARK}{{"python": ""}}'
"""


def image_facts(engine: Engine, reference: str, info: ImageInfo | None, like: ContainerSpec) -> ImageFacts:
    """Return the facts about an image that the plan needs; for plain processes (None), about the launcher's Python.

    like: a container of the job; its mounts, variables and user decide which packages Python finds.
    Results are cached: forever if torch is in the image, for MOUNTED_MAX_AGE seconds if it is, or could be, in a
    mount. Raises ImageUnfit if nothing can be run in the image.
    """
    if info is None:
        argv = (sys.executable, "-c", asset("probe.py"), sys.executable, "facts")
        kept = run(engine, "", sys.executable, argv, like, FAST_TIMEOUT)
    else:
        view = [[mount.source, mount.target] for mount in like.mounts]
        where = [engine.host, view] if view else []  # the same path may have other content on another node
        name = cache.key(info.id, where, dict(like.env), like.user, asset("probe.py"), FIND_PYTHON)
        kept = cache.get("facts", name)
        if kept is None or not (_in_image(kept, like) or cache.get("facts", name, MOUNTED_MAX_AGE)):
            kept = _seen(engine, info, reference, "facts", like, FAST_TIMEOUT)
            cache.put("facts", name, kept)
    found = Report.from_json(kept)
    launch = Launch.RUN if found.run else Launch.LAUNCH if found.launch else Launch.NONE
    image, entrypoint = (info.id, info.entrypoint) if info else ("", ())
    cuda = (info.cuda if info else "") or found.cuda
    points = {mount.target.removeprefix(f"{CODE}/").partition("/")[0] for mount in like.mounts}
    hidden = tuple(name for name in found.code if name not in points) if info else ()
    return ImageFacts(
        reference, image, found.python, launch, found.flags, found.torch, entrypoint, cuda, hidden, found.decoder
    )


def full_report(engine: Engine, info: ImageInfo, reference: str, *, gpus: bool = True) -> Report:
    """Return a full report: torch and torchvision are imported and tested, also on an idle GPU if the node has one.

    gpus: False for a job without GPUs, which may run on nodes with unusable GPUs.

    Results are cached. Raises ImageUnfit if nothing can be run in the image.
    """
    name = cache.key(info.id, engine.host, asset("probe.py"), FIND_PYTHON, gpus)
    kept = cache.get("full", name)
    if kept is None:
        like = with_a_gpu(engine) if gpus else ANY_CONTAINER
        kept = _seen(engine, info, reference, "full", like, FULL_TIMEOUT)
        cache.put("full", name, kept)
    return Report.from_json(kept)


def _seen(
    engine: Engine, info: ImageInfo, reference: str, mode: str, like: ContainerSpec, timeout: float
) -> Mapping[str, Any]:
    """Return the report of a probe; with the image's entrypoint, as jobs run, if only that one leads to torch.

    It may activate an environment (micromamba, RAPIDS). It may also be a program that takes other arguments.
    """
    found = run(engine, info.id, reference, _argv(mode), like, timeout)
    if found.get("torch_folder") or not info.entrypoint:
        return found
    try:
        activated = run(engine, info.id, reference, (*info.entrypoint, *_argv(mode)), like, timeout)
    except (ImageUnfit, EngineFailed):
        return found
    return activated if activated.get("torch_folder") else found


def with_a_gpu(engine: Engine) -> ContainerSpec:
    """Return a spec with an idle GPU, or none: on a GPU in use the image might run out of memory."""
    node = engine.facts()
    with contextlib.suppress(NodeUnfit):  # no NVIDIA Container Toolkit: check on the CPU only
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
    """Run images/probe.py in a container of `image` (an ID); return its JSON object. Raises ImageUnfit."""
    spec = replace(
        like,
        name=f"launcher-probe-{secrets.token_hex(6)}",
        image=image,
        argv=argv,
        env={"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **like.env},
        labels={labels.PURPOSE: "probe"},
    )
    with explaining_refused_cuda(engine, reference):
        code, output = engine.run_probe(spec, timeout)
    lines = output.decode("utf-8", "replace").strip().splitlines()
    for line in reversed(lines):
        if line.startswith(MARK):
            found: Mapping[str, Any] = json.loads(line[len(MARK) :])
            return found
    where = f"image {reference} on {engine.node}"
    if cause := cause_of_report(ENGINE, "\n".join(lines)):
        raise ImageUnfit(where, f"{cause.what}: {lines[-1]}", cause.fix)
    raise ImageUnfit(
        where,
        f"the probe of its Python failed (exit code {code}): {' | '.join(lines[-5:]) or 'no output'}",
        "the image needs a working sh and Python 3.6 or later; to inspect it, run: launcher shell JOB",
    )


def _in_image(found: Mapping[str, Any], like: ContainerSpec) -> bool:
    folder = str(found.get("torch_folder", ""))
    if not folder:
        return not like.mounts
    return not any(f"{folder}/".startswith(mount.target.rstrip("/") + "/") for mount in like.mounts)
