"""What is to be built, from which base, where, and why; and the building of it."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.errors import ImageUnfit
from launcher.image import pip_settings, recipe, reference
from launcher.image.build import build
from launcher.image.decide import Decision, Method, decide
from launcher.image.lock import Lock
from launcher.image.places import Places, Say, look
from launcher.image.probe import full_report
from launcher.image.spread import pull
from launcher.image.stores import store
from launcher.image.verify import verify
from launcher.job.models import Image
from launcher.node.engine import Engine, ImageInfo


@dataclass(frozen=True)
class Prepared:
    """What is to be built and where, or that the base is used as it is (`recipe.changes_nothing`)."""

    asked: Image
    base: str
    builder: Engine
    info: ImageInfo  # of the base on the builder
    torch: str  # of the base; "" where nobody looked
    torchvision: str
    decision: Decision
    recipe: recipe.Recipe

    @property
    def base_digest(self) -> str:
        """What the base's registry calls it; "" for one that came from none."""
        wanted = reference.parse(self.base)
        repository = wanted.repository if wanted else ""
        digests = (name.partition("@") for name in self.info.repo_digests)
        return next((digest for name, _, digest in digests if name == repository), "")

    def lock(self, image: str, image_id: str) -> Lock:
        """What to write beside the job when it is done."""
        return Lock(
            base=self.base,
            torchvision_asked=self.asked.torchvision,
            packages=tuple(self.asked.packages),
            base_id=self.info.id,
            base_digest=self.base_digest,
            user=self.info.user,
            torch=self.torch,
            torchvision=self.decision.version or self.torchvision,
            step=self.decision.step,
            why=self.decision.why,
            notes=self.decision.notes,
            image=image,
            image_id=image_id,
        )


def prepare(image: Image, places: Places, say: Say, *, mounted: bool = False, locked: Lock | None = None) -> Prepared:
    """Find the base, look into it, decide. Nothing is changed but that a missing base is pulled.

    locked: the base and the decision are those. Raises ImageUnfit.
    """
    assert image.base is not None, "an image given by ref is not built"
    builder, info = _find_base(image.base, places, say, locked)
    if locked is not None:
        torch, torchvision = locked.torch, locked.torchvision
        decision = Decision.of_step(locked.step, locked.why, locked.notes)
    elif image.torchvision == "keep":
        torch = torchvision = ""
        decision = Decision(Method.KEEP, "the job says keep: nothing was checked")
    else:
        report = full_report(builder, info, image.base)
        torch, torchvision = report.torch, report.torchvision
        decision = decide(image.torchvision, report, image.base, mounted)
    made = recipe.Recipe(
        base_id=info.id,
        step=decision.step,
        packages=tuple(image.packages),
        user=info.user,
        index=pip_settings.index(),
        authority=pip_settings.authority(),
    )
    return Prepared(image, image.base, builder, info, torch, torchvision, decision, made)


def make(prepared: Prepared, tag: str, job: str, places: Places, say: Say) -> ImageInfo:
    """Build and verify on the builder. Raises ImageBuildFailed, ImageUnfit."""
    say(f"image {tag}: building on {places.called(prepared.builder)} from {prepared.base}: {prepared.decision.why}")
    labels = recipe.labels_of(
        prepared.recipe,
        job,
        prepared.base,
        prepared.base_digest,
        prepared.torch,
        prepared.torchvision,
        prepared.decision,
    )
    here = prepared.builder is places.local
    built = build(prepared.recipe, tag, labels, prepared.builder, prepared.info, on_this_machine=here, say=say)
    if prepared.torch:
        before = full_report(prepared.builder, prepared.info, prepared.base)
        verdict = verify(prepared.builder, built, tag, before)
        for what, was, now in verdict.rows():
            if was != now:
                say(f"image {tag}: {what}: {was} -> {now}")
        verdict.check()
    return built


def _find_base(base: str, places: Places, say: Say, locked: Lock | None) -> tuple[Engine, ImageInfo]:
    """Who builds: whoever has the base, the caller first; else the caller, else the first node, pulls it."""
    holders = places.holders(look(base if locked is None else locked.base_id, places))
    if holders:
        return holders[0]
    builder = places.local or places.nodes[0]
    wanted = reference.parse(base)
    if locked is not None and (wanted is None or not locked.base_digest):
        raise ImageUnfit(
            f"image {base}",
            f"the one that the lock file names, {locked.base_id[:19]}, is on none of these machines any more",
            "remove the lock file to take the base as it is now",
        )
    name = wanted.at(locked.base_digest) if locked is not None and wanted is not None else base
    pull(name, [builder], places, say)
    info = store(builder).inspect(name)
    if info is None:
        raise ImageUnfit(f"image {base}", f"was pulled on {places.called(builder)} but is not there now", "try again")
    return builder, info
