"""Distribute one image to all nodes, by pull or push, and verify that all have the same image.

Also push it to a registry, for clusters that pull from there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from launcher.errors import ImageUnfit, LauncherError, NodesFailed, UsageError
from launcher.image import names
from launcher.image.image_locations import ImageLocations, ImageOnNodes, find_same, having, image_store, same_image
from launcher.image.peers import push_or_relay
from launcher.model.facts import ImageInfo
from launcher.model.progress import StatusLine
from launcher.node import cache
from launcher.node.engine import Engine
from launcher.node.parallel import on_each, run_all, run_all_catching

if TYPE_CHECKING:
    from launcher.node.docker.pulling import PullProgress

UNREACHABLE_MAX_AGE = 3600.0  # seconds
UNPACKING_EVERY = 5.0  # seconds


def provide(name: str, locations: ImageLocations) -> ImageOnNodes:
    """Make the image available on every node and return it. Takes one round trip if all nodes have it already.

    Sources: the caller's engine, if its image suits the nodes, then the nodes in order; if none has the image, the
    nodes pull it. Raises ImageUnfit, ImageShipFailed, NodesFailed.
    """
    found = locations.find(name)
    if not (sources := having(found)):
        return pull(name, locations.nodes, locations)
    own = [(engine, info) for engine, info in sources if engine is locations.local]
    return provide_from(*(own or sources)[0], name, found, locations)


def provide_from(
    source: Engine, info: ImageInfo, name: str, found: Mapping[Engine, ImageInfo | None], locations: ImageLocations
) -> ImageOnNodes:
    """Copy image `info` from `source` to every node and verify it. found: the images of this name on the nodes."""
    nodes, sent = locations.nodes, dict[str, int]()

    def find(engine: Engine) -> ImageInfo | None:
        """Return exactly this image, also under another name or ID."""
        return found[engine] if same_image(found[engine], info) else find_same(engine, info)

    theirs = {engine: found[engine] for engine in nodes}
    if not all(same_image(image, info) for image in theirs.values()):
        _log_replaced(name, info, source, theirs, locations)
        named, theirs = theirs, on_each(nodes, find)
        targets = [engine for engine in nodes if theirs[engine] is None]
        if targets:
            _check_architecture(name, info, named)
            targets = _try_pulling(name, info, targets, locations)
        if targets:
            locations.log(f"image {name}: copying from {locations.describe(source)} to {locations.describe(*targets)}")
            sent.update(push_or_relay(source, info, name, targets, locations))
        theirs = on_each(nodes, partial(find_same, info=info))
    missing = [engine.node for engine in nodes if theirs[engine] is None]
    if missing:
        fix = "check that no other program removes images on the node, then try again"
        raise ImageUnfit(", ".join(missing), f"does not have image {info.id[:19]} after the transfer", fix)
    proven = having(theirs)
    run_all([partial(image_store(node).tag, image.id, name) for node, image in proven if not _is_named(name, image)])
    return ImageOnNodes(name, {engine.node: image for engine, image in proven}, shipped=sent)


def _is_named(name: str, image: ImageInfo) -> bool:
    """Whether the store has the image under this name. A digest or an ID cannot be set as a tag."""
    return "@" in name or names.parse(name) is None or name in image.tags or f"{name}:latest" in image.tags


def _log_replaced(
    name: str, info: ImageInfo, source: Engine, theirs: Mapping[Engine, ImageInfo | None], locations: ImageLocations
) -> None:
    others = [engine.node for engine, image in having(theirs) if not same_image(image, info)]
    if others:
        ours = f"the image of {locations.describe(source)} ({info.id[7:19]}, created {info.created[:19]})"
        locations.log(f"{', '.join(others)} had a different {name}: replaced by {ours}")


def _check_architecture(name: str, info: ImageInfo, theirs: Mapping[Engine, ImageInfo | None]) -> None:
    """Raise ImageUnfit if a node has an image of this name for another architecture."""
    for engine, image in having(theirs):
        if image.arch != info.arch:
            what = f"is for {image.arch} on this node, but for {info.arch} at its source"
            raise ImageUnfit(f"{engine.node}: image {name}", what, "use nodes of one architecture")


def node_that_can_pull(name: str, locations: ImageLocations) -> Engine:
    """Return the first node that can reach the image's registry. Raises ImageUnfit like `pull`."""
    wanted = _in_registry(name, locations)
    login = registry_login(wanted)
    first, *others = locations.nodes

    def ask(engines: Sequence[Engine]) -> list[str | LauncherError]:
        return run_all_catching([partial(image_store(engine).digest, name, login) for engine in engines])

    [answer] = ask([first])
    if not isinstance(answer, LauncherError):
        return first
    locations.log(f"image {name}: {first.node} cannot pull it ({answer.what})")
    for engine, theirs in zip(others, ask(others), strict=True):
        if not isinstance(theirs, LauncherError):
            return engine
    raise _not_answered(name, first, answer, locations) from answer


def pull(name: str, engines: Sequence[Engine], locations: ImageLocations) -> ImageOnNodes:
    """Pull the image on these engines, by digest, from its registry, with the caller's login.

    Raises ImageUnfit with the registry's message, NodesFailed.
    """
    wanted = _in_registry(name, locations)
    login = registry_login(wanted)
    try:
        digest = wanted.digest or image_store(engines[0]).digest(name, login)
    except LauncherError as error:
        raise _not_answered(name, engines[0], error, locations) from error
    pinned = wanted.at(digest)
    locations.log(f"image {name}: pulling {pinned} on {locations.describe(*engines)}")

    def pull_on(engine: Engine) -> ImageInfo:
        store = image_store(engine)
        _pull_shown(engine, pinned, login, locations)
        info = store.inspect(pinned)
        if info is None:
            raise ImageUnfit(engine.node, f"pulled {pinned}, but the image is missing now", "check the engine's log")
        if not wanted.digest:
            store.tag(info.id, name)
        return info

    infos = {engine.node: info for engine, info in on_each(engines, pull_on).items()}
    first = next(iter(infos.values()))
    if any(not same_image(info, first) for info in infos.values()):
        errors = [
            ImageUnfit(node, f"{pinned} is {info.id[:19]} ({info.arch}) on this node", "use nodes of one architecture")
            for node, info in infos.items()
        ]
        raise NodesFailed(errors, of=len(errors))
    return ImageOnNodes(name, infos, why=f"pulled {pinned}")


def _pull_shown(engine: Engine, pinned: str, login: Mapping[str, str] | None, locations: ImageLocations) -> None:
    said, at = "", 0.0

    def show(progress: PullProgress) -> None:
        nonlocal said, at
        if progress.total:
            locations.on_progress(engine.node, progress.received, progress.total)
        now = time.monotonic()
        if progress.unpacking and (progress.unpacking != said or now - at >= UNPACKING_EVERY):
            said, at = progress.unpacking, now
            locations.log(StatusLine(engine.node, said))

    image_store(engine).pull(pinned, login, show)


def _in_registry(name: str, locations: ImageLocations) -> names.Reference:
    """Return the parsed name. Raises ImageUnfit if it cannot be the name of an image in a registry."""
    wanted = names.parse(name)
    if wanted is None or not names.in_registry(name):
        fix = "check the name in the job file; to list the images of a node, run there: docker images"
        if misfit := locations.misfits.get(name):
            raise ImageUnfit(f"image {name}", misfit, "build it for the nodes: docker build --platform linux/ARCH")
        raise ImageUnfit(f"image {name}", f"{_nowhere(locations)}, and is not the name of an image in a registry", fix)
    return wanted


def _not_answered(name: str, engine: Engine, error: LauncherError, locations: ImageLocations) -> ImageUnfit:
    what = f"{_nowhere(locations)}, and {locations.describe(engine)} cannot pull it: {error.what}"
    if misfit := locations.misfits.get(name):
        fix = (
            "build it for the nodes (docker build --platform linux/ARCH), or pull it: docker pull --platform linux/ARCH"
        )
        return ImageUnfit(f"image {name}", f"{misfit}; {locations.describe(engine)} cannot pull it: {error.what}", fix)
    fix = "check the name, the network connection to the registry, and `docker login` on this machine"
    return ImageUnfit(f"image {name}", what, error.next_step or fix)


def _nowhere(locations: ImageLocations) -> str:
    nodes = ", ".join(engine.node for engine in locations.nodes)
    return f"was not found on {nodes}" + (" or on this machine" if locations.local else "")


def _try_pulling(name: str, info: ImageInfo, engines: Sequence[Engine], locations: ImageLocations) -> list[Engine]:
    """Pull the image by digest, or the base that it was built from; return the engines that still lack the image.

    A failure is only logged: the image is pushed to that node. If the registry was unreachable, the node does not try
    again for UNREACHABLE_MAX_AGE.
    """
    base = names.parse(info.labels.get(names.OCI_BASE_NAME, ""))
    digest = info.labels.get(names.OCI_BASE_DIGEST, "")
    pinned = next(iter(info.repo_digests), "") or (base.at(digest) if base is not None and digest else "")
    wanted = names.parse(pinned)
    if wanted is None:
        return [*engines]
    login = registry_login(wanted)

    def pulled(engine: Engine) -> bool:
        store, key = image_store(engine), cache.key(engine.host, wanted.registry)
        if store.inspect(pinned) is None:
            if cache.get("unreachable", key, UNREACHABLE_MAX_AGE) is not None:
                return False
            try:
                store.digest(pinned, login)
                locations.log(f"image {name}: {engine.node} pulls {pinned}")
                _pull_shown(engine, pinned, login, locations)
            except LauncherError as error:
                cache.put("unreachable", key, {"words": error.what})
                locations.log(f"image {name}: {engine.node} cannot pull {pinned} ({error.what})")
                return False
        return same_image(store.inspect(pinned), info)

    return [engine for engine, success in on_each(engines, pulled).items() if not success]


def registry_repository(registry: str, job: str) -> names.Reference:
    """Return the repository for the job's image. Raises UsageError if `registry` is not a registry path."""
    found = names.parse(f"{registry}/{job}")
    if found is None or found.tag or found.digest:
        raise UsageError("--push", f"{registry} is not a registry path", "use for example: registry.example/team")
    return found


def publish(engine: Engine, image: ImageInfo, to: names.Reference) -> str:
    """Push the image; return its name by digest."""
    name = f"{to.repository}:{image.id.partition(':')[2][:24]}"
    image_store(engine).tag(image.id, name)
    return to.at(image_store(engine).push(name, registry_login(to)))


def registry_login(wanted: names.Reference) -> Mapping[str, str] | None:
    """Return the credentials of `docker login` on this machine for the image's registry, or None.

    They are read from the Docker CLI's config.json and credential helpers and never stored on a node.
    Raises ImageUnfit if a helper fails.
    """
    from docker import auth, errors  # slow to load, and most jobs pull nothing

    try:
        found = auth.load_config().resolve_authconfig(wanted.registry or None)
    except errors.DockerException as error:
        what = f"this machine's Docker login for {wanted.registry or 'Docker Hub'} cannot be read: {error}"
        fix = "check credsStore and credHelpers in ~/.docker/config.json"
        raise ImageUnfit(f"image {wanted.repository}", what, fix) from error
    return {str(key): str(value) for key, value in found.items() if value} if found else None
