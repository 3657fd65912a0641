"""How fast bytes go to a node, remembered from the last time, and compression for links where it pays."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from launcher.image import cache

SLOW = 12.5e6  # bytes/s, a 100 Mb/s link: one core compresses some 80 MB/s to less than half
MEMORY = 86400.0  # seconds for which a measured link is believed
ENOUGH = 8 << 20  # bytes below which a measurement says nothing
_GZIP = 31  # zlib's window bits for a gzip stream, which `docker load` recognises by itself


def is_slow(host: str) -> bool:
    """Whether the last image went to this host so slowly that compressing the next one pays."""
    known = cache.get("link", cache.key(host), MEMORY)
    return known is not None and float(known["rate"]) < SLOW


def remember(host: str, sent: int, seconds: float) -> None:
    """What was seen: bytes on the wire, and how long they took."""
    if sent >= ENOUGH and seconds > 0:
        cache.put("link", cache.key(host), {"rate": sent / seconds})


def compressed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same as a gzip stream, at the fastest level: what an image has to give, it gives there."""
    squeeze = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
    for piece in pieces:
        if less := squeeze.compress(piece):
            yield less
    yield squeeze.flush()
