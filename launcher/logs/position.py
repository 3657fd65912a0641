"""Places in a growing file on a node, by byte offset."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.node.files import Files

PIECE = 1 << 20


def read_from(files: Files, path: str, offset: int = 0) -> Iterator[bytes]:
    """What the file has from `offset` to its end as it is now, in pieces; nothing where it is missing."""
    try:
        while piece := files.read(path, offset, PIECE):
            yield piece
            offset += len(piece)
    except FileNotFoundError:
        return


def last_lines(files: Files, path: str, count: int) -> int:
    """The offset from which the file's last `count` lines run (a last line without its end counts)."""
    size = size_of(files, path)
    if count <= 0:
        return size
    end, newlines = size, 0
    while end > 0:
        start = max(0, end - PIECE)
        piece = _exactly(files, path, start, end - start)
        for place in range(len(piece) - 1, -1, -1):
            if piece[place] == 0x0A and start + place != size - 1:
                newlines += 1
                if newlines == count:
                    return start + place + 1
        end = start
    return 0


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
