"""Downloads what a URL names into a copy on this node, with fsspec and its package for this kind of store.

It is the copy of one state of the URL: of the names and sizes of its files, and their digests or ETags in the store. It
grows as any other copy does (data_store), so an interrupted download goes on from its pieces. A file that differs from
the store's own digest is fetched anew, and a state that has changed during the download is discarded.
Python 3.8 with fsspec, which is imported once the variables of the download are set.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
import posixpath
import re
import shutil
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from launcher.features.data.container_scripts import data_store as store
    from launcher.features.data.container_scripts import data_tree as tree
else:
    import data_store as store
    import data_tree as tree

T = TypeVar("T")
RANGE = 4 * tree.PIECE  # bytes of a request
REQUESTS = 8  # at the same time; so an interruption costs at most RANGE * REQUESTS bytes
TRIES, PAUSE = 5, 1.0  # of a request; seconds before the second try, twice as many before each further one
LONGEST_PAUSE = 120.0  # seconds that a store may ask for (Retry-After)
CONNECT, SILENCE = 10.0, 30.0  # seconds to connect, and without an answer
TRANSIENT = (0, 408, 425, 429, 500, 502, 503, 504)  # HTTP statuses; 0: no answer
FINAL = (PermissionError, FileNotFoundError, ImportError, ValueError, TypeError, NotImplementedError)
PACKAGES = {"s3": "s3fs", "http": "fsspec and aiohttp", "https": "fsspec and aiohttp", "hf": "huggingface_hub"}


class FetchError(Exception):
    """end: `package`, `unreachable`, `denied`, `replaced` or `failed`. The message is shown to the user."""

    def __init__(self, end: str, why: str) -> None:
        super().__init__(why)
        self.end = end


class Remote(NamedTuple):
    """A file in the store. mark: its digest or ETag there, as `md5:...`, or when it was written."""

    path: str
    size: int
    mark: str


class Download:
    """The present state of a URL."""

    def __init__(self, order: dict[str, Any]) -> None:
        """Raises FetchError if a package is missing."""
        self._order, self._url = order, order["url"]
        self._kind = self._url.partition(":")[0]
        os.environ.update({**order["env"], **order["secrets"]})
        try:
            core, options = _library("fsspec.core"), _options(self._kind)
            self._files, self._path = core.url_to_fs(
                self._url, use_listings_cache=False, skip_instance_cache=True, **options
            )
        except (ImportError, ValueError) as error:
            needed = PACKAGES.get(self._kind, "fsspec and its package for such a store")
            raise FetchError("package", f"{self._kind}:// needs {needed}: {error}") from None
        if hasattr(self._files, "retries"):
            self._files.retries = 1  # of s3fs, beside ours
        self._web = self._kind in ("http", "https")

    def listed(self) -> dict[str, Any]:
        """Return what the URL names. Raises FetchError, RefusedError."""
        self._found = self._asked(self._list, tries=2)
        folders = {folder for name in self._found for folder in _folders(name)}
        entries = [tree.DataEntry(os.fsencode(name), tree.FOLDER, 0o755) for name in folders]
        entries += [
            tree.DataEntry(os.fsencode(name), tree.FILE, 0o644, each.size) for name, each in self._found.items()
        ]
        self._entries = sorted(entries)
        tree.check(self._entries)
        size = tree.Pieces(self._entries).bytes
        return {"files": len(self._entries), "bytes": size, "state": self._state(), "single": self._single}

    def _state(self) -> str:
        return store.digest(json.dumps([self._url, sorted(self._found.items())]).encode()).hex()

    def _list(self) -> dict[str, Remote]:
        """Return the files by their names in the copy."""
        self._files.invalidate_cache()
        info = {"type": "directory"} if self._url.endswith("/") else self._files.info(self._path)
        folder = info["type"] == "directory"
        if folder and self._web:
            raise FetchError("failed", "HTTP has no list of a folder: give the URL of a file")
        path = unquote(urlsplit(self._url).path) if self._web else self._path
        self._single = "" if folder else posixpath.basename(path)
        infos = self._files.find(self._path, detail=True) if folder else {self._path: info}
        found = {}
        for path, info in infos.items():
            if info.get("size") is None:
                raise FetchError("failed", "the server does not tell its size: download it yourself, and give its path")
            if not path.endswith("/"):  # else it stands for a folder
                name = self._single or path[len(self._path.rstrip("/")) + 1 :]
                found[name] = Remote(path, int(info["size"]), _mark(info, self._kind))
        if not found:
            raise FileNotFoundError(self._url)
        return found

    def run(self, progress: Any) -> str:
        """Return the content of the copy once it is whole. Raises FetchError, NoRoomError, BusyError, OSError."""
        about = self._order["about"]
        mine = store.opened(Path(self._order["root"]), self._entries, self._state(), "", about)
        if isinstance(mine, store.Whole):
            mine.finish(b"")
            return mine.content
        mine.require_room()
        progress.total = mine.pieces.bytes
        self._fill(mine, progress)
        mine.flush()
        before = self._state()
        self._found = self._asked(self._list)
        if self._state() != before:
            shutil.rmtree(mine.folder)
            raise FetchError("replaced", "it was changed during the download, which is discarded")
        mine.finish(bytes(mine.digests))
        return tree.content(self._entries, mine.digests)

    def _fill(self, mine: store.Partial, progress: Any) -> None:
        """Fetch the missing pieces in order, with several requests at the same time."""
        pool = ThreadPoolExecutor(REQUESTS)  # not as a context, which would wait for the others after an error
        waiting: deque[tuple[list[tuple[int, int, int, int]], Future[bytes] | None]] = deque()
        digest: Any = None

        def take() -> None:
            nonlocal digest
            group, fetched = waiting.popleft()
            data, start = fetched.result() if fetched else b"", self._lacking(mine, group)[0]
            progress.received += len(data)
            for number, index, offset, size in group:
                name = os.fsdecode(mine.pieces.files[index].path)
                if offset == 0:
                    digest = _digest(self._found[name])
                if mine.has(number):
                    piece = mine.files.read(index, offset, size) if digest else b""
                else:
                    piece = data[offset - start : offset - start + size]
                    mine.put(number, index, offset, piece)
                if digest:
                    digest.update(piece)
                progress.done += size
            if offset + size == mine.pieces.files[index].size and digest:
                self._compare(mine, index, digest.hexdigest())

        for group in _groups(mine.pieces):
            start, end = self._lacking(mine, group)
            get = partial(self._get, self._found[os.fsdecode(mine.pieces.files[group[0][1]].path)], start, end)
            waiting.append((group, pool.submit(self._asked, get) if start < end else None))
            if len(waiting) == REQUESTS:
                take()
        while waiting:
            take()

    def _lacking(self, mine: store.Partial, group: list[tuple[int, int, int, int]]) -> tuple[int, int]:
        """Return the range of the missing pieces of a group."""
        offsets = [(offset, offset + size) for number, _, offset, size in group if not mine.has(number)]
        return (offsets[0][0], offsets[-1][1]) if offsets else (0, 0)

    def _get(self, remote: Remote, start: int, end: int) -> bytes:
        data: bytes
        if self._files.async_impl and not self._web:
            data = self._files.cat_file(remote.path, start=start, end=end)
        else:  # cat_file() would read ahead, or the whole answer of a web server that knows no ranges
            known = {"size": remote.size} if self._web else {}
            with self._files.open(remote.path, "rb", cache_type="none", **known) as file:
                file.seek(start)
                data = file.read(end - start)
        if len(data) != end - start:
            raise OSError(f"sent {len(data)} bytes of {end - start}")
        return data

    def _compare(self, mine: store.Partial, index: int, found: str) -> None:
        """Raises FetchError if a file differs from the store's digest; its pieces are then fetched again."""
        name = os.fsdecode(mine.pieces.files[index].path)
        remote = self._found[name]
        kind, _, expected = remote.mark.partition(":")
        if found == expected or (self._kind == "s3" and not self._has_md5(remote.path)):
            return
        first = mine.pieces.starts[index]
        for number in range(first, first + mine.pieces.files[index].pieces):
            mine.lose(number)
        raise FetchError("failed", f"{name} differs from its {kind} in the store; what was fetched of it is discarded")

    def _has_md5(self, path: str) -> bool:
        """Whether the ETag of an object is its MD5: not if it is encrypted with a key of its own."""
        bucket, key, _ = self._files.split_path(path)
        head = self._asked(lambda: self._files.call_s3("head_object", Bucket=bucket, Key=key))
        return not head.get("SSECustomerAlgorithm") and "kms" not in head.get("ServerSideEncryption", "")

    def _asked(self, request: Callable[[], T], tries: int | None = None) -> T:
        """Return the store's answer to a request, tried again if it is busy or silent. Raises FetchError."""
        number = 1
        while True:
            try:
                return request()
            except FetchError:
                raise
            except Exception as error:  # noqa: BLE001 - stores raise any error
                status, asked_for = _answer(error)
                final = status not in TRANSIENT or (not status and isinstance(_cause(error), FINAL))
                if final or number == (tries or TRIES) or asked_for > LONGEST_PAUSE:
                    raise self._error(error, status, asked_for) from None
            time.sleep(max(asked_for, PAUSE * 2 ** (number - 1)))
            number += 1

    def _error(self, error: Exception, status: int, asked_for: float) -> FetchError:
        cause = _cause(error)
        lines = str(getattr(cause, "message", "") or cause).strip().splitlines()
        text = re.sub(r"\?[^\s'\"]*", "", lines[0] if lines else type(cause).__name__)  # queries may sign a request
        for value in self._order["secrets"].values():
            text = text.replace(value, "***") if len(value) >= 4 else text
        if status in (401, 403) or isinstance(cause, PermissionError) or "Credentials" in type(cause).__name__:
            return FetchError("denied", f"the store refuses: {f'{status} ' if status else ''}{text}")
        if status == 404 or isinstance(cause, FileNotFoundError):
            return FetchError("failed", "no such file or folder in the store")
        if asked_for > LONGEST_PAUSE:
            return FetchError("failed", f"the store asks to wait for {asked_for:.0f} s ({status})")
        if self._web and "range requests" in text:
            why = "the server sends whole files only, so that a download could not be resumed"
            return FetchError("failed", f"{why}: download it yourself, and give its path")
        if status or isinstance(cause, FINAL):
            return FetchError("failed", f"{status} {text}".strip("0 "))
        return FetchError("unreachable", f"no answer: {type(cause).__name__}: {text}")


def _library(name: str) -> Any:
    """Import a package of the download, which may read its variables while it is imported. Raises ImportError."""
    return importlib.import_module(name)


def _options(kind: str) -> dict[str, Any]:
    """Return time limits, as a kind of store takes them; our retries are enough."""
    if kind == "s3":
        limits = {"connect_timeout": CONNECT, "read_timeout": SILENCE, "retries": {"max_attempts": 0}}
        return {"config_kwargs": limits}
    if kind in ("http", "https"):
        timeout = _library("aiohttp").ClientTimeout(None, sock_connect=CONNECT, sock_read=SILENCE)
        return {"client_kwargs": {"trust_env": True, "timeout": timeout, "headers": {"Accept-Encoding": "identity"}}}
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", f"{SILENCE:.0f}")
    return {}


def _mark(info: dict[str, Any], kind: str) -> str:
    """Return a file's digest, or what changes when it is written: its ETag, its time."""
    if info.get("lfs"):
        return f"sha256:{info['lfs']['sha256']}"
    if info.get("blob_id"):
        return f"git:{info['blob_id']}"
    md5 = str(info.get("md5Hash") or info.get("Content-MD5") or "")
    if re.fullmatch("[A-Za-z0-9+/]{22}==", md5):
        return f"md5:{base64.b64decode(md5).hex()}"
    etag = str(info.get("ETag") or info.get("etag") or "").strip('"')
    if kind == "s3" and re.fullmatch("[0-9a-f]{32}", etag):  # uploaded in one part
        return f"md5:{etag}"
    written = next((info[key] for key in ("Last-Modified", "LastModified", "updated", "mtime") if info.get(key)), "")
    return f"etag:{etag}" if etag else f"time:{written}"


def _digest(remote: Remote) -> Any:
    kind = remote.mark.partition(":")[0]
    if kind == "git":
        return hashlib.sha1(b"blob %d\0" % remote.size)  # noqa: S324 - as git names its blobs
    return hashlib.new(kind) if kind in ("md5", "sha256") else None


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
