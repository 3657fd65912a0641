"""Provide the image of a job's image section, verified to be the same on every node."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from launcher.image import lock
from launcher.image.distribution import node_that_can_pull, provide, provide_from
from launcher.image.image_locations import ImageLocations, ImageOnNodes, having
from launcher.image.lock import Lock
from launcher.image.repair import carry_out, plan_repair
from launcher.job.parts import Image
from launcher.model.progress import Log


def ensure(
    image: Image,
    locations: ImageLocations,
    *,
    job: str,
    mounted: bool = False,
    roi: str = "",
    lock_file: Path | None = None,
) -> ImageOnNodes:
    """Make the job's image available on every node and return it; build it if necessary.

    If all nodes have it, this takes one round trip for `ref` or with a lock file, otherwise two.

    job: its name.
    mounted: the job mounts folders into its containers, which may contain torch.
    roi: the source of the trainer's decoder, if the job runs the trainer.
    lock_file: pins the base and its repair (lock.lock_path); used if it matches the job, otherwise rewritten.
    Raises ImageUnfit, ImageBuildFailed, ImageShipFailed, NodesFailed; JobInvalid for an invalid lock file.
    """
    if image.ref is not None:
        return provide(image.ref, locations)
    locked = lock.read(lock_file) if lock_file is not None else None
    if locked is not None and not locked.fits(image):
        locations.log(f"{lock_file} does not match the job's image section: rewriting it")
        locked = None
    done = _as_locked(locked, locations) if locked is not None else None
    if done is not None:
        return done

    repair = plan_repair(image, locations, mounted=mounted, locked=locked, roi=roi)
    source, info, built, why = repair.builder, repair.info, False, repair.lock.why
    name = repair.lock.base if repair.changes_nothing else repair.tag(job)
    found = locations.find(name)
    if not repair.changes_nothing:
        sources = having(found)
        if sources:
            locations.log(f"image {name}: built from {repair.lock.base}: {why}")
            source, info = sources[0]
        else:
            info, built = carry_out(repair, name, job, locations), True
            found = locations.find(name)
    _log_notes(name, repair.lock.notes, locations.log)
    done = provide_from(source, info, name, found, locations)
    if lock_file is not None:
        lock.write(lock_file, dataclasses.replace(repair.lock, image=name, image_id=info.id))
    return dataclasses.replace(done, built=built, why=why)


def whereabouts(image: Image, locations: ImageLocations, lock_file: Path | None = None) -> str:
    """Return where `ensure` would find the job's image or its base; pulls nothing.

    Raises ImageUnfit if no engine has it and no node can pull it; NodesFailed; JobInvalid for an invalid lock file.
    """
    name = image.ref or image.base or ""
    locked = lock.read(lock_file) if lock_file is not None and image.ref is None else None
    pinned = (locked.image_id, locked.base_id) if locked is not None and locked.fits(image) else ()
    for known in (*pinned, name):
        engines = [engine for engine, _ in having(locations.find(known))]
        if engines:
            return f"{name} is on {locations.describe(*engines)}"
    return f"{name} is on no node yet, and {node_that_can_pull(name, locations).node} can pull it"


def _as_locked(locked: Lock, locations: ImageLocations) -> ImageOnNodes | None:
    """Provide exactly the locked image, even if its tag has moved; return None if no engine has it."""
    found = locations.find(locked.image_id)
    sources = having(found)
    if not sources:
        return None
    if locked.image != locked.base:
        locations.log(f"image {locked.image}: as locked, built from {locked.base}: {locked.why}")
    _log_notes(locked.image, locked.notes, locations.log)
    done = provide_from(*sources[0], locked.image, found, locations)
    return dataclasses.replace(done, why=f"as locked: {locked.why}")


def _log_notes(name: str, notes: Sequence[str], log: Log) -> None:
    for note in notes:
        log(f"image {name}: note: {note}")
