"""Push an image to every engine that lacks it, in parts, without the layers that the engine has."""

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
LINK_MAX_AGE = 86400.0  # seconds for which a measurement is valid
LINK_ENOUGH = 8 << 20  # bytes: fewer are not enough to measure a link
_GZIP = 31  # zlib's window bits for a gzip stream, which `docker load` detects

Send = Callable[[int, int], None]  # (known, chunk): loads one archive of layers


@dataclass
class Transfer:
    """Bytes sent to a node, and an estimate of the total to send."""

    engine: Engine
    total: int = 0
    sent: int = 0
    complete: bool = False  # the node received all of the last archive


def push(
    source: Engine, info: ImageInfo, name: str, engines: Sequence[Engine], on_progress: OnProgress, chunk: int = CHUNK
) -> Mapping[str, int]:
    """Send image `info` from `source` to all `engines` and tag it `name`; return the bytes sent by node.

    Raises NodesFailed with every node that did not get it; all others have it then.
    """

    def push_to(engine: Engine) -> int:
        transfer = Transfer(engine)
        deliver(transfer, info, name, partial(_send, source, info, transfer, on_progress), chunk)
        on_progress(engine.node, transfer.sent, transfer.sent)
        return transfer.sent

    return {engine.node: sent for engine, sent in on_each(engines, push_to).items()}


def deliver(transfer: Transfer, info: ImageInfo, name: str, send: Send, chunk: int = CHUNK) -> None:
    """Send archives until the node has exactly this image, then tag it.

    An image of more than `chunk` bytes is sent in parts of about that size, so that a node does not need space for
    twice the image and can resume after a lost connection. Parts have the label PARTIAL; they stay on a node that
    fails, for the next attempt, unless its disk is full. Each node gets one retry: after a lost connection with the
    layers that it still lacks, after a rejected archive with the complete image. Raises LauncherError.
    """
    engine, best, whole, failed = transfer.engine, -1, False, False
    size = chunk // 16  # a small first part, to measure the link early
    while (theirs := find_same(engine, info)) is None:
        if whole:
            what = f"loaded the archive of {name} but does not have image {info.id[:19]}"
            raise ImageShipFailed(engine.node, what, "check the engine's log on that node, then try again")
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
                best -= 1  # interrupted, not rejected
            whole = False
        size = chunk
    if name != info.id:
        image_store(engine).tag(theirs.id, name)
    _remove_parts(engine, info)  # no longer needed


def survey(engine: Engine, info: ImageInfo) -> tuple[int, int]:
    """Return how many layers, from the base up, this engine has in any of its images, and the bytes of the others."""
    theirs = image_store(engine).list({})
    known = common(info.layers, [image.layers for image in theirs])
    shared = max((i.size for i in theirs if known and tuple(i.layers) == info.layers[: len(i.layers)]), default=0)
    return known, max(0, info.size - shared)


def common(layers: Sequence[str], others: Iterable[Sequence[str]]) -> int:
    """Return the largest number of `layers`, from the base up, shared with one of the other images."""
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
    return facts is None or facts.kind != "podman"  # Podman 4.3 rejects a compressed archive through Docker's API


def is_part(image: ImageInfo, info: ImageInfo) -> bool:
    """Whether `image` consists of the lower layers of image `info`."""
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
    """Whether the link to this host was so slow that compression pays off."""
    known = cache.get("link", cache.key(host), LINK_MAX_AGE)
    return known is not None and float(known["rate"]) < SLOW_LINK


def remember_link(host: str, sent: int, seconds: float) -> None:
    """Cache the measured rate of the link to this host."""
    if sent >= LINK_ENOUGH and seconds > 0:
        cache.put("link", cache.key(host), {"rate": sent / seconds})


def compressed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces as a gzip stream, at the fastest level, which already gives most of the gain."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
    for piece in pieces:
        if less := compressor.compress(piece):
            yield less
    yield compressor.flush()
