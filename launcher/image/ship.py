"""An image to every engine that lacks it: read once, sent to all at once, layers that are there left out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from launcher.errors import ImageShipFailed, LauncherError, NodesFailed
from launcher.image import archive, parallel
from launcher.image.export import export
from launcher.image.tee import Pipe
from launcher.node.engine import Engine, ImageInfo, Images

TELL_EVERY = 0.1  # seconds between two reports of one node's progress


@dataclass(frozen=True)
class Progress:
    """How far one node is. `total` is what the layers it lacks take up, an estimate; bytes throughout."""

    node: str
    sent: int
    total: int
    done: bool = False


Tell = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """For callers who show nothing."""


@dataclass(frozen=True)
class Target:
    """A node that lacks the image."""

    engine: Engine
    leave_out: frozenset[str]  # members of the archive that it does not need
    known: int  # how many of the layers, from the base up, it has
    total: int  # bytes, estimated


def ship(
    source: Engine, info: ImageInfo, reference: str, engines: Sequence[Engine], tell: Tell = silent
) -> Mapping[str, int]:
    """Bring image `info` of `source` to every engine of `engines` and name it `reference` there: bytes sent, by node.

    The image gets its name only when its id was seen on the node. Every node has a second try: after a cut with what it
    lacks then, after refusing an archive without the layers that it should have with the whole one. Raises
    ImageShipFailed (NodesFailed for several), naming every node that did not get it; the others have it then.
    """
    first = _send(source, info, reference, parallel.each(lambda engine: survey(engine, info), engines), tell)
    failed = {delivery.node: delivery.error for delivery in first if delivery.error is not None}
    sent = {delivery.node: delivery.sent for delivery in first}
    again = [_once_more(delivery, info) for delivery in first if delivery.worth_another_try]
    targets = [target for target in again if target is not None]
    for delivery in _send(source, info, reference, targets, tell) if targets else ():
        sent[delivery.node] += delivery.sent
        failed.pop(delivery.node)
        if delivery.error is not None:
            failed[delivery.node] = delivery.error
    if len(failed) == 1:
        raise next(iter(failed.values()))
    if failed:
        raise NodesFailed([failed[e.node] for e in engines if e.node in failed], of=len(engines))
    return sent


@dataclass
class Delivery:
    """What became of one node's archive."""

    target: Target
    sent: int = 0  # bytes
    complete: bool = False  # every byte was taken
    error: LauncherError | None = None

    @property
    def node(self) -> str:
        return self.target.engine.node

    @property
    def worth_another_try(self) -> bool:
        """Not where the disk was full: it still is."""
        return self.error is not None and "disk is full" not in self.error.what


def _once_more(delivery: Delivery, info: ImageInfo) -> Target | None:
    """What to send in a second try; None where the node does not even answer."""
    if delivery.complete:
        return Target(delivery.target.engine, frozenset(), 0, info.size)
    try:
        return survey(delivery.target.engine, info)
    except LauncherError:
        return None


def survey(engine: Engine, info: ImageInfo) -> Target:
    """Which layers of an image this engine has already, through any of its images."""
    theirs = store(engine).list({})
    known = archive.common(info.layers, [image.layers for image in theirs])
    shared = max((i.size for i in theirs if known and tuple(i.layers) == info.layers[: len(i.layers)]), default=0)
    return Target(engine, archive.layer_names(info.layers, known), known, max(0, info.size - shared))


def store(engine: Engine) -> Images:
    """The image store of an engine that has one."""
    if engine.images is None:
        raise ImageShipFailed(engine.node, "has no container engine to hold images", "use runtime: docker nodes")
    return engine.images


def _send(source: Engine, info: ImageInfo, reference: str, targets: Sequence[Target], tell: Tell) -> Sequence[Delivery]:
    """One reading of the source, all targets fed from it."""
    deliveries = [Delivery(target) for target in targets]
    pipes = [Pipe() for _ in targets]

    def receive(both: tuple[Delivery, Pipe]) -> None:
        delivery, pipe = both
        try:
            _load(delivery, info, reference, _counted(pipe, delivery, tell))
        except LauncherError as error:
            delivery.error = error
        finally:
            pipe.give_up()

    feeder = threading.Thread(target=_feed, args=(source, info, targets, pipes), name="image-export", daemon=True)
    feeder.start()
    parallel.each(receive, list(zip(deliveries, pipes, strict=True)))
    feeder.join()
    return deliveries


def _feed(source: Engine, info: ImageInfo, targets: Sequence[Target], pipes: Sequence[Pipe]) -> None:
    """Read the archive once and hand every member to the targets that need it."""
    alive = dict(zip(pipes, targets, strict=True))

    def put(piece: bytes, to: Sequence[Pipe]) -> None:
        for pipe in to:
            if not pipe.put(piece):
                alive.pop(pipe, None)

    error: BaseException | None = None
    try:
        known = min(target.known for target in targets)
        with closing(export(source, info, known)) as pieces:
            for member in archive.members(pieces):
                wanted = [pipe for pipe, target in alive.items() if member.name not in target.leave_out]
                put(member.head, wanted)
                for piece in member.body:
                    put(piece, [pipe for pipe in wanted if pipe in alive])
                if not alive:
                    return
        put(archive.end(), list(alive))
    except LauncherError as failure:
        error = failure
    except (archive.TruncatedError, OSError) as failure:
        error = ImageShipFailed(source.node, f"reading image {info.id[:19]} failed: {failure}", "try again")
    except BaseException as failure:
        error = failure
        raise
    finally:
        for pipe in pipes:
            pipe.close(error)


def _counted(pipe: Pipe, delivery: Delivery, tell: Tell) -> Iterator[bytes]:
    target, last = delivery.target, 0.0
    for piece in pipe:
        yield piece
        delivery.sent += len(piece)
        now = time.monotonic()
        if now - last >= TELL_EVERY:
            last = now
            tell(Progress(delivery.node, delivery.sent, max(target.total, delivery.sent)))
    delivery.complete = True
    tell(Progress(delivery.node, delivery.sent, delivery.sent, done=True))


def _load(delivery: Delivery, info: ImageInfo, reference: str, pieces: Iterator[bytes]) -> None:
    """Load, look whether it is the same image, and only then give it its name."""
    images = store(delivery.target.engine)
    images.load(pieces)
    if images.inspect(info.id) is None:
        raise ImageShipFailed(
            delivery.node,
            f"took the archive of {reference} but does not have image {info.id[:19]} now",
            "look at the engine's log on that node, then try again",
        )
    if reference != info.id:
        images.tag(info.id, reference)
