"""An image pushed to every engine that lacks it: read once, sent to all at once, without the layers that they have."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from launcher.errors import ImageShipFailed, LauncherError, NodesFailed, NoRoom
from launcher.image.export import WHOLE, common, layer_names
from launcher.image.fanout import Channel, read_once
from launcher.image.image_locations import OnProgress, find_same, image_store
from launcher.image.names import PARTIAL
from launcher.model.facts import ImageInfo
from launcher.node import cache
from launcher.node.engine import Engine
from launcher.node.parallel import in_background, run_all, run_all_settled

CHUNK = 1 << 30
PROGRESS_INTERVAL = 0.1  # seconds between two reports of one node's progress
SLOW_LINK = 12.5e6  # bytes/s, a 100 Mb/s link: one core compresses some 80 MB/s to less than half
LINK_MAX_AGE = 86400.0  # seconds for which a measured link is believed
LINK_ENOUGH = 8 << 20  # bytes below which a measurement says nothing
_GZIP = 31  # zlib's window bits for a gzip stream, which `docker load` recognises by itself


@dataclass
class Transfer:
    """What a node lacks of the image, and how one try to send it went."""

    engine: Engine
    known: int  # how many of the layers, from the base up, it has
    total: int  # bytes, estimated
    whole: bool = False  # it takes nothing but the whole image in one archive
    sent: int = 0  # bytes
    complete: bool = False  # every byte was taken
    error: LauncherError | None = None


def push(
    source: Engine, info: ImageInfo, name: str, engines: Sequence[Engine], on_progress: OnProgress, chunk: int = CHUNK
) -> Mapping[str, int]:
    """Send image `info` of `source` to every engine of `engines` and name it `name` there: bytes sent, by node.

    What is bigger than `chunk` bytes goes in parts of about that size, so that a node needs no room for twice the image
    and resumes after a cut. Parts carry the label PARTIAL; they stay on a node that fails, for the next try, but not if
    its disk is full.
    The image gets its name only when its id was seen on the node. Every node has a second try: after a cut with what it
    lacks then, after refusing an archive without the layers that it should have with the whole one. Raises NodesFailed,
    naming every node that did not get it; the others have it then.
    """
    transfers = run_all([partial(survey, engine, info) for engine in engines])
    _send(source, info, name, transfers, on_progress, chunk)
    retries = run_all_settled([partial(_second_try, transfer, info) for transfer in transfers])
    again = [retry for retry in retries if isinstance(retry, Transfer)]
    _send(source, info, name, again, on_progress, chunk)
    last = {transfer.engine.node: transfer for transfer in (*transfers, *again)}
    errors = [transfer.error for transfer in last.values() if transfer.error is not None]
    if errors:
        raise NodesFailed(errors, of=len(engines))
    sent = Counter[str]()
    for transfer in (*transfers, *again):
        sent[transfer.engine.node] += transfer.sent
    return sent


def survey(engine: Engine, info: ImageInfo) -> Transfer:
    """Which layers of an image this engine has already, through any of its images, if its store can use them."""
    store = image_store(engine)
    if not store.fills_in():
        return Transfer(engine, 0, info.size, whole=True)
    theirs = store.list({})
    known = common(info.layers, [image.layers for image in theirs])
    shared = max((i.size for i in theirs if known and tuple(i.layers) == info.layers[: len(i.layers)]), default=0)
    return Transfer(engine, known, max(0, info.size - shared))


def _second_try(transfer: Transfer, info: ImageInfo) -> Transfer | None:
    """None if there is no need or no hope."""
    if transfer.error is None or isinstance(transfer.error, NoRoom):
        return None
    return Transfer(transfer.engine, 0, info.size, whole=True) if transfer.complete else survey(transfer.engine, info)


def _send(
    source: Engine, info: ImageInfo, name: str, transfers: Sequence[Transfer], on_progress: OnProgress, chunk: int
) -> None:
    """One reading for all that take parts, then one for all that take only the whole image."""
    for size, whole in ((chunk, False), (WHOLE, True)):
        group = [transfer for transfer in transfers if transfer.whole is whole]
        if not group:
            continue
        channels = [Channel(layer_names(info.layers, transfer.known)) for transfer in group]
        receivers = [
            in_background(partial(_receive, transfer, channel, info, name, on_progress))
            for transfer, channel in zip(group, channels, strict=True)
        ]
        read_once(source, info, min(transfer.known for transfer in group), channels, size)
        for receiver in receivers:
            receiver()


def _receive(transfer: Transfer, channel: Channel, info: ImageInfo, name: str, on_progress: OnProgress) -> None:
    """Load what comes, check that it is the same image, and only then give it its name."""
    engine = transfer.engine
    try:
        for archive in channel.archives():
            transfer.complete = False
            pieces = compressed(archive) if is_slow(engine.host) else archive
            image_store(engine).load(_counted(pieces, transfer, on_progress))
        give_name(engine, info, name)
        on_progress(engine.node, transfer.sent, transfer.sent)
    except LauncherError as error:
        transfer.error = error
        if isinstance(error, NoRoom):  # after other failures the next try resumes from the parts
            with contextlib.suppress(LauncherError):  # the first error is the one to report
                _remove_parts(engine, info)
    finally:
        channel.give_up()


def give_name(engine: Engine, info: ImageInfo, name: str) -> None:
    """Name the image if it is really there; its parts are not needed any more."""
    theirs = find_same(engine, info)
    if theirs is None:
        what = f"took the archive of {name} but does not have image {info.id[:19]} now"
        raise ImageShipFailed(engine.node, what, "look at the engine's log on that node, then try again")
    if name != info.id:
        image_store(engine).tag(theirs.id, name)
    _remove_parts(engine, info)


def _remove_parts(engine: Engine, info: ImageInfo) -> None:
    store = image_store(engine)
    for part in store.list({PARTIAL: info.id}):
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
