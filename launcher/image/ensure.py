"""From what a job says about its image to one image that is proven the same on every node."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from launcher.image import lock, parallel
from launcher.image.fleet import Fleet, ImageOnNodes, Say, bring, look, spread
from launcher.image.lock import Lock
from launcher.image.prepare import make, prepare
from launcher.image.ship import Tell, silent, store
from launcher.job.models import Image
from launcher.node.engine import Engine


def ensure(
    image: Image,
    nodes: Sequence[Engine],
    local: Engine | None,
    say: Say,
    *,
    job: str,
    mounted: bool = False,
    tell: Tell = silent,
    lock_file: Path | None = None,
) -> ImageOnNodes:
    """The job's image on every node, the same everywhere; built where it must be.

    Nothing to do costs one round trip for `ref` and with a lock file, else two.

    local: the caller's own Docker, None where he has none (then the first node that has the base builds).
    mounted: the job mounts folders into its containers, from which torch may come.
    lock_file: pins the base and what was done to it (lock.path_beside); read where it fits the job, else written anew.
    Raises ImageUnfit, ImageBuildFailed, ImageShipFailed, NodesFailed; JobInvalid for a broken lock file.
    """
    fleet = Fleet(nodes, local)
    if image.ref is not None:
        return bring(image.ref, fleet, say, tell)
    locked = lock.read(lock_file) if lock_file is not None else None
    if locked is not None and not locked.fits(image):
        say(f"{lock_file} was made for another image section: it is written anew")
        locked = None
    done = _as_locked(locked, fleet, say, tell) if locked is not None else None
    if done is not None:
        return done
    return _made(image, fleet, say, job, mounted, tell, lock_file, locked)


def _made(
    image: Image,
    fleet: Fleet,
    say: Say,
    job: str,
    mounted: bool,
    tell: Tell,
    lock_file: Path | None,
    locked: Lock | None,
) -> ImageOnNodes:
    """Look into the base, build what must be built, bring it to the nodes, write down what it was."""
    prepared = prepare(image, fleet, say, mounted=mounted, locked=locked)
    builder, info, built = prepared.builder, prepared.info, False
    name = prepared.base if prepared.recipe.changes_nothing else prepared.recipe.tag(job)
    found = look(name, fleet)
    if not prepared.recipe.changes_nothing:
        holders = fleet.holders(found)
        built = not holders
        builder, info = holders[0] if holders else (builder, make(prepared, name, job, fleet, say))
        found = look(name, fleet) if built else found
    done = spread(name, found, builder, info, fleet, say, tell)
    if lock_file is not None:
        lock.write(lock_file, prepared.lock(name, info.id))
    notes = (prepared.decision.why, *prepared.decision.notes, *done.notes)
    return dataclasses.replace(done, built=built, notes=notes)


def _as_locked(locked: Lock, fleet: Fleet, say: Say, tell: Tell) -> ImageOnNodes | None:
    """The very image that was locked, where anybody still has it; whatever its name means by now."""
    found = look(locked.image_id, fleet)
    holders = fleet.holders(found)
    if not holders:
        return None
    done = spread(locked.image, found, *holders[0], fleet, say, tell)
    unnamed = [
        engine
        for engine, theirs in zip(fleet.nodes, found.nodes, strict=True)
        if theirs is not None and not _named(locked.image, theirs.tags)
    ]
    parallel.each(lambda engine: store(engine).tag(locked.image_id, locked.image), unnamed)
    return dataclasses.replace(done, notes=(f"as locked: {locked.why}", *done.notes))


def _named(name: str, tags: Sequence[str]) -> bool:
    """Whether a store's tags have this name; a digest is no tag."""
    return "@" in name or name in tags or f"{name}:latest" in tags
