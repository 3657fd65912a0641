"""Repair a base image: plan, build, and verify that the result works with an unchanged torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.errors import ImageUnfit
from launcher.image import names, packages
from launcher.image.builder import Repair, build
from launcher.image.distribution import node_that_can_pull, pull
from launcher.image.faults import KEEP, Report, decide, find_faults
from launcher.image.image_locations import ImageLocations, having, image_store, same_image
from launcher.image.lock import Lock
from launcher.image.probe import ANY_CONTAINER, full_report, image_facts
from launcher.job.parts import Image
from launcher.model.facts import ImageInfo
from launcher.model.progress import Log, StatusLine
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
    image: Image, locations: ImageLocations, *, mounted: bool = False, locked: Lock | None = None, roi: str = ""
) -> Repair:
    """Find the base, probe it and decide on the repair. Changes nothing, except that a missing base is pulled.

    locked: the base and the decision of a lock file. roi: the source of the trainer's decoder, if the job runs the
    trainer. Raises ImageUnfit.
    """
    assert image.base is not None, "an image set by `ref` is not built"
    builder, info = _find_base(image.base, locations, locked)
    if locked is None:
        decided = _decide(image, image.base, builder, info, mounted, locations)
        return Repair(builder, info, _with_decoder(decided, builder, info) if roi else decided, roi)
    base_digest = _digest(image.base, info)
    return Repair(builder, info, replace(locked, base_id=info.id, base_digest=base_digest, user=info.user), roi)


def _decide(
    image: Image, base: str, builder: Engine, info: ImageInfo, mounted: bool, locations: ImageLocations
) -> Lock:
    keep = image.torchvision == KEEP
    report = Report(python="") if keep else probe_image(builder, info, base, locations.log, gpus=locations.gpus)
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


def _with_decoder(lock: Lock, builder: Engine, info: ImageInfo) -> Lock:
    """Add the trainer's decoder, unless the base has one or what compiles it."""
    if image_facts(builder, lock.base, info, ANY_CONTAINER).decoder:
        return lock
    return replace(lock, decoder=True, why=f"{lock.why}; the trainer's decoder is added")


def _digest(base: str, info: ImageInfo) -> str:
    """Return the digest of the base in its registry, "" if it came from none."""
    wanted = names.parse(base)
    digests = (name.partition("@") for name in info.repo_digests)
    return next((digest for name, _, digest in digests if wanted and name == wanted.repository), "")


def carry_out(repair: Repair, tag: str, job: str, locations: ImageLocations) -> ImageInfo:
    """Build and verify on the builder. Raises ImageBuildFailed, ImageUnfit."""
    builder, log, base = repair.builder, locations.log, repair.lock.base
    log(f"image {tag}: building on {locations.describe(builder)} from {base}: {repair.lock.why}")
    built = build(repair, tag, job, local=builder.host == LOCAL, log=log)
    try:
        _verify(repair, built, tag, locations)
    except ImageUnfit:
        image_store(builder).remove(tag)  # the next run would find and use it
        raise
    return built


def _verify(repair: Repair, built: ImageInfo, tag: str, locations: ImageLocations) -> None:
    builder, log, gpus, lock = repair.builder, locations.log, locations.gpus, repair.lock
    if lock.torch:
        after = probe_image(builder, built, tag, log, gpus=gpus)
        verdict = ImageVerdict(tag, after, probe_image(builder, repair.info, lock.base, log, gpus=gpus))
        for what, before, now in verdict.rows():
            if before != now:
                log(f"image {tag}: {what}: {before} -> {now}")
        verdict.check()
    if lock.packages:
        packages.check(repair, built, tag, log, gpus=gpus)


def probe_image(engine: Engine, info: ImageInfo, name: str, log: Log, *, gpus: bool = True) -> Report:
    """Return full_report(), logging progress: the first import from a cold disk takes minutes."""

    def show(seconds: float) -> None:
        log(StatusLine(engine.node, f"still importing torch from image {name} ({seconds:.0f} s)"))

    with periodically(show, IMPORTING_EVERY):
        return full_report(engine, info, name, gpus=gpus)


def _find_base(base: str, locations: ImageLocations, locked: Lock | None) -> tuple[Engine, ImageInfo]:
    """Return the builder and the base: the first node that has it, else a node that can pull it.

    The caller's engine is the last choice, because its result must be sent to all nodes over the caller's link.
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
            other = f"this machine has a different image ({theirs.id[7:19]}, created {theirs.created[:19]})"
            locations.log(f"image {base}: {other}; using that of {builder.node}")
    return builder, info


def _pinned(base: str, locked: Lock) -> str:
    """Return the base's reference pinned by digest. Raises ImageUnfit if it came from no registry."""
    wanted = names.parse(base)
    if wanted is None or not locked.base_digest:
        what = f"the locked image, {locked.base_id[:19]}, is no longer on any of these machines"
        raise ImageUnfit(f"image {base}", what, "remove the lock file to use the current image of that name")
    return wanted.at(locked.base_digest)


@dataclass(frozen=True)
class ImageVerdict:
    """Report of an image, and that of its base if it was built."""

    image: str
    after: Report
    before: Report | None = None

    def rows(self) -> list[tuple[str, str, str]]:
        """Return table rows (name, before, after); `before` is "" if there is no base."""
        before = _values(self.before) if self.before is not None else {}
        return [(name, before.get(name, ""), value) for name, value in _values(self.after).items()]

    def faults(self) -> list[str]:
        """Return the faults of the image; empty if everything works."""
        found = [fault.with_error for fault in find_faults(self.after)]
        if self.before is not None and self.before.torch != self.after.torch:
            found.append(f"torch was replaced: {self.before.torch} before, {self.after.torch or 'none'} now")
        return found

    def check(self) -> None:
        """Raise ImageUnfit if the image has faults."""
        found = self.faults()
        if found:
            raise ImageUnfit(f"image {self.image}", "; ".join(found), "to list the checks, run: launcher image verify")


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
