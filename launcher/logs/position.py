"""Places in a growing file on a node, by byte offset."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.node.files import Files

PIECE = 1 << 20
FARTHEST = 64 << 20  # bytes: a file may have a hole of any size


def read_from(files: Files, path: str, offset: int = 0) -> Iterator[bytes]:
    """What the file has from `offset` to its end as it is now, in pieces; nothing where it is missing."""
    try:
        while piece := files.read(path, offset, PIECE):
            yield piece
            if len(piece) < PIECE:  # the end: a file that grows faster than it is read has no other one
                return
            offset += len(piece)
    except FileNotFoundError:
        return


def last_lines(files: Files, path: str, count: int) -> int:
    """The offset from which the file's last `count` lines run (a last line without its end counts)."""
    size = size_of(files, path)
    if count <= 0:
        return size
    end, left = size, count
    while end > max(0, size - FARTHEST):
        start = max(0, end - PIECE)
        piece = _exactly(files, path, start, end - start)
        place = size - 1 - start if end == size else len(piece)  # the end of the last line is not the start of another
        while (place := piece.rfind(b"\n", 0, place)) >= 0:
            left -= 1
            if not left:
                return start + place + 1
        end = start
    return end


def size_of(files: Files, path: str) -> int:
    """The file's size; 0 where it is missing."""
    folder, _, name = path.rpartition("/")
    return next((entry.size for entry in files.scan(folder) if entry.path == name), 0)


def _exactly(files: Files, path: str, offset: int, length: int) -> bytes:
    pieces = []
    while length > 0 and (piece := files.read(path, offset, length)):
        pieces.append(piece)
        offset += len(piece)
        length -= len(piece)
    return b"".join(pieces)
