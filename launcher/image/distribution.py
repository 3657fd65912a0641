"""One image on all nodes: pulled from its registry or pushed from where it is, and the proof that all have the same.

And its way into a registry, for clusters that get their images there.
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
from launcher.model.progress import Step
from launcher.node import cache
from launcher.node.engine import Engine
from launcher.node.parallel import on_each, run_all, run_all_settled

if TYPE_CHECKING:
    from launcher.node.docker.pulling import PullProgress

UNREACHABLE_MAX_AGE = 3600.0  # seconds
UNPACKING_EVERY = 5.0  # seconds


def provide(name: str, locations: ImageLocations) -> ImageOnNodes:
    """The image of this name on every node. If all of them have it already this costs one round trip.

    The caller's engine is the first source, if its image suits the nodes, then the nodes in their order; if none has it
    the nodes pull it. Raises ImageUnfit, ImageShipFailed, NodesFailed.
    """
    found = locations.find(name)
    if not (sources := having(found)):
        return pull(name, locations.nodes, locations)
    own = [(engine, info) for engine, info in sources if engine is locations.local]
    return provide_from(*(own or sources)[0], name, found, locations)


def provide_from(
    source: Engine, info: ImageInfo, name: str, found: Mapping[Engine, ImageInfo | None], locations: ImageLocations
) -> ImageOnNodes:
    """Image `info` of `source` on every node, and the proof of it. found: what the nodes have of this name."""
    nodes, sent = locations.nodes, dict[str, int]()

    def find(engine: Engine) -> ImageInfo | None:
        """This very image, also under another name or id."""
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
            locations.log(f"image {name}: from {locations.describe(source)} to {locations.describe(*targets)}")
            sent.update(push_or_relay(source, info, name, targets, locations))
        theirs = on_each(nodes, partial(find_same, info=info))
    missing = [engine.node for engine in nodes if theirs[engine] is None]
    if missing:
        fix = "another program may be removing images on the node; try again"
        raise ImageUnfit(", ".join(missing), f"does not have image {info.id[:19]} after it was sent", fix)
    proven = having(theirs)
    run_all([partial(image_store(node).tag, image.id, name) for node, image in proven if not _is_named(name, image)])
    return ImageOnNodes(name, {engine.node: image for engine, image in proven}, shipped=sent)


def _is_named(name: str, image: ImageInfo) -> bool:
    """Whether a store has the image under this name; a digest or an id cannot be given as a name."""
    return "@" in name or names.parse(name) is None or name in image.tags or f"{name}:latest" in image.tags


def _log_replaced(
    name: str, info: ImageInfo, source: Engine, theirs: Mapping[Engine, ImageInfo | None], locations: ImageLocations
) -> None:
    others = [engine.node for engine, image in having(theirs) if not same_image(image, info)]
    if others:
        ours = f"the one of {locations.describe(source)} ({info.id[7:19]}, created {info.created[:19]})"
        locations.log(f"{', '.join(others)} had another {name}: {ours} replaces it")


def _check_architecture(name: str, info: ImageInfo, theirs: Mapping[Engine, ImageInfo | None]) -> None:
    """An image is not sent over one for another architecture, which shows what the node needs."""
    for engine, image in having(theirs):
        if image.arch != info.arch:
            what = f"is for {image.arch} there and for {info.arch} at its source"
            raise ImageUnfit(f"{engine.node}: image {name}", what, "nodes of one job must be of one architecture")


def node_that_can_pull(name: str, locations: ImageLocations) -> Engine:
    """The first node if the image's registry answers it, else one of the others. Raises ImageUnfit as `pull` does."""
    wanted = _in_registry(name, locations)
    login = registry_login(wanted)
    first, *others = locations.nodes

    def ask(engines: Sequence[Engine]) -> list[str | LauncherError]:
        return run_all_settled([partial(image_store(engine).digest, name, login) for engine in engines])

    [answer] = ask([first])
    if not isinstance(answer, LauncherError):
        return first
    locations.log(f"image {name}: {first.node} cannot pull it ({answer.what})")
    for engine, theirs in zip(others, ask(others), strict=True):
        if not isinstance(theirs, LauncherError):
            return engine
    raise _not_answered(name, first, answer, locations) from answer


def pull(name: str, engines: Sequence[Engine], locations: ImageLocations) -> ImageOnNodes:
    """An image that no engine has: these pull the same digest from its registry, with the caller's login.

    Raises ImageUnfit with the registry's words, NodesFailed.
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
            raise ImageUnfit(engine.node, f"pulled {pinned} but does not have it now", "look at its engine's log")
        if not wanted.digest:
            store.tag(info.id, name)
        return info

    infos = {engine.node: info for engine, info in on_each(engines, pull_on).items()}
    first = next(iter(infos.values()))
    if any(not same_image(info, first) for info in infos.values()):
        errors = [
            ImageUnfit(node, f"{pinned} is {info.id[:19]} ({info.arch}) there", "use nodes of one architecture")
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
            locations.log(Step(engine.node, said))

    image_store(engine).pull(pinned, login, show)


def _in_registry(name: str, locations: ImageLocations) -> names.Reference:
    """Raises ImageUnfit for a name that no registry has."""
    wanted = names.parse(name)
    if wanted is None or not names.in_registry(name):
        fix = "check its spelling in the job file; `docker images` on a node lists what it has"
        raise ImageUnfit(f"image {name}", f"{_nowhere(locations)}, and no registry has such a name", fix)
    return wanted


def _not_answered(name: str, engine: Engine, error: LauncherError, locations: ImageLocations) -> ImageUnfit:
    what = f"{_nowhere(locations)}, and {locations.describe(engine)} cannot get it from its registry: {error.what}"
    fix = "check its spelling, the network to the registry, and `docker login` on this machine"
    return ImageUnfit(f"image {name}", what, fix)


def _nowhere(locations: ImageLocations) -> str:
    everywhere = ", ".join(engine.node for engine in locations.nodes)
    return f"is neither on {everywhere}" + (" nor on this machine" if locations.local else "")


def _try_pulling(name: str, info: ImageInfo, engines: Sequence[Engine], locations: ImageLocations) -> list[Engine]:
    """Let nodes pull what a registry has: the image itself by digest, or the base that it was built from.

    The engines that lack the whole image still. A failure is only logged: the image is pushed to that node; if the
    registry did not answer, the node does not try again for UNREACHABLE_MAX_AGE.
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


def registry_place(registry: str, job: str) -> names.Reference:
    """Where the job's image goes. Raises UsageError for what is no place in a registry."""
    found = names.parse(f"{registry}/{job}")
    if found is None or found.tag or found.digest:
        raise UsageError("--push", f"{registry} is no place in a registry", "such as registry.example/team")
    return found


def publish(engine: Engine, image: ImageInfo, to: names.Reference) -> str:
    """Push it; what it is called there, by digest."""
    name = f"{to.repository}:{image.id.partition(':')[2][:24]}"
    image_store(engine).tag(image.id, name)
    return to.at(image_store(engine).push(name, registry_login(to)))


def registry_login(wanted: names.Reference) -> Mapping[str, str] | None:
    """What `docker login` on this machine knows for the image's registry, never stored on a node; None if nothing.

    Reads the Docker CLI's config.json and its credential helpers. Raises ImageUnfit if a helper fails.
    """
    from docker import auth  # slow to load, and most jobs pull nothing
    from docker.errors import DockerException

    try:
        found = auth.load_config().resolve_authconfig(wanted.registry or None)
    except DockerException as error:
        what = f"this machine's Docker login for {wanted.registry or 'Docker Hub'} cannot be read: {error}"
        fix = "check credsStore and credHelpers in ~/.docker/config.json"
        raise ImageUnfit(f"image {wanted.repository}", what, fix) from error
    return {str(key): str(value) for key, value in found.items() if value} if found else None
