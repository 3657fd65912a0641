"""Repairing a base: what must be built, the building, and the proof that the result works with the very same torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.errors import ImageUnfit
from launcher.image import names
from launcher.image.builder import Repair, build
from launcher.image.distribution import node_that_can_pull, pull
from launcher.image.faults import KEEP, Report, decide, find_faults
from launcher.image.image_locations import ImageLocations, having, same_image
from launcher.image.lock import Lock
from launcher.image.probe import full_report
from launcher.job.parts import Image
from launcher.model.facts import ImageInfo
from launcher.model.progress import Log, Step
from launcher.node.connect import LOCAL
from launcher.node.engine import Engine
from launcher.node.parallel import periodically

IMPORTING_EVERY = 5.0  # seconds
CHECKS = {
    "import_torch": "import torch",
    "import_torchvision": "import torchvision",
    "nms": "ops.nms",
    "nms_gpu": "ops.nms on the GPU",
    "vgg16": "VGG16 on 32x32",
}


def plan_repair(
    image: Image, locations: ImageLocations, *, mounted: bool = False, locked: Lock | None = None
) -> Repair:
    """Find the base, probe it, decide. Nothing is changed, except that a missing base is pulled.

    locked: the base and the decision of a lock file. Raises ImageUnfit.
    """
    assert image.base is not None, "an image given by ref is not built"
    builder, info = _find_base(image.base, locations, locked)
    if locked is None:
        return Repair(builder, info, _decide(image, image.base, builder, info, mounted, locations))
    base_digest = _digest(image.base, info)
    return Repair(builder, info, replace(locked, base_id=info.id, base_digest=base_digest, user=info.user))


def _decide(
    image: Image, base: str, builder: Engine, info: ImageInfo, mounted: bool, locations: ImageLocations
) -> Lock:
    keep = image.torchvision == KEEP
    report = Report(python="") if keep else tried(builder, info, base, locations.log, gpus=locations.gpus)
    decision = decide(image.torchvision, report, base, mounted)
    return Lock(
        base=base,
        torchvision_asked=image.torchvision,
        packages=tuple(image.packages),
        base_id=info.id,
        base_digest=_digest(base, info),
        user=info.user,
        torch=report.torch,
        torchvision=decision.version or report.torchvision,
        step=decision.step,
        why=decision.why,
        notes=decision.notes,
        image="",
        image_id="",
    )


def _digest(base: str, info: ImageInfo) -> str:
    """The base's digest in its registry; "" if it came from none."""
    wanted = names.parse(base)
    digests = (name.partition("@") for name in info.repo_digests)
    return next((digest for name, _, digest in digests if wanted and name == wanted.repository), "")


def carry_out(repair: Repair, tag: str, job: str, locations: ImageLocations) -> ImageInfo:
    """Build and verify on the builder. Raises ImageBuildFailed, ImageUnfit."""
    builder, log, base = repair.builder, locations.log, repair.lock.base
    log(f"image {tag}: building on {locations.describe(builder)} from {base}: {repair.lock.why}")
    built = build(repair, tag, job, local=builder.host == LOCAL, log=log)
    if repair.lock.torch:
        after = tried(builder, built, tag, log, gpus=locations.gpus)
        verdict = Verdict(tag, after, tried(builder, repair.info, base, log, gpus=locations.gpus))
        for what, before, now in verdict.rows():
            if before != now:
                log(f"image {tag}: {what}: {before} -> {now}")
        verdict.check()
    return built


def tried(engine: Engine, info: ImageInfo, name: str, log: Log, *, gpus: bool = True) -> Report:
    """As full_report(); says meanwhile that it goes on: the first import from a cold disk takes minutes."""

    def tell(seconds: float) -> None:
        log(Step(engine.node, f"still importing torch from image {name} ({seconds:.0f} s)"))

    with periodically(tell, IMPORTING_EVERY):
        return full_report(engine, info, name, gpus=gpus)


def _find_base(base: str, locations: ImageLocations, locked: Lock | None) -> tuple[Engine, ImageInfo]:
    """The builder, with the base: the first node that has it, else one that can pull it.

    The caller only if there is no such node: what it builds goes over its own line to all of them.
    """
    sources = having(locations.find(base if locked is None else locked.base_id))
    on_nodes = [(engine, info) for engine, info in sources if engine in locations.nodes]
    if on_nodes:
        builder, info = on_nodes[0]
    else:
        try:
            name = base if locked is None else _pinned(base, locked)
            builder = node_that_can_pull(name, locations)
        except ImageUnfit:
            if not sources:
                raise
            return sources[0]
        info = pull(name, [builder], locations).images[builder.node]
    for engine, theirs in sources:
        if engine is locations.local and not same_image(theirs, info):
            other = f"this machine has another one ({theirs.id[7:19]}, created {theirs.created[:19]})"
            locations.log(f"image {base}: {other}; the one of {builder.node} is used")
    return builder, info


def _pinned(base: str, locked: Lock) -> str:
    """What its registry calls it by digest. Raises ImageUnfit if it came from none."""
    wanted = names.parse(base)
    if wanted is None or not locked.base_digest:
        what = f"the one that the lock file names, {locked.base_id[:19]}, is no longer on any of these machines"
        raise ImageUnfit(f"image {base}", what, "remove the lock file to take the base as it is now")
    return wanted.at(locked.base_digest)


@dataclass(frozen=True)
class Verdict:
    """What an image does, beside what its base did if there is one."""

    image: str
    after: Report
    before: Report | None = None

    def rows(self) -> list[tuple[str, str, str]]:
        """(what, before, after), ready for a table; `before` is "" if there is nothing to compare with."""
        before = _values(self.before) if self.before is not None else {}
        return [(name, before.get(name, ""), value) for name, value in _values(self.after).items()]

    def faults(self) -> list[str]:
        """What is wrong with it; empty if everything works."""
        found = [fault.with_error for fault in find_faults(self.after)]
        if self.before is not None and self.before.torch != self.after.torch:
            found.append(f"torch was replaced: {self.before.torch} before, {self.after.torch or 'none'} now")
        return found

    def check(self) -> None:
        """Raises ImageUnfit if something is wrong."""
        found = self.faults()
        if found:
            raise ImageUnfit(f"image {self.image}", "; ".join(found), "launcher image verify shows what was tried")


def _values(report: Report) -> dict[str, str]:
    shown = {
        "python": report.python_version or "none",
        "torch": report.torch or "none",
        "CUDA of torch": report.cuda or "none",
        "torchvision": report.torchvision or "none",
    }
    for name, check in report.checks.items():
        if name in CHECKS:
            shown[CHECKS[name]] = ("absent" if check.absent else "ok") if check.ok else check.error.splitlines()[0]
    return shown
