"""An image brought to every engine that lacks it, part after part, without the layers that they have."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from launcher.errors import ImageShipFailed, LauncherError, NoRoom
from launcher.image.export import WHOLE, export
from launcher.image.image_locations import find_same, image_store
from launcher.image.names import PARTIAL
from launcher.model.facts import ImageInfo
from launcher.model.progress import OnProgress
from launcher.node import cache
from launcher.node.engine import Engine
from launcher.node.parallel import on_each

CHUNK = 1 << 30
PROGRESS_INTERVAL = 0.1  # seconds between two reports of one node's progress
SLOW_LINK = 12.5e6  # bytes/s, a 100 Mb/s link: one core compresses some 80 MB/s to less than half
LINK_MAX_AGE = 86400.0  # seconds for which a measured link is believed
LINK_ENOUGH = 8 << 20  # bytes below which a measurement says nothing
_GZIP = 31  # zlib's window bits for a gzip stream, which `docker load` recognises by itself

Send = Callable[[int, int], None]  # loads one archive: layers from the first number on, about so many bytes of them


@dataclass
class Transfer:
    """What was sent to a node, and an estimate of all that it lacked, in bytes."""

    engine: Engine
    total: int = 0
    sent: int = 0
    complete: bool = False  # every byte of the last archive was taken


def push(
    source: Engine, info: ImageInfo, name: str, engines: Sequence[Engine], on_progress: OnProgress, chunk: int = CHUNK
) -> Mapping[str, int]:
    """Send image `info` of `source` to every engine of `engines` and name it `name` there: bytes sent, by node.

    Raises NodesFailed, naming every node that did not get it; the others have it then.
    """

    def push_to(engine: Engine) -> int:
        transfer = Transfer(engine)
        deliver(transfer, info, name, partial(_send, source, info, transfer, on_progress), chunk)
        on_progress(engine.node, transfer.sent, transfer.sent)
        return transfer.sent

    return {engine.node: sent for engine, sent in on_each(engines, push_to).items()}


def deliver(transfer: Transfer, info: ImageInfo, name: str, send: Send, chunk: int = CHUNK) -> None:
    """Send archives until the node has the very image, then give it its name.

    What is bigger than `chunk` bytes goes in parts of about that size, so that a node needs no room for twice the image
    and resumes after a cut. Parts carry the label PARTIAL; they stay on a node that fails, for the next try, but not if
    its disk is full. A node has a second try: after a cut with what it lacks then, after refusing an archive without
    the layers that it should have with the whole one. Raises LauncherError.
    """
    engine, best, whole, failed = transfer.engine, -1, False, False
    size = chunk // 16  # shows early how fast the connection is
    while (theirs := find_same(engine, info)) is None:
        if whole:
            what = f"took the archive of {name} but does not have image {info.id[:19]} now"
            raise ImageShipFailed(engine.node, what, "look at the engine's log on that node, then try again")
        known, missing = survey(engine, info)
        whole, best = known <= best, known
        transfer.total = transfer.total or missing
        try:
            send(0, WHOLE) if whole else send(known, size)
        except NoRoom:
            with contextlib.suppress(LauncherError):  # the first error is the one to report
                _remove_parts(engine, info)
            raise
        except LauncherError:
            if failed:
                raise
            failed = True
            if not (whole or transfer.complete):
                best -= 1  # it was cut, not refused
            whole = False
        size = chunk
    if name != info.id:
        image_store(engine).tag(theirs.id, name)
    _remove_parts(engine, info)  # not needed any more


def survey(engine: Engine, info: ImageInfo) -> tuple[int, int]:
    """How many layers of an image, from the base up, this engine has through any of its images; bytes of the others."""
    theirs = image_store(engine).list({})
    known = common(info.layers, [image.layers for image in theirs])
    shared = max((i.size for i in theirs if known and tuple(i.layers) == info.layers[: len(i.layers)]), default=0)
    return known, max(0, info.size - shared)


def common(layers: Sequence[str], others: Iterable[Sequence[str]]) -> int:
    """How many of `layers`, from the base up, one of the other images shares."""
    pairs = (takewhile(lambda pair: pair[0] == pair[1], zip(layers, other, strict=False)) for other in others)
    return max((len(list(same)) for same in pairs), default=0)


def _send(source: Engine, info: ImageInfo, transfer: Transfer, on_progress: OnProgress, known: int, chunk: int) -> None:
    transfer.complete = False
    with closing(export(source, info, known, chunk)) as archive:
        gzip = is_slow(transfer.engine.host) and _takes_gzip(transfer.engine)
        pieces = compressed(archive) if gzip else archive
        image_store(transfer.engine).load(_counted(pieces, transfer, on_progress))


def _takes_gzip(engine: Engine) -> bool:
    facts = engine.facts().engine
    return facts is None or facts.kind != "podman"  # 4.3 refuses a compressed archive through Docker's API


def is_part(image: ImageInfo, info: ImageInfo) -> bool:
    """Whether it is the lower layers of image `info`, and nothing else."""
    return PARTIAL in image.labels and image.layers == info.layers[: len(image.layers)]


def _remove_parts(engine: Engine, info: ImageInfo) -> None:
    store = image_store(engine)
    for part in store.list({PARTIAL: None}):
        if is_part(part, info):
            store.remove(part.id)


def _counted(pieces: Iterable[bytes], transfer: Transfer, on_progress: OnProgress) -> Iterator[bytes]:
    before, began, reported = transfer.sent, time.monotonic(), 0.0
    for piece in pieces:
        yield piece
        transfer.sent += len(piece)
        now = time.monotonic()
        if now - reported >= PROGRESS_INTERVAL:
            reported = now
            on_progress(transfer.engine.node, transfer.sent, max(transfer.total, transfer.sent))
    transfer.complete = True
    remember_link(transfer.engine.host, transfer.sent - before, time.monotonic() - began)


def is_slow(host: str) -> bool:
    """Whether the last image went to this host so slowly that compressing the next one pays."""
    known = cache.get("link", cache.key(host), LINK_MAX_AGE)
    return known is not None and float(known["rate"]) < SLOW_LINK


def remember_link(host: str, sent: int, seconds: float) -> None:
    """What was measured: bytes on the wire, and how long they took."""
    if sent >= LINK_ENOUGH and seconds > 0:
        cache.put("link", cache.key(host), {"rate": sent / seconds})


def compressed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same as a gzip stream, at the fastest level, which gains most of what there is to gain in an image."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
    for piece in pieces:
        if less := compressor.compress(piece):
            yield less
    yield compressor.flush()
