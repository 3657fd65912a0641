"""From what a job says about its image to one image that is proven the same on every node."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import ImageUnfit
from launcher.image import pip_settings, recipe, reference
from launcher.image.build import build
from launcher.image.decide import Decision, decide
from launcher.image.fleet import Fleet, Found, ImageOnNodes, Say, bring, look, pull_everywhere, spread
from launcher.image.login import login_for
from launcher.image.probe import full_report
from launcher.image.report import Report
from launcher.image.ship import Tell, silent, store
from launcher.image.verify import verify
from launcher.job.models import Image
from launcher.node.engine import Engine, ImageInfo


@dataclass(frozen=True)
class Prepared:
    """What is to be built and where, or that the base is used as it is (`recipe.changes_nothing`)."""

    base: str
    builder: Engine
    info: ImageInfo  # of the base on the builder
    report: Report  # of the base; empty words where the job says keep
    decision: Decision
    recipe: recipe.Recipe


def ensure(
    image: Image,
    nodes: Sequence[Engine],
    local: Engine | None,
    say: Say,
    *,
    job: str,
    mounted: bool = False,
    tell: Tell = silent,
) -> ImageOnNodes:
    """The job's image on every node, the same everywhere; built where it must be.

    Nothing to do costs a round trip for `ref`, two for `base`.

    local: the caller's own Docker, None where he has none (then the first node that has the base builds).
    mounted: the job mounts folders into its containers, from which torch may come.
    Raises ImageUnfit, ImageBuildFailed, ImageShipFailed, NodesFailed.
    """
    fleet = Fleet(nodes, local)
    if image.ref is not None:
        return bring(image.ref, fleet, say, tell)
    prepared = prepare(image, fleet, say, mounted=mounted)
    assert image.base is not None
    if prepared.recipe.changes_nothing:
        found = look(image.base, fleet)
        done = spread(image.base, found, prepared.builder, prepared.info, fleet, say, tell)
        return dataclasses.replace(done, notes=(prepared.decision.why, *prepared.decision.notes, *done.notes))
    tag = prepared.recipe.tag(job)
    found = look(tag, fleet)
    holders = fleet.holders(found)
    built = False
    if not holders:
        holders = [(prepared.builder, make(prepared, tag, job, fleet, say))]
        found = look(tag, fleet)
        built = True
    done = spread(tag, found, *holders[0], fleet, say, tell)
    return dataclasses.replace(done, built=built, notes=(prepared.decision.why, *prepared.decision.notes, *done.notes))


def prepare(image: Image, fleet: Fleet, say: Say, *, mounted: bool = False) -> Prepared:
    """Find the base, look into it, decide. Nothing is changed but that a missing base is pulled."""
    assert image.base is not None, "an image given by ref is not built"
    builder, info = _find_base(image.base, look(image.base, fleet), fleet, say)
    report = Report.empty() if image.torchvision == "keep" else full_report(builder, info, image.base)
    decision = decide(image.torchvision, report, image.base, mounted)
    made = recipe.Recipe(
        base_id=info.id,
        step=decision.step,
        packages=tuple(image.packages),
        user=info.user,
        index=pip_settings.index(),
        authority=pip_settings.authority(),
    )
    return Prepared(image.base, builder, info, report, decision, made)


def make(prepared: Prepared, tag: str, job: str, fleet: Fleet, say: Say) -> ImageInfo:
    """Build and verify on the builder. Raises ImageBuildFailed, ImageUnfit."""
    say(f"image {tag}: building on {fleet.called(prepared.builder)} from {prepared.base}: {prepared.decision.why}")
    wanted = reference.parse(prepared.base)
    repository = wanted.repository if wanted else ""
    digests = [d.partition("@")[2] for d in prepared.info.repo_digests if d.partition("@")[0] == repository]
    labels = recipe.labels(
        prepared.recipe,
        job,
        prepared.base,
        digests[0] if digests else "",
        prepared.report.torch,
        prepared.report.torchvision,
        prepared.decision,
    )
    here = prepared.builder is fleet.local
    built = build(prepared.recipe, tag, labels, prepared.builder, prepared.info, on_this_machine=here, say=say)
    if prepared.report.full and prepared.report.torch_folder:
        verify(prepared.builder, built, tag, prepared.report).check()
    return built


def _find_base(base: str, found: Found, fleet: Fleet, say: Say) -> tuple[Engine, ImageInfo]:
    """Who builds: whoever has the base, the caller first; else the caller, else the first node, pulls it."""
    holders = fleet.holders(found)
    if holders:
        return holders[0]
    if fleet.local is None or not reference.in_registry(base):
        first = Fleet(fleet.nodes[:1])
        pull_everywhere(base, first if reference.in_registry(base) else fleet, say)
        builder = fleet.nodes[0]
    else:
        builder = fleet.local
        say(f"image {base}: pulling it to this machine")
        store(builder).pull(base, login_for(base))
    info = store(builder).inspect(base)
    if info is None:
        raise ImageUnfit(f"image {base}", f"was pulled on {fleet.called(builder)} but is not there now", "try again")
    return builder, info
