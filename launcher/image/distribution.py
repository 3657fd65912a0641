"""One image on all nodes: pulled from its registry or pushed from where it is, and the proof that all have the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from launcher.errors import ImageUnfit, LauncherError, NodesFailed
from launcher.image import names
from launcher.image.image_locations import FoundImages, ImageLocations, ImageOnNodes, find_same, image_store, same_image
from launcher.model.facts import ImageInfo
from launcher.node import cache
from launcher.node.engine import Engine
from launcher.node.parallel import run_all

UNREACHABLE_MAX_AGE = 3600.0  # seconds


def provide(name: str, locations: ImageLocations) -> ImageOnNodes:
    """The image of this name on every node. If all of them have it already this costs one round trip.

    The caller's engine is the first source, then the nodes in their order; if none has it the nodes pull it.
    Raises ImageUnfit, ImageShipFailed, NodesFailed.
    """
    found = locations.find(name)
    sources = locations.sources(found)
    return provide_from(*sources[0], name, found, locations) if sources else pull(name, locations.nodes, locations)


def provide_from(
    source: Engine, info: ImageInfo, name: str, found: FoundImages, locations: ImageLocations
) -> ImageOnNodes:
    """Image `info` of `source` on every node where `name` is missing or another image, and the proof of it."""
    nodes, theirs, sent = locations.nodes, found.nodes, dict[str, int]()
    if any(not same_image(other, info) for other in theirs):
        _log_replaced(name, info, source, found, locations)
        theirs = _find_same_on_all(theirs, info, nodes)
        targets = [engine for engine, image in zip(nodes, theirs, strict=True) if image is None]
        if targets:
            _check_architecture(name, info, found, nodes)
            pulled = _try_pulling(name, info, targets, locations)
            targets = [engine for engine in targets if engine not in pulled]
        if targets:
            from launcher.image.peers import push_or_relay  # most starts have nothing to send

            locations.log(f"image {name}: from {locations.describe(source)} to {locations.describe(*targets)}")
            have = [engine for engine, image in zip(nodes, theirs, strict=True) if image and image.id == info.id]
            sent.update(push_or_relay(source, info, name, targets, have, locations))
        theirs = _find_same_on_all(locations.find(name).nodes, info, nodes)
    proven = [(engine, image) for engine, image in zip(nodes, theirs, strict=True) if image is not None]
    if len(proven) < len(nodes):
        missing = ", ".join(engine.node for engine, image in zip(nodes, theirs, strict=True) if image is None)
        cure = "another program may be removing images on the node; try again"
        raise ImageUnfit(missing, f"does not have image {info.id[:19]} after it was sent", cure)
    unnamed = [(engine, image) for engine, image in proven if not _is_named(name, image)]
    run_all([partial(image_store(engine).tag, image.id, name) for engine, image in unnamed])
    return ImageOnNodes(name, proven[0][1].id, {engine.node: image.id for engine, image in proven}, shipped=sent)


def _find_same_on_all(
    theirs: Sequence[ImageInfo | None], info: ImageInfo, nodes: Sequence[Engine]
) -> tuple[ImageInfo | None, ...]:
    """What each node has of this very image, also under another name or id."""

    def find(engine: Engine, image: ImageInfo | None) -> ImageInfo | None:
        return image if same_image(image, info) else find_same(engine, info)

    return tuple(run_all([partial(find, engine, image) for engine, image in zip(nodes, theirs, strict=True)]))


def _is_named(name: str, image: ImageInfo) -> bool:
    """Whether a store has the image under this name; a digest or an id cannot be given as a name."""
    return "@" in name or names.parse(name) is None or name in image.tags or f"{name}:latest" in image.tags


def _log_replaced(name: str, info: ImageInfo, source: Engine, found: FoundImages, locations: ImageLocations) -> None:
    pairs = zip(locations.nodes, found.nodes, strict=True)
    others = [engine.node for engine, image in pairs if image and not same_image(image, info)]
    if others:
        ours = f"the one of {locations.describe(source)} ({info.id[7:19]}, created {info.created[:19]})"
        locations.log(f"{', '.join(others)} had another {name}: {ours} replaces it")


def _check_architecture(name: str, info: ImageInfo, found: FoundImages, nodes: Sequence[Engine]) -> None:
    """An image is not sent over one for another architecture, which shows what the node needs."""
    for engine, theirs in zip(nodes, found.nodes, strict=True):
        if theirs is not None and theirs.arch != info.arch:
            what = f"is for {theirs.arch} there and for {info.arch} at its source"
            raise ImageUnfit(f"{engine.node}: image {name}", what, "nodes of one job must be of one architecture")


def pull(name: str, engines: Sequence[Engine], locations: ImageLocations) -> ImageOnNodes:
    """An image that no engine has: these pull the same digest from its registry, with the caller's login.

    Raises ImageUnfit with the registry's words, NodesFailed.
    """
    everywhere = ", ".join(engine.node for engine in locations.nodes)
    nowhere = f"is neither on {everywhere}" + (" nor on this machine" if locations.local else "")
    wanted = names.parse(name)
    if wanted is None or not names.in_registry(name):
        cure = "check its spelling in the job file; `docker images` on a node lists what it has"
        raise ImageUnfit(f"image {name}", f"{nowhere}, and no registry has such a name", cure)
    login = registry_login(name)
    try:
        digest = wanted.digest or image_store(engines[0]).digest(name, login)
    except LauncherError as error:
        what = f"{nowhere}, and {locations.describe(engines[0])} cannot get it from its registry: {error.what}"
        cure = "check its spelling, the network to the registry, and `docker login` on this machine"
        raise ImageUnfit(f"image {name}", what, cure) from error
    pinned = wanted.at(digest)
    locations.log(f"image {name}: pulling {pinned} on {locations.describe(*engines)}")

    def pull_on(engine: Engine) -> ImageInfo:
        store = image_store(engine)
        store.pull(pinned, login)
        info = store.inspect(pinned)
        if info is None:
            raise ImageUnfit(engine.node, f"pulled {pinned} but does not have it now", "look at its engine's log")
        if not wanted.digest:
            store.tag(info.id, name)
        return info

    infos = dict(zip([engine.node for engine in engines], run_all([partial(pull_on, e) for e in engines]), strict=True))
    first = next(iter(infos.values()))
    if any(not same_image(info, first) for info in infos.values()):
        errors = [
            ImageUnfit(node, f"{pinned} is {info.id[:19]} ({info.arch}) there", "use nodes of one architecture")
            for node, info in infos.items()
        ]
        raise NodesFailed(errors, of=len(errors))
    return ImageOnNodes(name, first.id, {node: info.id for node, info in infos.items()}, why=f"pulled {pinned}")


def _try_pulling(name: str, info: ImageInfo, engines: Sequence[Engine], locations: ImageLocations) -> list[Engine]:
    """Let nodes pull what a registry has: the image itself by digest, or the base that it was built from.

    The engines that have the whole image then. A failure is only logged: the image is pushed to that node; if the
    registry did not answer, the node does not try again for UNREACHABLE_MAX_AGE.
    """
    base = names.parse(info.labels.get(names.OCI_BASE_NAME, ""))
    digest = info.labels.get(names.OCI_BASE_DIGEST, "")
    pinned = next(iter(info.repo_digests), "") or (base.at(digest) if base is not None and digest else "")
    wanted = names.parse(pinned)
    if wanted is None:
        return []
    login = registry_login(pinned)

    def pulled(engine: Engine) -> bool:
        store, key = image_store(engine), cache.key(engine.host, wanted.registry)
        if store.inspect(pinned) is None:
            if cache.get("unreachable", key, UNREACHABLE_MAX_AGE) is not None:
                return False
            try:
                store.digest(pinned, login)
                locations.log(f"image {name}: {engine.node} pulls {pinned}")
                store.pull(pinned, login)
            except LauncherError as error:
                cache.put("unreachable", key, {"words": error.what})
                locations.log(f"image {name}: {engine.node} cannot pull {pinned} ({error.what})")
                return False
        theirs = store.inspect(pinned)
        if theirs is None or not same_image(theirs, info):
            return False
        if "@" not in name:
            store.tag(theirs.id, name)
        return True

    outcomes = run_all([partial(pulled, engine) for engine in engines])
    return [engine for engine, success in zip(engines, outcomes, strict=True) if success]


def registry_login(name: str) -> Mapping[str, str] | None:
    """What `docker login` on this machine knows for the image's registry, never stored on a node; None if nothing.

    Reads the Docker CLI's config.json and its credential helpers. Raises ImageUnfit if a helper fails.
    """
    wanted = names.parse(name)
    if wanted is None:
        return None
    from docker import auth  # slow to load, and most jobs pull nothing
    from docker.errors import DockerException

    try:
        found = auth.load_config().resolve_authconfig(wanted.registry or None)
    except DockerException as error:
        what = f"this machine's Docker login for {wanted.registry or 'Docker Hub'} cannot be read: {error}"
        raise ImageUnfit(f"image {name}", what, "check credsStore and credHelpers in ~/.docker/config.json") from error
    return {str(key): str(value) for key, value in found.items() if value} if found else None
