"""One node's part in copying a data set: reads the source, stores and forwards received data, verifies a copy, or
downloads one (data_fetch).

The launcher starts this on every node of a transfer (worker.py), in a container of the job's image, or
without one on its own machine. stdin: a line of JSON with the order, a second one with the neighbour to send to; this
process exits at the end of stdin. stdout: lines of JSON, a report at least every REPORT seconds; the last one has the
key `end`. Pieces are sent from node to node in order; each node forwards a piece when it has received it.
Python 3.8 without packages.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import queue
import stat
import struct
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.features.data.container_scripts import data_store as store
    from launcher.features.data.container_scripts import data_tree as tree
    from launcher.features.data.container_scripts import data_wire as wire
else:
    import data_store as store
    import data_tree as tree
    import data_wire as wire

REPORT = 0.5
MOST_ENTRIES = 50_000_000
_NUMBER = struct.Struct(">I")
SILENCE = 30.0  # seconds without a line of the launcher, which sends one every few seconds (worker.py)
_lines: queue.Queue[str] = queue.Queue()  # of stdin, after the order
_hidden: list[str] = []  # what no message may contain
_out = threading.Lock()


class ChangedError(Exception):
    """The source has changed since its files were listed; the message names the file."""


def report(**message: Any) -> None:
    for key in {"why", "note"} & message.keys():
        for value in _hidden:
            message[key] = message[key].replace(value, "***")
    with _out:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


class AgainError(Exception):
    """A piece that this node had is damaged and now missing; another try sends it. The message names the file."""


class Heartbeat:
    """Reports progress to the launcher, also as a sign of life."""

    def __init__(self) -> None:
        self.done = self.total = self.received = 0
        self.down: wire.Link | None = None
        threading.Thread(target=self._report, daemon=True).start()

    def counts(self) -> dict[str, int]:
        sent = self.down.sent if self.down else 0
        return {"done": self.done, "total": self.total, "received": self.received, "sent": sent}

    def _report(self) -> None:
        never = threading.Event()
        while not never.wait(REPORT):
            with contextlib.suppress(BrokenPipeError):
                report(**self.counts())


def missing(link: wire.Link, count: int) -> bytearray:
    """Return which pieces the nodes behind this link lack, one byte each. Raises LostError, RefusedError."""
    found = bytearray()
    while True:
        kind, data = link.receive(wire.NEED, wire.ALL_NEED)
        found += data
        if kind == wire.ALL_NEED:
            if len(found) != count:
                raise tree.RefusedError("the downstream node requested a wrong number of pieces")
            return found


def request(link: wire.Link, wanted: bytearray) -> None:
    for start in range(0, len(wanted), wire.LONGEST):
        link.send(wire.NEED, bytes(wanted[start : start + wire.LONGEST]))
    link.send(wire.ALL_NEED)


def send_digests(link: wire.Link, kind: int, digests: bytes | bytearray) -> None:
    step = tree.PIECE
    for start in range(0, len(digests), step):
        link.send(kind, bytes(digests[start : start + step]))


class DataHolder:
    """The node with the data. It caches hashes by path, size, mtime, ctime and inode."""

    def __init__(self, order: dict[str, Any], progress: Heartbeat) -> None:
        self._root, self._progress = os.fsencode(order["path"]), progress
        self._label = order["label"]
        self._kept = Path(order["root"]) / "hashes" / store.digest(self._label.encode("utf-8", "surrogateescape")).hex()
        self.entries = tree.walk(self._root)
        self.pieces = tree.Pieces(self.entries)
        self._require_readable()
        if order.get("content"):
            self.digests = self._digests_of_copy(Path(order["root"]) / "copies" / order["content"])
        else:
            self.digests = bytearray(self.pieces.count * tree.DIGEST) if order.get("rehash") else self._known()
        self._files = store.StoredFiles(self._top(), self.pieces)
        progress.total = self.pieces.bytes

    def _top(self) -> bytes:
        """Return the folder to which the paths of the entries are relative."""
        return self._root if os.path.isdir(self._root) else os.path.dirname(os.path.realpath(self._root))

    def _require_readable(self) -> None:
        """Raises PermissionError before the first byte is sent."""
        for entry in self.pieces.files:
            path = os.path.join(self._top(), entry.path)
            if not os.access(path, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def _digests_of_copy(self, folder: Path) -> bytearray:
        """Return the hashes of a copy that is the source itself. Raises RefusedError if its files were changed."""
        _, digests = tree.unpack((folder / "manifest").read_bytes())
        if tree.content(self.entries, digests) != folder.name:
            raise tree.RefusedError(f"its copy {folder.name[:12]} was changed; to repair it: launcher data verify")
        return digests

    def _known(self) -> bytearray:
        digests = bytearray(self.pieces.count * tree.DIGEST)
        with contextlib.suppress(OSError, tree.RefusedError):
            entries, kept = tree.unpack(self._kept.read_bytes())
            older = tree.Pieces(entries)
            old_starts = {entry._replace(mode=0): start for entry, start in zip(older.files, older.starts)}
            for entry, start in zip(self.pieces.files, self.pieces.starts):
                was = old_starts.get(entry._replace(mode=0))
                for number in range(entry.pieces if was is not None else 0):
                    store.put(digests, start + number, store.at(kept, (was or 0) + number))
        return digests

    def keep(self) -> None:
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        store.save(self._kept, tree.pack(self.entries, bytes(self.digests)))

    def signature(self) -> str:
        return tree.signature(self._label, self.entries)

    def send(self, link: wire.Link) -> str:
        """Send what the nodes behind the link lack; return the content's name. Raises ChangedError, LostError, ..."""
        for start in range(0, len(self.entries), tree.BATCH):
            rows = tree.rows(self.entries[start : start + tree.BATCH])
            link.send(wire.LIST, json.dumps(rows).encode())
        send_digests(link, wire.KNOWN, self.digests)
        link.send(wire.START)
        wanted = missing(link, self.pieces.count)
        try:
            for number, index, offset, size in self.pieces:
                if wanted[number] or store.at(self.digests, number) == tree.UNKNOWN:
                    data = self._read(number, index, offset, size)
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

    def _read(self, number: int, index: int, offset: int, size: int) -> bytes:
        entry, name = self.pieces.files[index], tree.shown(self.pieces.files[index].path)
        try:
            data = self._files.read(index, offset, size)
            now = self._files.status(index)
        except FileNotFoundError:
            raise ChangedError(f"{name} was removed during the transfer") from None
        if (now.st_size, now.st_mtime_ns % (1 << 63)) != (entry.size, entry.mtime) or not stat.S_ISREG(now.st_mode):
            raise ChangedError(f"{name} was modified during the transfer")
        found, known = store.digest(data), store.at(self.digests, number)
        if known not in (tree.UNKNOWN, found):
            store.put(self.digests, number, found)
            raise ChangedError(f"{name} was modified without a change of its size or mtime")
        store.put(self.digests, number, found)
        return data

    def _difference(self) -> str:
        changed = sorted({*tree.walk(self._root)} ^ {*self.entries})
        return f"{tree.shown(changed[0].path) if changed else 'a file'} was modified during the transfer"


class Sink:
    """A node that stores a copy and forwards the data."""

    def __init__(self, order: dict[str, Any], progress: Heartbeat) -> None:
        self._root, self._order, self._progress = Path(order["root"]), order, progress
        self._down: wire.Link | None = None

    def run(self, up: wire.Link, down: wire.Link | None) -> str:
        """Return the copy's content, "" if pieces are missing. Raises LostError, RefusedError, OSError."""
        self._down = self._progress.down = down
        entries, known = self._listing(up)
        pieces = tree.Pieces(entries)
        signature = self._order.get("state") or tree.signature(self._order["label"], entries)
        if len(known) != pieces.count * tree.DIGEST:
            raise tree.RefusedError("the upstream node sent a wrong number of hashes")
        complete = all(store.at(known, number) != tree.UNKNOWN for number in range(pieces.count))
        content = tree.content(entries, known) if complete else ""
        mine = store.opened(self._root, entries, signature, content, self._order["about"])
        self._forward(wire.START, b"")  # only now: two transfers get their locks in the order of the nodes
        if isinstance(mine, store.Partial):
            mine.adopt(known)
            mine.require_room()
        self._relay(up, pieces, mine)
        return self._end(up, entries, mine)

    def _listing(self, up: wire.Link) -> tuple[list[tree.DataEntry], bytearray]:
        entries: list[tree.DataEntry] = []
        known = bytearray()
        while True:
            kind, data = up.receive(wire.LIST, wire.KNOWN, wire.START)
            if kind == wire.LIST and not known and len(entries) < MOST_ENTRIES:
                entries += tree.entries_of(_parsed(data))
            elif kind == wire.KNOWN and len(known) < tree.Pieces(entries).count * tree.DIGEST:
                known += data
            elif kind == wire.START:
                tree.check(entries)
                return entries, known
            else:
                raise tree.RefusedError("the upstream node sent an oversized or invalid list of files")
            self._forward(kind, data)

    def _forward(self, kind: int, data: bytes) -> None:
        if self._down:
            self._down.send(kind, data)

    def _relay(self, up: wire.Link, pieces: tree.Pieces, mine: store.Partial | store.Whole) -> None:
        """Process each piece in order: receive it if this node lacks it, forward it if a node downstream lacks it."""
        downstream = missing(self._down, pieces.count) if self._down else bytearray(pieces.count)
        lacking = bytearray(not mine.has(number) for number in range(pieces.count))
        request(up, lacking)
        self._progress.total = pieces.bytes
        for number, index, offset, size in pieces:
            if lacking[number]:
                data = self._receive(up, number, size)
                mine.put(number, index, offset, data)
            elif downstream[number]:
                try:
                    data = mine.files.read(index, offset, size)
                except OSError:
                    data = b""
                if store.digest(data) != mine.digest(number):
                    mine.lose(number)
                    raise AgainError(f"{tree.shown(pieces.files[index].path)} is damaged on this node")
            if downstream[number]:
                zeros = tree.is_zero(data)
                self._forward(wire.ZEROS if zeros else wire.DATA, _NUMBER.pack(number) + (b"" if zeros else data))
            self._progress.done += size

    def _receive(self, up: wire.Link, number: int, size: int) -> bytes:
        kind, data = up.receive(wire.DATA, wire.ZEROS)
        if kind == wire.ZEROS:
            data += bytes(size)
        self._progress.received += len(data) if kind == wire.DATA else 0
        if data[: _NUMBER.size] != _NUMBER.pack(number) or len(data) != _NUMBER.size + size:
            raise tree.RefusedError("the upstream node sent a piece out of order or with a wrong size")
        return data[_NUMBER.size :]

    def _end(self, up: wire.Link, entries: list[tree.DataEntry], mine: store.Partial | store.Whole) -> str:
        digests = bytearray()
        while True:
            kind, data = up.receive(wire.DIGESTS, wire.END)
            self._forward(kind, data)
            digests += data
            if kind == wire.END:
                break
        if len(digests) != tree.Pieces(entries).count * tree.DIGEST:
            raise tree.RefusedError("the upstream node sent a wrong number of hashes")
        up.send(wire.DONE)
        if self._down:
            self._down.receive(wire.DONE)
        content = tree.content(entries, digests)
        return content if mine.finish(bytes(digests)) == 0 else ""


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise tree.RefusedError("the list of files is invalid") from None


def download(order: dict[str, Any], progress: Heartbeat) -> None:
    """Say what the URL names; download it once a second line of stdin has come."""
    found = importlib.import_module("data_fetch").Download(order, report)  # which other processes do not need
    report(**found.listed())
    _lines.get()
    content = found.run(progress)
    report(**progress.counts())
    report(end="whole", content=content, unchecked=found.unchecked)


def verify(order: dict[str, Any], _: Heartbeat) -> None:
    """Read a whole copy. A damaged copy becomes a partial one."""
    folder = Path(order["root"]) / "copies" / order["content"]
    damaged = store.damages(folder)
    if damaged:
        store.demote(folder, {number for _, numbers in damaged for number in numbers})
    report(end="verified", damaged=[name for name, _ in damaged])


def copy(order: dict[str, Any], progress: Heartbeat) -> None:
    config, up = {**order["tls"], "private": order["root"]}, None
    if order["role"] == "source":
        source = DataHolder(order, progress)
        report(files=len(source.entries), bytes=source.pieces.bytes)
        following = json.loads(_lines.get())
        progress.down = wire.dial(following["addresses"], wire.context(config, server=False), following["name"])
        content = source.send(progress.down)
    else:
        listener = wire.listen()
        report(port=listener.getsockname()[1])
        following = json.loads(_lines.get())
        down = None
        if following:
            down = wire.dial(following["addresses"], wire.context(config, server=False), following["name"])
        up = wire.accept(listener, wire.context(config, server=True), order["upstream"])
        content = Sink(order, progress).run(up, down)
    for link in filter(None, (up, progress.down)):
        link.close()
    report(**progress.counts())
    report(end="whole" if content else "again", content=content)


def make_private(root: str) -> None:
    """Make this user's folder of copies, which nobody else may enter, also if an earlier version let them."""
    os.umask(0o077)
    Path(root).mkdir(parents=True, exist_ok=True)
    found = os.stat(root)
    if found.st_mode & 0o077 and found.st_uid == os.geteuid():
        os.chmod(root, 0o700)


def watch_stdin() -> None:
    """Pass on the further lines. At the end of stdin, and if the launcher is silent, this process ends at once."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(3)

    def watch() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (line := lines.get(timeout=SILENCE)).strip():  # else it is a sign of life
                    _lines.put(line)
        with contextlib.suppress(BrokenPipeError):
            report(end="silent", why=f"heard nothing from the launcher for {SILENCE:.0f} s")
        os._exit(3)

    threading.Thread(target=read, daemon=True).start()
    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    order = json.loads(sys.stdin.readline())
    watch_stdin()
    _hidden.extend(order.get("hidden", ()))
    progress = Heartbeat()
    try:
        make_private(order["root"])
        {"verify": verify, "fetch": download}.get(order["role"], copy)(order, progress)
    except wire.LostError as error:
        report(**progress.counts())
        report(end="lost", where=error.where, why=str(error))
    except store.FetchError as error:
        report(**progress.counts())
        report(end=error.end, why=str(error))
    except (AgainError, store.BusyError) as error:
        report(**progress.counts())
        report(end="again", why=str(error))
    except store.NoRoomError as error:
        report(end="room", why=str(error))
    except ChangedError as error:
        report(**progress.counts())
        report(end="changed", why=str(error))
    except tree.RefusedError as error:
        report(end="refused", why=str(error))
    except MemoryError:
        report(end="failed", why="memory ran out: the data has too many files for this machine")
    except OSError as error:
        name = error.filename.decode("utf-8", "replace") if isinstance(error.filename, bytes) else error.filename
        name = str(name or "")
        if order["role"] == "source" and name.startswith(order["path"]):  # which the user knows by another path
            name = order["label"] + name[len(order["path"]) :]
        report(end="failed", why=f"{error.strerror or error}{f': {name}' if name else ''}")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
