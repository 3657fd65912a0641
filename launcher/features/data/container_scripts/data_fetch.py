"""Downloads what a URL names into a copy on this node (data_remote has the kinds of stores).

It is the copy of one state of the URL: of the names and sizes of its files, and their digests or ETags in the store. It
grows as any other copy does (data_store), so an interrupted download goes on from its pieces. A file that differs from
the store's own digest is fetched anew, and a state that has changed during the download is discarded.
Python 3.8; the package of the store is imported once the variables of the download are set.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import shutil
import threading
import time
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from launcher.features.data.container_scripts import data_http as http
    from launcher.features.data.container_scripts import data_remote as remote
    from launcher.features.data.container_scripts import data_store as store
    from launcher.features.data.container_scripts import data_tree as tree
    from launcher.features.data.container_scripts.data_remote import Remote
    from launcher.features.data.container_scripts.data_store import FetchError
else:
    import data_http as http
    import data_remote as remote
    import data_store as store
    import data_tree as tree
    from data_remote import Remote
    from data_store import FetchError

T = TypeVar("T")
RANGE = 4 * tree.PIECE  # bytes of a request
REQUESTS = 8  # at the same time; so an interruption costs at most RANGE * REQUESTS bytes
TRIES, PAUSE = 5, 1.0  # of a request; seconds before the second try, twice as many before each further one
FIRST_TRIES = 2  # without any answer, as another machine may reach the store
LONGEST_PAUSE = 120.0  # seconds that a store may ask for (Retry-After)
COUNT_EVERY = 0.5  # seconds between two reports of the number of files
TRANSIENT = (0, 408, 425, 429, 500, 502, 503, 504)  # HTTP statuses; 0: no answer
FINAL = (PermissionError, FileNotFoundError, ImportError, ValueError, TypeError, NotImplementedError)


class Download:
    """The present state of a URL."""

    def __init__(self, order: dict[str, Any], say: Callable[..., None] = lambda **_: None) -> None:
        """say: reports to the launcher. Raises FetchError if a package is missing."""
        self._order, self._url, self._say = order, order["url"], say
        kind = self._url.partition(":")[0]
        os.environ.update({**order["env"], **order["secrets"]})
        try:
            self._store = remote.KINDS.get(kind, remote.RemoteStore)(self._url, self._ask)
        except (ImportError, ValueError) as error:
            needed = remote.PACKAGES.get(kind, "fsspec and its package for such a store")
            raise FetchError("package", f"{kind}:// needs {needed}: {error}") from None
        self._found: dict[str, Remote] = {}
        self._counting = threading.Lock()
        self.unchecked = 0  # files without a checksum of the store

    def listed(self) -> dict[str, Any]:
        """Return what the URL names. Raises FetchError, NoRoomError, RefusedError."""
        self._found = self._asked(self._list, FIRST_TRIES)
        folders = {folder for name in self._found for folder in _folders(name)}
        entries = [tree.DataEntry(os.fsencode(name), tree.FOLDER, 0o755) for name in folders]
        entries += [
            tree.DataEntry(os.fsencode(name), tree.FILE, 0o644, each.size) for name, each in self._found.items()
        ]
        self._entries = sorted(entries)
        self._bytes = sum(entry.size for entry in entries)
        if self._bytes > tree.MOST_BYTES:
            raise store.NoRoomError(f"{store.size_text(self._bytes)} are needed: no disk has so much room")
        tree.check(self._entries)
        return {"files": len(self._entries), "bytes": self._bytes, "state": self._state(), "single": self._single}

    def _state(self) -> str:
        return store.digest(json.dumps([self._url, sorted(self._found.items())]).encode()).hex()

    def _list(self) -> dict[str, Remote]:
        """Return the files by their names in the copy."""
        looked, said = self._store.look(), time.monotonic()
        found: dict[str, Remote] = {}
        most = self._order["most_files"]
        self._single = looked.single
        for count, each in enumerate(looked.files, 1):
            if count > most:
                fix = "name a part of it, pack its files, or raise limits.data_files in your settings file"
                raise FetchError("failed", f"it has more than {most:,} files, or its list does not end: {fix}")
            if time.monotonic() - said > COUNT_EVERY:
                said = time.monotonic()
                self._say(listed=count)
            if each is not None:
                name, file = each
                if file.size < 0:
                    raise FetchError("failed", f"the store gives {name} a size of {file.size} bytes")
                found[name] = file
        if not found:
            raise FileNotFoundError(self._url)
        return found

    def run(self, progress: Any) -> str:
        """Return the content of the copy once it is whole. Raises FetchError, NoRoomError, BusyError, OSError."""
        root, state = Path(self._order["root"]), self._state()
        if not (root / "partial" / state).exists() and store.whole(root, "", state) is None:
            store.require_room(root, self._bytes)  # before anything is made for each of its pieces
        mine = store.opened(root, self._entries, state, "", self._order["about"])
        if isinstance(mine, store.Whole):
            mine.finish(b"")
            return mine.content
        try:
            self._bring(mine, progress)
        except FetchError as error:
            if error.end == "replaced":
                shutil.rmtree(mine.folder)
            raise
        finally:
            mine.remove_if_empty()
        mine.finish(bytes(mine.digests))
        return tree.content(self._entries, mine.digests)

    def _bring(self, mine: store.Partial, progress: Any) -> None:
        mine.require_room()
        progress.total = mine.pieces.bytes
        if self._store.whole:
            self._asked(partial(self._stream, mine, progress))
        else:
            self._fill(mine, progress)
        mine.flush()
        before = self._state()
        self._found = self._asked(self._list)
        if self._state() != before:
            raise remote.replaced()

    def _fill(self, mine: store.Partial, progress: Any) -> None:
        """Fetch the missing pieces in order, with several requests at the same time."""
        pool = ThreadPoolExecutor(REQUESTS)  # not as a context, which would wait for the others after an error
        waiting: deque[tuple[list[tuple[int, int, int, int]], Future[bytes] | None]] = deque()
        checksum, digest = "", None

        def take() -> None:
            nonlocal checksum, digest
            group, fetched = waiting.popleft()
            data, start = fetched.result() if fetched else b"", self._lacking(mine, group)[0]
            progress.received += len(data)
            skipped = 0
            for number, index, offset, size in group:
                name = os.fsdecode(mine.pieces.files[index].path)
                if offset == 0:
                    checksum = self._store.checksum(self._found[name])
                    digest = _digest(checksum, self._found[name].size)
                if mine.has(number):
                    piece = mine.files.read(index, offset, size) if digest else b""
                else:
                    piece = data[offset - start : offset - start + size]
                    mine.put(number, index, offset, piece)
                if digest:
                    digest.update(piece)
                if not 0 <= offset - start < len(data):  # else `_get` has counted it
                    skipped += size
            self._count(progress, skipped)
            if offset + size == mine.pieces.files[index].size:
                self._compare(mine, index, checksum, digest)

        for group in _groups(mine.pieces):
            start, end = self._lacking(mine, group)
            file = self._found[os.fsdecode(mine.pieces.files[group[0][1]].path)]
            get = partial(self._get, progress, file, start, end)
            waiting.append((group, pool.submit(self._asked, get) if start < end else None))
            if len(waiting) == REQUESTS:
                take()
        while waiting:
            take()

    def _get(self, progress: Any, file: Remote, start: int, end: int) -> bytes:
        """Return these bytes. They count as done while they arrive, and no longer if they are asked for again."""
        counted = 0

        def arrived(size: int) -> None:
            nonlocal counted
            counted += size
            self._count(progress, size)

        data = b""
        try:
            data = self._store.get(file, start, end, arrived)
        finally:
            self._count(progress, len(data) - counted)
        return data

    def _count(self, progress: Any, size: int) -> None:
        with self._counting:
            progress.done += size

    def _lacking(self, mine: store.Partial, group: list[tuple[int, int, int, int]]) -> tuple[int, int]:
        """Return the range of the missing pieces of a group."""
        offsets = [(offset, offset + size) for number, _, offset, size in group if not mine.has(number)]
        return (offsets[0][0], offsets[-1][1]) if offsets else (0, 0)

    def _stream(self, mine: store.Partial, progress: Any) -> None:
        """Fetch a file from a server that sends whole files only: from its beginning, whatever is there."""
        ((name, file),) = self._found.items()
        if any(mine.has(number) for number in range(mine.pieces.count)):
            mine.discard(0)
            self._say(note=f"{name}: the server sends whole files only, so it is fetched from its beginning again")
        checksum, data, progress.done = self._store.checksum(file), bytearray(), 0
        digest = _digest(checksum, file.size)
        parts = self._store.stream(file)
        for number, index, offset, size in mine.pieces:
            while len(data) < size:
                part = next(parts)
                data += part
                progress.done += len(part)
            piece = bytes(data[:size])
            del data[:size]
            mine.put(number, index, offset, piece)
            if digest:
                digest.update(piece)
            progress.received += size
        for _ in parts:  # it ends here, or raises an error
            pass
        self._compare(mine, 0, checksum, digest)

    def _compare(self, mine: store.Partial, index: int, checksum: str, digest: Any) -> None:
        """Raises FetchError if a file differs from the store's checksum; what was fetched of it is discarded."""
        name = os.fsdecode(mine.pieces.files[index].path)
        file = self._found[name]
        kind, _, expected = checksum.partition(":")
        if not digest or (digest.hexdigest() != expected and not self._store.is_checksum(file)):
            self.unchecked += 1
        elif digest.hexdigest() != expected:
            mine.discard(index)
            raise FetchError("differs", f"{name} differs from its {kind} in the store; what was fetched is discarded")

    def _ask(self, request: Callable[[], T], *, first: bool = False) -> T:
        return self._asked(request, FIRST_TRIES if first else TRIES)

    def _asked(self, request: Callable[[], T], tries: int = 0) -> T:
        """Return the store's answer to a request, tried again if it is busy or silent. Raises FetchError."""
        number, began = 1, time.monotonic()
        while True:
            try:
                return request()
            except FetchError:
                raise
            except Exception as error:  # noqa: BLE001 - stores raise any error
                status, asked_for = _answer(error)
                final = status not in TRANSIENT or (not status and isinstance(_cause(error), FINAL))
                most = TRIES if status or not tries else tries
                if final or number == most or asked_for > LONGEST_PAUSE:
                    made = self._error(error, status, asked_for)
                    if number > 1:
                        often = f"asked {number} times in {time.monotonic() - began:.0f} s"
                        made = FetchError(made.end, f"{made}; {often}")
                    raise made from None
            time.sleep(max(asked_for, PAUSE * 2 ** (number - 1)))
            number += 1

    def _error(self, error: Exception, status: int, asked_for: float) -> FetchError:
        cause = _cause(error)
        lines = str(getattr(cause, "message", "") or cause).strip().splitlines()
        text = re.sub(r"\?[^\s'\"]*", "", lines[0] if lines else type(cause).__name__)  # queries may sign a request
        if status in (401, 403) or isinstance(cause, PermissionError) or "Credentials" in type(cause).__name__:
            return FetchError("denied", f"the store refuses: {f'{status} ' if status else ''}{text}")
        if status == 404 or isinstance(cause, FileNotFoundError):
            return FetchError("absent", "no such file or folder in the store")
        if asked_for > LONGEST_PAUSE:
            return FetchError("busy", f"the store asks to wait for {asked_for:.0f} s ({status})")
        if status or isinstance(cause, FINAL):
            end = "busy" if status in TRANSIENT else "wrong" if status == 416 else "status"
            return FetchError(end if status else "failed", f"{status} {text}".strip("0 "))
        said = text if isinstance(cause, http.CutError) else f"no answer: {type(cause).__name__}: {text}"
        return FetchError("cut" if self._found else "unreachable", said)


class _Crc32:
    """zlib's checksum as a digest of hashlib."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def _digest(checksum: str, size: int) -> Any:
    """Return what computes such a checksum of a file; None for none."""
    kind = checksum.partition(":")[0]
    if kind == "git":
        return hashlib.sha1(b"blob %d\0" % size)  # noqa: S324 - as git names its blobs
    return _Crc32() if kind == "crc32" else hashlib.new(kind) if kind in ("md5", "sha1", "sha256") else None


def _folders(name: str) -> Iterator[str]:
    while (name := posixpath.dirname(name)).strip("/"):
        yield name


def _groups(pieces: tree.Pieces) -> Iterator[list[tuple[int, int, int, int]]]:
    """Yield pieces as they are requested: consecutive ones of a file."""
    group: list[tuple[int, int, int, int]] = []
    for piece in pieces:
        if group and (piece[1] != group[0][1] or len(group) * tree.PIECE == RANGE):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _answer(error: BaseException | None) -> tuple[int, float]:
    """Return the HTTP status that an error is about, 0 without one, and the seconds that the store asks to wait."""
    while error is not None:
        response, headers = getattr(error, "response", None), getattr(error, "headers", None)
        status = getattr(error, "status", 0)  # of aiohttp
        if isinstance(response, dict):  # of botocore
            about = response.get("ResponseMetadata", {})
            status, headers = about.get("HTTPStatusCode", 0), about.get("HTTPHeaders")
        elif response is not None:  # of huggingface_hub
            status, headers = response.status_code, response.headers
        if status:
            after = str((headers or {}).get("retry-after", ""))
            return status, float(after) if after.isdecimal() else 0.0
        error = error.__cause__ or error.__context__
    return 0, 0.0
