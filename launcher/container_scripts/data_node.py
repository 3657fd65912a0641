"""One node's part in copying a data set: it reads its source, keeps and passes on what comes, or verifies a copy.

The launcher starts this on every node that takes part (launcher/data/worker.py), in a container of the job's image or,
on its own machine, by itself. stdin: a line of JSON that says what to do, a second one with the neighbour to send to;
its end is the end of this process. stdout: lines of JSON, a report at least every REPORT seconds, the last of them
with the key `end`. Pieces travel from node to node in their order; each node passes one on when it has it.
Python 3.8 without packages.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.container_scripts import data_store as store
    from launcher.container_scripts import data_tree as tree
    from launcher.container_scripts import data_wire as wire
else:
    import data_store as store
    import data_tree as tree
    import data_wire as wire

REPORT = 0.5
MOST_ENTRIES = 50_000_000
SLACK = 64 << 20  # bytes that stay free on a disk
_NUMBER = struct.Struct(">I")
_out = threading.Lock()


class ChangedError(Exception):
    """The source is not what it was when its files were listed; the text names the file."""


def tell(**said: Any) -> None:
    with _out:
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


class Progress:
    """Tells the launcher how far this is, and that it is alive."""

    def __init__(self) -> None:
        self.done = self.total = self.received = 0
        self.down: wire.Link | None = None
        threading.Thread(target=self._tell, daemon=True).start()

    def told(self) -> dict[str, int]:
        sent = self.down.sent if self.down else 0
        return {"done": self.done, "total": self.total, "received": self.received, "sent": sent}

    def _tell(self) -> None:
        over = threading.Event()
        while not over.wait(REPORT):
            with contextlib.suppress(BrokenPipeError):
                tell(**self.told())


def missing(link: wire.Link, count: int) -> bytearray:
    """Which pieces the nodes behind this link lack: a byte each. Raises LostError, RefusedError."""
    found = bytearray()
    while True:
        kind, data = link.receive(wire.NEED, wire.ALL_NEED)
        found += data
        if kind == wire.ALL_NEED:
            if len(found) != count:
                raise tree.RefusedError("the node that is downstream counts other pieces than there are")
            return found


def ask(link: wire.Link, wanted: bytearray) -> None:
    for start in range(0, len(wanted), wire.LONGEST):
        link.send(wire.NEED, bytes(wanted[start : start + wire.LONGEST]))
    link.send(wire.ALL_NEED)


def send_digests(link: wire.Link, kind: int, digests: bytes | bytearray) -> None:
    step = tree.PIECE
    for start in range(0, len(digests), step):
        link.send(kind, bytes(digests[start : start + step]))


class Source:
    """The node that has the data. Its hashes are kept by path, size, mtime and inode."""

    def __init__(self, order: dict[str, Any], progress: Progress) -> None:
        self._root, self._progress = os.fsencode(order["path"]), progress
        self._label = order["label"]
        self._kept = Path(order["root"]) / "hashes" / store.digest(self._label.encode("utf-8", "surrogateescape")).hex()
        self.entries = tree.walk(self._root)
        self.pieces = tree.Pieces(self.entries)
        self.digests = self._known()
        self._files = store.Files(self._top(), self.pieces)
        progress.total = self.pieces.bytes

    def _top(self) -> bytes:
        """The folder that the entries' paths begin in."""
        return self._root if os.path.isdir(self._root) else os.path.dirname(os.path.realpath(self._root))

    def _known(self) -> bytearray:
        digests = bytearray(self.pieces.count * tree.DIGEST)
        with contextlib.suppress(OSError, tree.RefusedError):
            entries, kept = tree.unpack(self._kept.read_bytes())
            older = tree.Pieces(entries)
            places = {(e.path, e.size, e.mtime, e.inode): s for e, s in zip(older.files, older.starts)}
            for entry, start in zip(self.pieces.files, self.pieces.starts):
                was = places.get((entry.path, entry.size, entry.mtime, entry.inode))
                for number in range(entry.pieces if was is not None else 0):
                    store.put(digests, start + number, store.at(kept, (was or 0) + number))
        return digests

    def keep(self) -> None:
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        store.save(self._kept, tree.pack(self.entries, bytes(self.digests)))

    def signature(self) -> str:
        return tree.signature(self._label, self.entries)

    def send(self, link: wire.Link) -> str:
        """Everything that the nodes behind the link lack; the content's name. Raises ChangedError, LostError, ..."""
        for start in range(0, len(self.entries), tree.BATCH):
            rows = tree.rows(self.entries[start : start + tree.BATCH])
            link.send(wire.LIST, json.dumps(rows).encode())
        send_digests(link, wire.KNOWN, self.digests)
        link.send(wire.START)
        wanted = missing(link, self.pieces.count)
        try:
            for number, place, offset, size in self.pieces:
                if wanted[number] or store.at(self.digests, number) == tree.UNKNOWN:
                    data = self._read(number, place, offset, size)
                    if wanted[number]:
                        zeros = tree.is_zero(data)
                        link.send(wire.ZEROS if zeros else wire.DATA, _NUMBER.pack(number) + (b"" if zeros else data))
                self._progress.done += size
            if tree.walk(self._root) != self.entries:
                raise ChangedError(self._difference())
        finally:
            self.keep()
        send_digests(link, wire.DIGESTS, self.digests)
        link.send(wire.END)
        link.receive(wire.DONE)
        return tree.content(self.entries, self.digests)

    def _read(self, number: int, place: int, offset: int, size: int) -> bytes:
        entry, name = self.pieces.files[place], tree.shown(self.pieces.files[place].path)
        try:
            data = self._files.read(place, offset, size)
            now = self._files.status(place)
        except FileNotFoundError:
            raise ChangedError(f"{name} was removed while the data was sent") from None
        if (now.st_size, now.st_mtime_ns % (1 << 63)) != (entry.size, entry.mtime) or not stat.S_ISREG(now.st_mode):
            raise ChangedError(f"{name} was changed while the data was sent")
        found, known = store.digest(data), store.at(self.digests, number)
        if known not in (tree.UNKNOWN, found):
            store.put(self.digests, number, found)
            raise ChangedError(f"{name} was changed, and has its old size and time")
        store.put(self.digests, number, found)
        return data

    def _difference(self) -> str:
        changed = sorted({*tree.walk(self._root)} ^ {*self.entries})
        return f"{tree.shown(changed[0].path) if changed else 'a file'} was changed while the data was sent"


class Sink:
    """A node that gets a copy, and passes the data on."""

    def __init__(self, order: dict[str, Any], progress: Progress) -> None:
        self._root, self._order, self._progress = Path(order["root"]), order, progress
        self._down: wire.Link | None = None

    def run(self, up: wire.Link, down: wire.Link | None) -> str:
        """The copy's content, "" where pieces are missing. Raises LostError, RefusedError, OSError."""
        self._down = self._progress.down = down
        entries, known = self._listing(up)
        pieces, signature = tree.Pieces(entries), tree.signature(self._order["label"], entries)
        if len(known) != pieces.count * tree.DIGEST:
            raise tree.RefusedError("the node that is upstream sent another number of hashes than of pieces")
        complete = all(store.at(known, number) != tree.UNKNOWN for number in range(pieces.count))
        found = store.whole(self._root, tree.content(entries, known) if complete else "", signature)
        mine: store.Partial | store.Whole
        if found:
            mine = store.Whole(found, pieces)
        else:
            mine = store.Partial(self._root, signature, entries, self._order["about"])
            mine.adopt(known)
            self._check_room(mine)
        self._pass_on(up, pieces, mine)
        return self._end(up, entries, mine)

    def _listing(self, up: wire.Link) -> tuple[list[tree.Entry], bytearray]:
        entries: list[tree.Entry] = []
        known = bytearray()
        while True:
            kind, data = up.receive(wire.LIST, wire.KNOWN, wire.START)
            if kind == wire.LIST and not known and len(entries) < MOST_ENTRIES:
                entries += tree.entries_of(_parsed(data))
            elif kind == wire.KNOWN and len(known) < tree.Pieces(entries).count * tree.DIGEST:
                known += data
            elif kind == wire.START:
                tree.check(entries)
                self._forward(kind, data)
                return entries, known
            else:
                raise tree.RefusedError("the node that is upstream sends a list without an end")
            self._forward(kind, data)

    def _forward(self, kind: int, data: bytes) -> None:
        if self._down:
            self._down.send(kind, data)

    def _check_room(self, partial: store.Partial) -> None:
        needed, free = partial.missing_bytes() + SLACK, partial.free_bytes()
        if needed > free:
            raise NoRoomError(f"has {free >> 20:,} MiB free, and the copy needs {needed >> 20:,} MiB")

    def _pass_on(self, up: wire.Link, pieces: tree.Pieces, mine: store.Partial | store.Whole) -> None:
        """Every piece once, in its order: from upstream where this node or one behind it lacks it, else from here."""
        behind = missing(self._down, pieces.count) if self._down else bytearray(pieces.count)
        lacking = bytearray(not mine.has(number) for number in range(pieces.count))
        ask(up, lacking)
        self._progress.total = pieces.bytes
        for number, place, offset, size in pieces:
            if lacking[number]:
                data = self._receive(up, number, size)
                mine.put(number, place, offset, data)
            elif behind[number]:
                data = mine.files.read(place, offset, size)
                if store.digest(data) != mine.digest(number):
                    raise tree.RefusedError(f"{tree.shown(pieces.files[place].path)} is damaged in its copy here")
            if behind[number]:
                zeros = tree.is_zero(data)
                self._forward(wire.ZEROS if zeros else wire.DATA, _NUMBER.pack(number) + (b"" if zeros else data))
            self._progress.done += size

    def _receive(self, up: wire.Link, number: int, size: int) -> bytes:
        kind, data = up.receive(wire.DATA, wire.ZEROS)
        if kind == wire.ZEROS:
            data += bytes(size)
        self._progress.received += len(data) if kind == wire.DATA else 0
        if data[: _NUMBER.size] != _NUMBER.pack(number) or len(data) != _NUMBER.size + size:
            raise tree.RefusedError("the node that is upstream sent another piece than is next")
        return data[_NUMBER.size :]

    def _end(self, up: wire.Link, entries: list[tree.Entry], mine: store.Partial | store.Whole) -> str:
        digests = bytearray()
        while True:
            kind, data = up.receive(wire.DIGESTS, wire.END)
            self._forward(kind, data)
            digests += data
            if kind == wire.END:
                break
        if len(digests) != tree.Pieces(entries).count * tree.DIGEST:
            raise tree.RefusedError("the node that is upstream sent another number of hashes than of pieces")
        up.send(wire.DONE)
        if self._down:
            self._down.receive(wire.DONE)
        content = tree.content(entries, digests)
        return content if mine.finish(bytes(digests)) == 0 else ""


class NoRoomError(Exception):
    """This node's disk has no room for the data."""


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise tree.RefusedError("the list of files is not as we write it") from None


def verify(order: dict[str, Any]) -> None:
    """Read a copy to its end. A damaged one is partial from then on."""
    root = Path(order["root"])
    folder = root / "copies" / order["content"]
    damaged = list(store.damages(folder))
    if damaged:
        store.demote(root, folder, {number for _, numbers in damaged for number in numbers})
    tell(end="verified", damaged=[name for name, _ in damaged])


def copy(order: dict[str, Any], progress: Progress) -> None:
    config, up = {**order["tls"], "private": order["root"]}, None
    Path(order["root"]).mkdir(parents=True, exist_ok=True)
    if order["role"] == "source":
        source = Source(order, progress)
        tell(files=len(source.entries), bytes=source.pieces.bytes)
        following = json.loads(sys.stdin.readline())
        watch_stdin()
        progress.down = wire.dial(following["addresses"], wire.context(config, server=False), following["name"])
        content = source.send(progress.down)
    else:
        listener = wire.listen()
        tell(port=listener.getsockname()[1])
        following = json.loads(sys.stdin.readline())
        watch_stdin()
        down = None
        if following:
            down = wire.dial(following["addresses"], wire.context(config, server=False), following["name"])
        up = wire.accept(listener, wire.context(config, server=True), order["upstream"])
        content = Sink(order, progress).run(up, down)
    for link in filter(None, (up, progress.down)):
        link.close()
    tell(**progress.told())
    tell(end="whole" if content else "again", content=content)


def watch_stdin() -> None:
    def watch() -> None:
        while sys.stdin.buffer.read(1):
            pass
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    order = json.loads(sys.stdin.readline())
    progress = Progress()
    try:
        verify(order) if order["role"] == "verify" else copy(order, progress)
    except wire.LostError as error:
        tell(**progress.told())
        tell(end="lost", where=error.where, why=str(error))
    except NoRoomError as error:
        tell(end="room", why=str(error))
    except ChangedError as error:
        tell(**progress.told())
        tell(end="changed", why=str(error))
    except tree.RefusedError as error:
        tell(end="refused", why=str(error))
    except OSError as error:
        name = error.filename.decode("utf-8", "replace") if isinstance(error.filename, bytes) else error.filename
        tell(end="failed", why=f"{error.strerror or error}{f': {name}' if name else ''}")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
