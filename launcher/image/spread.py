"""One image on all nodes: who gets it from whom, and the proof that all have the same."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.errors import ImageUnfit, LauncherError, NodesFailed
from launcher.image import cache, parallel, reference
from launcher.image.labels import OCI_BASE_DIGEST, OCI_BASE_NAME
from launcher.image.login import login_for
from launcher.image.places import Found, ImageOnNodes, Places, Say, look
from launcher.image.progress import Tell, silent
from launcher.image.stores import locate, same, store
from launcher.node.engine import Engine, ImageInfo

UNREACHABLE_MAX_AGE = 3600.0  # seconds


def bring(name: str, places: Places, say: Say, tell: Tell = silent) -> ImageOnNodes:
    """The image of this name on every node. Where it is on all of them already this costs one round trip.

    The caller's engine comes first as a source, then the nodes in their order; where nobody has it the nodes pull it.
    Raises ImageUnfit, ImageShipFailed, NodesFailed.
    """
    found = look(name, places)
    holders = places.holders(found)
    if not holders:
        return pull(name, places.nodes, places, say)
    return spread(name, found, *holders[0], places, say, tell)


def spread(
    name: str, found: Found, source: Engine, info: ImageInfo, places: Places, say: Say, tell: Tell = silent
) -> ImageOnNodes:
    """Image `info` of `source` to every node where `name` is missing or another one, and the proof of it."""
    theirs, sent = found.nodes, dict[str, int]()
    if any(not same(there, info) for there in theirs):
        _tell_of_others(name, info, source, found, places, say)
        theirs = _located(theirs, info, places)
        targets = [engine for engine, there in zip(places.nodes, theirs, strict=True) if there is None]
        if targets:
            _same_architecture(name, info, found, places)
            pulled = pull_what_can_be(name, info, targets, say)
            targets = [engine for engine in targets if engine not in pulled]
        if targets:
            from launcher.image.relay import distribute  # most starts have nothing to send

            say(f"image {name}: from {places.called(source)} to {', '.join(engine.node for engine in targets)}")
            have = [engine for engine, there in zip(places.nodes, theirs, strict=True) if there and there.id == info.id]
            sent.update(distribute(source, info, name, targets, have, say, tell))
        theirs = prove(name, info, places)
    there = [image for image in theirs if image is not None]
    named = list(zip(places.nodes, there, strict=True))
    unnamed = [(engine, image.id) for engine, image in named if not _goes_by(name, image)]
    parallel.each(lambda one: store(one[0]).tag(one[1], name), unnamed)
    return ImageOnNodes(name, there[0].id, {engine.node: image.id for engine, image in named}, shipped=sent)


def _tell_of_others(name: str, info: ImageInfo, source: Engine, found: Found, places: Places, say: Say) -> None:
    others = [e.node for e, theirs in zip(places.nodes, found.nodes, strict=True) if theirs and not same(theirs, info)]
    if others:
        made = f"{info.id[7:19]}, made {info.created[:19]}"
        say(f"{', '.join(others)} had another {name}: the one of {places.called(source)} ({made}) replaces it")


def _located(theirs: Sequence[ImageInfo | None], info: ImageInfo, places: Places) -> tuple[ImageInfo | None, ...]:
    """What each node has of this very image, also under another name or id."""
    pairs = list(zip(places.nodes, theirs, strict=True))
    return tuple(parallel.each(lambda pair: pair[1] if same(pair[1], info) else locate(pair[0], info), pairs))


def _goes_by(name: str, image: ImageInfo) -> bool:
    """Whether a store has the image under this name; a digest or an id is none that it could be given."""
    return "@" in name or reference.parse(name) is None or name in image.tags or f"{name}:latest" in image.tags


def pull_what_can_be(name: str, info: ImageInfo, engines: Sequence[Engine], say: Say) -> list[Engine]:
    """Let nodes pull what a registry has: the image itself by digest, or the base that it was built from.

    The engines that have the whole image now. One that cannot is served from here, so its refusal is only told; one
    that could not reach the registry is not asked again for UNREACHABLE_MAX_AGE.
    """
    whole = next(iter(info.repo_digests), "")
    base = reference.parse(info.labels.get(OCI_BASE_NAME, ""))
    digest = info.labels.get(OCI_BASE_DIGEST, "")
    pinned = whole or (base.at(digest) if base is not None and digest else "")
    wanted = reference.parse(pinned)
    if wanted is None:
        return []
    login = login_for(pinned)

    def fetch(engine: Engine) -> bool:
        images, place = store(engine), cache.key(engine.host, wanted.registry)
        if images.inspect(pinned) is None:
            if cache.get("unreachable", place, UNREACHABLE_MAX_AGE) is not None:
                return False
            try:
                images.digest(pinned, login)
                say(f"image {name}: {engine.node} pulls {pinned}")
                images.pull(pinned, login)
            except LauncherError as error:
                cache.put("unreachable", place, {"words": error.what})
                say(f"image {name}: {engine.node} does not get {pinned} by itself ({error.what})")
                return False
        theirs = images.inspect(pinned)
        if theirs is None or not same(theirs, info):
            return False
        if "@" not in name:
            images.tag(theirs.id, name)
        return True

    return [engine for engine, has in zip(engines, parallel.each(fetch, engines), strict=True) if has]


def prove(name: str, info: ImageInfo, places: Places) -> tuple[ImageInfo | None, ...]:
    """The image as every node has it. Raises ImageUnfit where one has not this very image."""
    theirs = _located(look(name, places).nodes, info, places)
    strange = [engine.node for engine, there in zip(places.nodes, theirs, strict=True) if there is None]
    if strange:
        raise ImageUnfit(
            ", ".join(strange),
            f"does not have image {info.id[:19]} after it was shipped",
            "somebody else may be removing images on the node; try again",
        )
    return theirs


def pull(name: str, engines: Sequence[Engine], places: Places, say: Say) -> ImageOnNodes:
    """Nobody of the places has it: these pull the same digest from its registry, with the caller's login for this once.

    Raises ImageUnfit with the registry's words, NodesFailed.
    """
    nowhere = f"is neither on {places.names}" + (" nor on this machine" if places.local else "")
    wanted = reference.parse(name)
    if wanted is None or not reference.in_registry(name):
        raise ImageUnfit(
            f"image {name}",
            f"{nowhere}, and no registry has such a name",
            "check its spelling in the job file; `docker images` on a node lists what it has",
        )
    login = login_for(name)
    try:
        digest = wanted.digest or store(engines[0]).digest(name, login)
    except LauncherError as error:
        raise ImageUnfit(
            f"image {name}",
            f"{nowhere}, and {places.called(engines[0])} does not get it from its registry: {error.what}",
            "check its spelling, the way to the registry, and `docker login` on this machine",
        ) from error
    pinned = wanted.at(digest)
    who = ", ".join(places.called(engine) for engine in engines)
    say(f"image {name}: {who} pull{'s' * (len(engines) == 1)} {pinned}")

    def fetch(engine: Engine) -> ImageInfo:
        images = store(engine)
        images.pull(pinned, login)
        info = images.inspect(pinned)
        if info is None:
            raise ImageUnfit(engine.node, f"pulled {pinned} but does not have it now", "look at its engine's log")
        if not wanted.digest:
            images.tag(info.id, name)
        return info

    infos = parallel.each(fetch, engines)
    if any(not same(info, infos[0]) for info in infos):
        errors = [
            ImageUnfit(engine.node, f"{pinned} is {info.id[:19]} ({info.arch}) there", "use nodes of one architecture")
            for engine, info in zip(engines, infos, strict=True)
        ]
        raise NodesFailed(errors, of=len(errors))
    ids = {engine.node: info.id for engine, info in zip(engines, infos, strict=True)}
    return ImageOnNodes(name, infos[0].id, ids, why=f"pulled {pinned}")


def _same_architecture(name: str, info: ImageInfo, found: Found, places: Places) -> None:
    """An image for one architecture is not sent over one for another: what is there tells what the node needs."""
    for engine, theirs in zip(places.nodes, found.nodes, strict=True):
        if theirs is not None and theirs.arch != info.arch:
            raise ImageUnfit(
                f"{engine.node}: image {name}",
                f"is for {theirs.arch} there and for {info.arch} at its source",
                "nodes of one job must be of one architecture",
            )
