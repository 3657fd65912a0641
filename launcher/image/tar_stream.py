"""`docker save` archives as streams: read member by member, and passed on without the layers that the other side has.

An engine that loads an archive never opens layers that it has, so they may be missing. Engines from 25 on name a layer
`blobs/sha256/<diff id>`; earlier ones `<v1 id>/layer.tar`, where the v1 id of every layer but the last follows from the
diff ids alone (moby 20.10, image/v1/imagev1.go CreateID, image/tarexport/save.go saveImage). A layer that is not
recognised is passed on: more bytes, never a wrong image.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

BLOCK = 512
_ZERO = b"\0" * BLOCK
# The v1 configuration of a layer that is not the last one: Go's zero container.Config, in the order of its fields.
_V1_CONFIG = (
    '{"container_config":{"Hostname":"","Domainname":"","User":"","AttachStdin":false,"AttachStdout":false,'
    '"AttachStderr":false,"Tty":false,"OpenStdin":false,"StdinOnce":false,"Env":null,"Cmd":null,"Image":"",'
    '"Volumes":null,"WorkingDir":"","Entrypoint":null,"OnBuild":null,"Labels":null},'
    '"created":"1970-01-01T00:00:00Z","layer_id":%s%s}'
)


class TruncatedError(ValueError):
    """The archive ended in the middle of something."""


@dataclass(frozen=True)
class Member:
    """One member as it passes: `head` is its raw header with everything that belongs to it, `body` must be consumed."""

    name: str
    size: int  # of the content; `body` adds the padding
    head: bytes
    body: Iterator[bytes]
    archive: int = 0  # which of the archives in the stream it is of


def members(pieces: Iterable[bytes]) -> Iterator[Member]:
    """The members of a stream of tar archives, one after another, in order. A body that was not consumed is skipped.

    Raises TruncatedError.
    """
    source = _Source(pieces)
    head, name, size, number = b"", "", None, 0
    while True:
        block = source.exactly(BLOCK)
        if block == _ZERO:
            while block == _ZERO:
                if source.ended():
                    return
                block = source.exactly(BLOCK)
            number += 1
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.TarError as error:
            raise TruncatedError(f"not a tar header: {error}") from error
        head += block
        if info.type in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE):
            extra = source.exactly(_padded(info.size))
            head += extra
            if info.type == tarfile.GNUTYPE_LONGNAME:
                name = extra[: info.size].rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif info.type == tarfile.XHDTYPE:
                records = _pax(extra[: info.size])
                name = records.get("path", name)
                size = int(records["size"]) if "size" in records else size
            continue
        content = (info.size if size is None else size) if info.isreg() else 0
        body = source.stream(_padded(content))
        yield Member((name or info.name).removeprefix("./"), content, head, body, number)
        for _ in body:
            pass
        head, name, size = b"", "", None


def end() -> bytes:
    """The blocks that close a tar archive."""
    return _ZERO * 2


def layer_names(layers: Sequence[str], known: int) -> frozenset[str]:
    """Names of the members that may be left out for a store that has the first `known` of these layers (diff ids).

    A layer that is repeated further up stays: older engines write it once and link to it.
    """
    again = set(layers[known:])
    names = set()
    for layer, v1 in zip(layers[:known], v1_ids(layers[:-1]), strict=False):
        if layer not in again:
            names.add(f"{v1}/layer.tar")
    names.update(f"blobs/sha256/{layer.partition(':')[2]}" for layer in layers[:known] if layer not in again)
    return frozenset(names)


def v1_ids(layers: Sequence[str]) -> list[str]:
    """Folder names that engines before 25 give to these layers, none of which is an image's last one."""
    chain, parent, ids = "", "", []
    for layer in layers:
        chain = layer if not chain else "sha256:" + hashlib.sha256(f"{chain} {layer}".encode()).hexdigest()
        with_parent = f',"parent":{json.dumps(parent)}' if parent else ""
        config = _V1_CONFIG % (json.dumps(chain), with_parent)
        parent = "sha256:" + hashlib.sha256(config.encode()).hexdigest()
        ids.append(parent.partition(":")[2])
    return ids


def common(layers: Sequence[str], others: Iterable[Sequence[str]]) -> int:
    """How many of `layers`, from the base up, one of the other images shares."""
    pairs = (takewhile(lambda pair: pair[0] == pair[1], zip(layers, other, strict=False)) for other in others)
    return max((len(list(same)) for same in pairs), default=0)


class _Source:
    """Pieces of any size, read as exact amounts."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")

    def ended(self) -> bool:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return True
            self._rest = memoryview(piece)
        return False

    def stream(self, size: int) -> Iterator[bytes]:
        """`size` bytes in pieces, not joined."""
        while size:
            if self.ended():
                raise TruncatedError("the archive ends in the middle of a member")
            part, self._rest = self._rest[:size], self._rest[size:]
            size -= len(part)
            yield bytes(part)

    def exactly(self, size: int) -> bytes:
        return b"".join(self.stream(size))


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _pax(data: bytes) -> dict[str, str]:
    """The records of a pax header: `LENGTH KEY=VALUE\\n`, LENGTH counting the whole record."""
    records = {}
    while data:
        digits, _, _ = data.partition(b" ")
        record, data = data[: int(digits)], data[int(digits) :]
        key, _, value = record[len(digits) + 1 : -1].partition(b"=")
        records[key.decode()] = value.decode("utf-8", "surrogateescape")
    return records
