"""What a container of an image can do, found by running images/probe.py in one; the answers are kept by image id."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.errors import ImageUnfit
from launcher.image.faults import Report
from launcher.image.names import asset
from launcher.model import labels
from launcher.model.container import ContainerSpec, Layout, Mount
from launcher.model.facts import ImageFacts, Launch
from launcher.node import cache
from launcher.node.engine import Engine, ImageInfo

MARK = "LAUNCHER-PROBE "  # images/probe.py prints it in front of its JSON
MOUNTED_MAX_AGE = 600.0  # seconds: what lies under a mount may change without the image changing
FAST_TIMEOUT = 60.0
FULL_TIMEOUT = 300.0
# python3, else python; an image without either is a result, not a failure
FIND_PYTHON = (
    'for p in python3 python; do if command -v "$p" >/dev/null 2>&1; then exec "$p" -c "$0" "$p" "$@"; fi; done; '
    f"""echo; echo '{MARK}{{"python": ""}}'"""
)


@dataclass(frozen=True)
class Surroundings:
    """What else decides what Python finds in a job's containers."""

    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""  # "uid:gid", "" for the image's own
    groups: tuple[int, ...] = ()


NOTHING = Surroundings()


def image_facts(engine: Engine, reference: str, surroundings: Surroundings = NOTHING) -> ImageFacts:
    """What the plan must know of an image; for plain processes, of the Python that runs the launcher.

    A warm call costs one `inspect`: forever if torch is in the image, for MOUNTED_MAX_AGE seconds if it is under a
    mount (or is missing and a mount could bring it). Raises ImageUnfit if the node lacks the image or nothing can be
    run in it.
    """
    if engine.images is None:
        found = probe_here(engine, surroundings.env)
        return _facts("", "", (), found)
    info = engine.images.inspect(reference)
    if info is None:
        raise ImageUnfit(engine.node, f"has no image {reference}", "launcher image ship JOB sends it there")
    view = [[mount.source, mount.target] for mount in surroundings.mounts]
    where = [engine.host, view] if view else []  # the same path may hold other things on another node
    name = cache.key("facts", 1, info.id, where, dict(surroundings.env), surroundings.user, asset("probe.py"))
    kept = cache.get("facts", name)
    if kept is not None and _in_image(kept, surroundings):
        return _facts(reference, info.id, info.entrypoint, Report.from_json(kept))
    kept = cache.get("facts", name, MOUNTED_MAX_AGE)
    if kept is None:
        kept = run(engine, info.id, "facts", surroundings, reference=reference)
        cache.put("facts", name, kept)
    return _facts(reference, info.id, info.entrypoint, Report.from_json(kept))


def full_report(engine: Engine, info: ImageInfo, reference: str) -> Report:
    """Everything, with torch and torchvision imported and tried, on a GPU too if the node has one.

    A warm call costs nothing. Raises ImageUnfit if nothing can be run in the image.
    """
    name = cache.key("full", 2, info.id, engine.host, asset("probe.py"))
    kept = cache.get("full", name)
    if kept is None:
        gpus, driver = _a_gpu(engine)
        kept = run(engine, info.id, "full", NOTHING, reference=reference, gpus=gpus, driver=driver)
        cache.put("full", name, kept)
    return Report.from_json(kept)


def _a_gpu(engine: Engine) -> tuple[tuple[str, ...], str]:
    """One of the node's GPUs (UUID) and the engine's way to grant it; empty without a GPU, or a way."""
    node = engine.facts()
    if not node.gpus or node.engine is None:
        return (), ""
    if "nvidia" in node.engine.runtimes:
        return (node.gpus[0].uuid,), "nvidia"
    if any(name.startswith("nvidia.com/gpu") for name in node.engine.cdi_devices):
        return (node.gpus[0].uuid,), "cdi"
    return (), ""


def probe_here(engine: Engine, env: Mapping[str, str]) -> Report:
    """The facts of the Python that runs the launcher: plain processes run in the same."""
    argv = (sys.executable, "-c", asset("probe.py"), sys.executable, "facts")
    return Report.from_json(_outcome(engine, _spec("", argv, Surroundings(env=env)), FAST_TIMEOUT, sys.executable))


def run(
    engine: Engine,
    image: str,
    mode: str,
    surroundings: Surroundings,
    *,
    reference: str,
    gpus: tuple[str, ...] = (),
    driver: str = "",
) -> dict[str, Any]:
    """Run images/probe.py in a short container of `image` (an id): its JSON object. Raises ImageUnfit."""
    argv = ("sh", "-c", FIND_PYTHON, asset("probe.py"), mode)
    spec = _spec(image, argv, surroundings, gpus, driver)
    return _outcome(engine, spec, FULL_TIMEOUT if mode == "full" else FAST_TIMEOUT, reference)


def _spec(
    image: str, argv: tuple[str, ...], view: Surroundings, gpus: tuple[str, ...] = (), driver: str = ""
) -> ContainerSpec:
    return ContainerSpec(
        name=f"launcher-probe-{secrets.token_hex(6)}",
        image=image,
        argv=argv,
        env={"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **view.env},
        labels={labels.PURPOSE: "probe"},
        layout=Layout("", "", ""),
        output_dir="",
        user=view.user,
        groups=view.groups,
        mounts=view.mounts,
        gpus=gpus,
        gpu_driver=driver,
    )


def _outcome(engine: Engine, spec: ContainerSpec, timeout: float, reference: str) -> dict[str, Any]:
    code, output = engine.run_probe(spec, timeout)
    for line in reversed(output.decode("utf-8", "replace").splitlines()):
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line[len(MARK) :])
            return found
    last = output.decode("utf-8", "replace").strip().splitlines()[-5:]
    raise ImageUnfit(
        f"image {reference} on {engine.node}",
        f"its Python could not be probed (exit code {code}): {' | '.join(last) or 'no output'}",
        "the image must have a working sh and Python 3.6 or later; try: launcher shell JOB",
    )


def _in_image(found: Mapping[str, Any], view: Surroundings) -> bool:
    folder = str(found.get("torch_folder", ""))
    if not folder:
        return not view.mounts
    return not any(f"{folder}/".startswith(mount.target.rstrip("/") + "/") for mount in view.mounts)


def _facts(reference: str, image: str, entrypoint: tuple[str, ...], found: Report) -> ImageFacts:
    launch = Launch.RUN if found.run else Launch.LAUNCH if found.launch else Launch.NONE
    return ImageFacts(reference, image, found.python, launch, found.flags, found.torch, entrypoint)
