"""An image to every engine that lacks it: read once, sent to all at once, layers that are there left out."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.errors import ImageShipFailed, LauncherError, NodesFailed, NoRoom
from launcher.image import archive, parallel
from launcher.image.export import PARTIAL, WHOLE
from launcher.image.feed import Line, feed
from launcher.image.link import compressed, is_slow, remember
from launcher.image.progress import Progress, Tell, silent
from launcher.image.stores import locate, store
from launcher.node.engine import Engine, ImageInfo

CHUNK = 1 << 30
TELL_EVERY = 0.1  # seconds between two reports of one node's progress


@dataclass(frozen=True)
class Target:
    """A node that lacks the image."""

    engine: Engine
    leave_out: frozenset[str]  # members of the archive that it does not need
    known: int  # how many of the layers, from the base up, it has
    total: int  # bytes, estimated
    whole: bool = False  # it takes nothing but the whole image in one archive


def ship(
    source: Engine,
    info: ImageInfo,
    reference: str,
    engines: Sequence[Engine],
    tell: Tell = silent,
    chunk: int = CHUNK,
) -> Mapping[str, int]:
    """Bring image `info` of `source` to every engine of `engines` and name it `reference` there: bytes sent, by node.

    What is bigger than `chunk` bytes goes in parts of about that size, so that a node needs no room for twice the image
    and goes on after a cut where it was. Parts carry the label PARTIAL; they stay where a node fails, for the next
    try, but not where its disk is full.
    The image gets its name only when its id was seen on the node. Every node has a second try: after a cut with what it
    lacks then, after refusing an archive without the layers that it should have with the whole one. Raises
    ImageShipFailed (NodesFailed for several), naming every node that did not get it; the others have it then.
    """
    targets = parallel.each(lambda engine: survey(engine, info), engines)
    first = _send(source, info, reference, targets, tell, chunk)
    again = [target for target in (_once_more(delivery, info) for delivery in first) if target is not None]
    second = _send(source, info, reference, again, tell, chunk) if again else ()
    last = {delivery.node: delivery for delivery in (*first, *second)}
    failed = [last[engine.node].error for engine in engines if last[engine.node].error is not None]
    errors = [error for error in failed if isinstance(error, LauncherError)]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise NodesFailed(errors, of=len(engines))
    return {node: sum(d.sent for d in (*first, *second) if d.node == node) for node in last}


@dataclass
class Delivery:
    """What became of one node's archive."""

    target: Target
    sent: int = 0  # bytes
    complete: bool = False  # every byte was taken
    taken: float = 0.0  # when, by the monotonic clock
    error: BaseException | None = None

    @property
    def node(self) -> str:
        return self.target.engine.node

    @property
    def worth_another_try(self) -> bool:
        return isinstance(self.error, LauncherError) and not isinstance(self.error, NoRoom)


def _once_more(delivery: Delivery, info: ImageInfo) -> Target | None:
    """What to send in a second try; None where there is no need or no hope."""
    if not delivery.worth_another_try:
        return None
    if delivery.complete:
        return Target(delivery.target.engine, frozenset(), 0, info.size, whole=True)
    try:
        return survey(delivery.target.engine, info)
    except LauncherError:
        return None


def survey(engine: Engine, info: ImageInfo) -> Target:
    """Which layers of an image this engine has already, through any of its images, where that helps it."""
    if not store(engine).fills_in():
        return Target(engine, frozenset(), 0, info.size, whole=True)
    theirs = store(engine).list({})
    known = archive.common(info.layers, [image.layers for image in theirs])
    shared = max((i.size for i in theirs if known and tuple(i.layers) == info.layers[: len(i.layers)]), default=0)
    return Target(engine, archive.layer_names(info.layers, known), known, max(0, info.size - shared))


def _send(
    source: Engine, info: ImageInfo, reference: str, targets: Sequence[Target], tell: Tell, chunk: int
) -> Sequence[Delivery]:
    """To all that take parts at once, then to all that do not."""
    in_parts = [target for target in targets if not target.whole]
    whole = [target for target in targets if target.whole]
    deliveries = _read_once(source, info, reference, in_parts, tell, chunk) if in_parts else []
    return [*deliveries, *(_read_once(source, info, reference, whole, tell, WHOLE) if whole else [])]


def _read_once(
    source: Engine, info: ImageInfo, reference: str, targets: Sequence[Target], tell: Tell, chunk: int
) -> Sequence[Delivery]:
    """One reading of the source, all targets fed from it, each with a thread of its own: the reading waits for all."""
    deliveries = [Delivery(target) for target in targets]
    lines = [Line(target.known, target.leave_out) for target in targets]
    receivers = [
        threading.Thread(target=_receive, args=(delivery, line, info, reference, tell), daemon=True)
        for delivery, line in zip(deliveries, lines, strict=True)
    ]
    for receiver in receivers:
        receiver.start()
    feed(source, info, lines, chunk)
    for receiver in receivers:
        receiver.join()
    for delivery in deliveries:
        if delivery.error is not None and not isinstance(delivery.error, LauncherError):
            raise delivery.error
    return deliveries


def _receive(delivery: Delivery, line: Line, info: ImageInfo, reference: str, tell: Tell) -> None:
    """Load what comes, look whether it is the same image, and only then give it its name."""
    images = store(delivery.target.engine)
    try:
        for pipe in line:
            delivery.complete = False
            host, sent, began = delivery.target.engine.host, delivery.sent, time.monotonic()
            images.load(_counted(compressed(pipe) if is_slow(host) else pipe, delivery, tell))
            remember(host, delivery.sent - sent, delivery.taken - began)
        give_name(delivery.target.engine, info, reference)
        tell(Progress(delivery.node, delivery.sent, delivery.sent, done=True))
    except BaseException as error:  # noqa: BLE001 - told, or raised again, by the thread that waits for this one
        delivery.error = error
        if isinstance(error, NoRoom):  # after other failures they save the next try what they hold
            with contextlib.suppress(LauncherError):  # the first reason is the one to tell; `launcher clean` finds them
                _drop_parts(delivery.target.engine, info)
    finally:
        line.give_up()


def give_name(engine: Engine, info: ImageInfo, reference: str) -> None:
    """Only what is really there gets the name; parts that helped to bring it are not needed any more."""
    images, theirs = store(engine), locate(engine, info)
    if theirs is None:
        raise ImageShipFailed(
            engine.node,
            f"took the archive of {reference} but does not have image {info.id[:19]} now",
            "look at the engine's log on that node, then try again",
        )
    if reference != info.id:
        images.tag(theirs.id, reference)
    _drop_parts(engine, info)


def _drop_parts(engine: Engine, info: ImageInfo) -> None:
    for part in store(engine).list({PARTIAL: info.id}):
        store(engine).remove(part.id)


def _counted(pieces: Iterable[bytes], delivery: Delivery, tell: Tell) -> Iterator[bytes]:
    target, last = delivery.target, 0.0
    for piece in pieces:
        yield piece
        delivery.sent += len(piece)
        now = time.monotonic()
        if now - last >= TELL_EVERY:
            last = now
            tell(Progress(delivery.node, delivery.sent, max(target.total, delivery.sent)))
    delivery.complete, delivery.taken = True, time.monotonic()
