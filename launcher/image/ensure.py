"""From what a job says about its image to one image that is proven the same on every node."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from launcher.image import lock
from launcher.image.lock import Lock
from launcher.image.places import ImageOnNodes, Places, Say, look
from launcher.image.progress import Tell, silent
from launcher.image.spread import bring, spread
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
    places = Places(nodes, local)
    if image.ref is not None:
        return bring(image.ref, places, say, tell)
    locked = lock.read(lock_file) if lock_file is not None else None
    if locked is not None and not locked.fits(image):
        say(f"{lock_file} was made for another image section: it is written anew")
        locked = None
    done = _as_locked(locked, places, say, tell) if locked is not None else None
    if done is not None:
        return done
    return _made(image, places, say, job, mounted, tell, lock_file, locked)


def _made(
    image: Image,
    places: Places,
    say: Say,
    job: str,
    mounted: bool,
    tell: Tell,
    lock_file: Path | None,
    locked: Lock | None,
) -> ImageOnNodes:
    """Look into the base, build what must be built, bring it to the nodes, write down what it was."""
    from launcher.image.prepare import make, prepare  # a third of the package, and most starts have their image

    prepared = prepare(image, places, say, mounted=mounted, locked=locked)
    builder, info, built = prepared.builder, prepared.info, False
    name = prepared.base if prepared.recipe.changes_nothing else prepared.recipe.tag(job)
    found = look(name, places)
    if not prepared.recipe.changes_nothing:
        holders = places.holders(found)
        built = not holders
        if not built:
            say(f"image {name}: made from {prepared.base}: {prepared.decision.why}")
        builder, info = holders[0] if holders else (builder, make(prepared, name, job, places, say))
        found = look(name, places) if built else found
    _say_notes(name, prepared.decision.notes, say)
    done = spread(name, found, builder, info, places, say, tell)
    if lock_file is not None:
        lock.write(lock_file, prepared.lock(name, info.id))
    return dataclasses.replace(done, built=built, why=prepared.decision.why)


def _as_locked(locked: Lock, places: Places, say: Say, tell: Tell) -> ImageOnNodes | None:
    """The very image that was locked, where anybody still has it; whatever its name means by now."""
    found = look(locked.image_id, places)
    holders = places.holders(found)
    if not holders:
        return None
    if locked.image != locked.base:
        say(f"image {locked.image}: as locked, made from {locked.base}: {locked.why}")
    _say_notes(locked.image, locked.notes, say)
    done = spread(locked.image, found, *holders[0], places, say, tell)
    return dataclasses.replace(done, why=f"as locked: {locked.why}")


def _say_notes(name: str, notes: Sequence[str], say: Say) -> None:
    for note in notes:
        say(f"image {name}: note: {note}")
