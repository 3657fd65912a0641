"""The files of a store that a URL names: a web server, S3, the Hugging Face Hub, or another one that fsspec knows.

Each kind lists its files, with a digest or ETag if it has one, and gives exactly the bytes that are asked for, or an
error. Python 3.8; all but web servers need fsspec and its package for this kind of store.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import posixpath
import re
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from launcher.features.data.container_scripts import data_http as http
    from launcher.features.data.container_scripts.data_store import FetchError

    Arrived = Callable[[int], None]  # with a number of bytes
else:
    import data_http as http
    from data_store import FetchError

CONNECT, SILENCE = 10.0, 30.0  # seconds to connect, and without an answer
PACKAGES = {"s3": "s3fs", "hf": "huggingface_hub"}
EMPTY_PAGE = 1000  # files that an empty page of a list counts as: a list of such pages must end, too
_CONTENT_RANGE = re.compile(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20})")


def replaced() -> FetchError:
    return FetchError("replaced", "it was changed during the download, which is discarded")


def wrong(what: object) -> FetchError:
    end = "redirected" if isinstance(what, http.RedirectError) else "wrong"
    return FetchError(end, f"the server's answer is wrong: {what}")


class Remote(NamedTuple):
    """A file in the store. mark: its digest or ETag there, as `md5:...`, or when it was written."""

    path: str
    size: int
    mark: str


class RemoteFiles(NamedTuple):
    """What a URL names. single: the file's name, "" for a folder. files: by their names in the copy.

    A page of a list that has no file yields None, so that its reader can count it.
    """

    single: str
    files: Iterator[tuple[str, Remote] | None]


def _library(name: str) -> Any:
    """Import what only one kind of store needs. Raises ImportError."""
    return importlib.import_module(name)


class RemoteStore:
    """One that fsspec knows. whole: it sends whole files only.

    ask: sends a request, again if the store is busy or silent. first: fewer times, as another machine may reach it.
    """

    whole = False

    def __init__(self, url: str, ask: Any, **options: Any) -> None:
        """Raises ImportError without its package, ValueError."""
        self._url, self._ask = url, ask
        core = _library("fsspec.core")
        self._files, self._path = core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)

    def look(self) -> RemoteFiles:
        self._files.invalidate_cache()
        info = {"type": "directory"} if self._url.endswith("/") else self._files.info(self._path)
        if info["type"] == "directory":
            return RemoteFiles("", self._folder())
        name = posixpath.basename(self._path)
        return RemoteFiles(name, iter([(name, self._remote(self._path, info))]))

    def _folder(self) -> Iterator[tuple[str, Remote] | None]:
        for path, info in self._files.find(self._path, detail=True).items():
            if not path.endswith("/"):  # else it stands for a folder
                yield self._name(path), self._remote(path, info)

    def _name(self, path: str) -> str:
        return path[len(self._path.rstrip("/")) + 1 :]

    def _remote(self, path: str, info: dict[str, Any]) -> Remote:
        if info.get("size") is None:
            raise FetchError("wrong", "the store does not tell its size")
        return Remote(path, int(info["size"]), self._mark(info))

    def _mark(self, info: dict[str, Any]) -> str:
        """Return a file's digest, or what changes when it is written: its ETag, its time."""
        if md5 := http.decoded(str(info.get("md5Hash") or info.get("Content-MD5") or ""), 16):
            return f"md5:{md5}"
        etag = str(info.get("ETag") or info.get("etag") or "").strip('"')
        names = ("Last-Modified", "LastModified", "updated", "mtime")
        return f"etag:{etag}" if etag else f"time:{next((info[name] for name in names if info.get(name)), '')}"

    def checksum(self, remote: Remote) -> str:
        """Return what the store says of a file's bytes, as `md5:...`; "" if it says nothing."""
        return "" if remote.mark.startswith(("etag:", "time:")) else remote.mark

    def is_checksum(self, remote: Remote) -> bool:  # noqa: ARG002
        """Whether this checksum is one, which a file that differs from it may call into question."""
        return True

    def get(self, remote: Remote, start: int, end: int, arrived: Arrived) -> bytes:  # noqa: ARG002
        """arrived: called with the size of each part, if known. Raises FetchError, and any error of its package."""
        if self._files.async_impl:
            data: bytes = self._files.cat_file(remote.path, start=start, end=end)
        else:  # cat_file() would read ahead
            with self._files.open(remote.path, "rb", cache_type="none") as file:
                file.seek(start)
                data = file.read(end - start)
        if len(data) != end - start:
            raise http.CutError(f"sent {len(data)} bytes of {end - start}")
        return data

    def stream(self, remote: Remote) -> Iterator[bytes]:
        """Yield a whole file."""
        raise NotImplementedError


class WebStore(RemoteStore):
    def __init__(self, url: str, ask: Any) -> None:
        self._url, self._ask = url, ask
        try:
            given = http.options(os.environ)
        except (ValueError, TypeError, AttributeError) as error:
            raise FetchError("failed", f"FSSPEC_HTTP or FSSPEC_HTTPS cannot be used: {error}") from None
        self._web = http.Web(given, CONNECT, SILENCE)

    def look(self) -> RemoteFiles:
        path = unquote(urlsplit(self._url).path)
        if path.endswith("/") or not path:
            raise FetchError("failed", "HTTP has no list of a folder: give the URL of a file")
        try:
            self._file = self._web.look(self._url)
        except http.WrongError as error:
            raise wrong(error) from None
        self.whole = not self._file.ranges
        etag, name = self._file.etag.strip('"'), posixpath.basename(path)
        mark = self._file.digest or (f"etag:{etag}" if etag else f"time:{self._file.modified}")
        return RemoteFiles(name, iter([(name, Remote(self._url, self._file.size, mark))]))

    def get(self, remote: Remote, start: int, end: int, arrived: Arrived) -> bytes:  # noqa: ARG002 - it is the only one
        return _whole(self._web.read(self._file, start, end), arrived)

    def stream(self, remote: Remote) -> Iterator[bytes]:
        return _checked(self._web.read(self._file, 0, remote.size))


def _whole(data: Iterator[bytes], arrived: Arrived) -> bytes:
    found = bytearray()
    for part in _checked(data):
        found += part
        arrived(len(part))
    return bytes(found)


def _checked(data: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from data
    except http.WrongError as error:
        raise wrong(error) from None
    except http.ReplacedError:
        raise replaced() from None


class S3Store(RemoteStore):
    def __init__(self, url: str, ask: Any) -> None:
        limits = {"connect_timeout": CONNECT, "read_timeout": SILENCE, "retries": {"max_attempts": 0}}
        super().__init__(url, ask, config_kwargs=limits)
        self._files.retries = 1  # beside ours

    def _folder(self) -> Iterator[tuple[str, Remote] | None]:
        """List in pages, which s3fs would collect without a limit."""
        bucket, key, _ = self._files.split_path(self._path.rstrip("/"))
        wanted = {"Bucket": bucket, "Prefix": f"{key}/" if key else ""}
        while True:
            page = self._ask(lambda: self._files.call_s3("list_objects_v2", **wanted), first=len(wanted) == 2)
            for each in page.get("Contents", ()):
                path = f"{bucket}/{each['Key']}"
                if path.endswith("/"):
                    yield None
                else:
                    yield self._name(path), self._remote(path, {**each, "size": each["Size"]})
            if not page.get("IsTruncated"):
                return
            if not page.get("Contents"):
                yield from [None] * EMPTY_PAGE
            wanted["ContinuationToken"] = page["NextContinuationToken"]

    def _mark(self, info: dict[str, Any]) -> str:
        etag = str(info.get("ETag") or "").strip('"')
        return f"md5:{etag}" if re.fullmatch("[0-9a-f]{32}", etag) else super()._mark(info)  # it has one part

    def checksum(self, remote: Remote) -> str:
        if found := super().checksum(remote):
            return found
        head = self._head(remote)
        for kind, name, size in (("sha256", "SHA256", 32), ("sha1", "SHA1", 20), ("crc32", "CRC32", 4)):
            if value := http.decoded(str(head.get(f"Checksum{name}") or ""), size):  # of several parts, it ends with -N
                return f"{kind}:{value}"
        return ""

    def is_checksum(self, remote: Remote) -> bool:
        """An ETag is no MD5 if the object is encrypted with a key of its own."""
        head = self._head(remote)
        return not head.get("SSECustomerAlgorithm") and "kms" not in head.get("ServerSideEncryption", "")

    def _head(self, remote: Remote) -> dict[str, Any]:
        bucket, key, _ = self._files.split_path(remote.path)
        wanted = {"Bucket": bucket, "Key": key, "ChecksumMode": "ENABLED"}
        head: dict[str, Any] = self._ask(lambda: self._files.call_s3("head_object", **wanted))
        return head

    def get(self, remote: Remote, start: int, end: int, arrived: Arrived) -> bytes:
        data: bytes = _library("fsspec.asyn").sync(self._files.loop, self._part, remote, start, end, arrived)
        return data

    async def _part(self, remote: Remote, start: int, end: int, arrived: Arrived) -> bytes:
        bucket, key, version = self._files.split_path(remote.path)
        wanted = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{end - 1}"}
        if version:
            wanted["VersionId"] = version
        answer = await self._files._call_s3("get_object", **wanted)  # noqa: SLF001 - it reads the body nowhere else
        try:
            etag = str(answer.get("ETag") or "").strip('"')
            if etag and remote.mark.startswith(("etag:", "md5:")) and remote.mark.partition(":")[2] != etag:
                raise replaced()
            sent = str(answer.get("ContentRange") or "")
            found = _CONTENT_RANGE.fullmatch(sent)
            if not found or tuple(map(int, found.groups())) != (start, end - 1, remote.size):
                raise wrong(f"asked for the bytes {start}-{end - 1} of {remote.size}, it sends {sent or 'no range'}")
            return await _exactly(answer["Body"], end - start, arrived)
        finally:
            answer["Body"].close()


async def _exactly(body: Any, size: int, arrived: Arrived) -> bytes:
    """Return the body of an answer. Raises FetchError if it is longer, OSError if it is shorter or too slow."""
    data, mark, since = bytearray(), 0, time.monotonic()
    while len(data) <= size:
        more = await asyncio.wait_for(body.read(size + 1 - len(data)), SILENCE)
        if not more:
            break
        data += more
        arrived(len(more))
        if time.monotonic() - since >= SILENCE:
            if len(data) - mark < http.LEAST:
                raise OSError(f"less than {http.LEAST >> 10} KiB in {SILENCE:.0f} s")
            mark, since = len(data), time.monotonic()
    if len(data) > size:
        raise wrong(f"asked for {size} bytes, it sends more")
    if len(data) < size:
        raise http.CutError(f"sent {len(data)} bytes of {size}")
    return bytes(data)


class HubStore(RemoteStore):
    """The files are listed by its package, and read by ours, which checks what it gets."""

    def __init__(self, url: str, ask: Any) -> None:
        os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", f"{SILENCE:.0f}")
        super().__init__(url, ask)
        self._hub = _library("huggingface_hub")
        self._web = http.Web(http.Options({}, {}, True), CONNECT, SILENCE)
        with contextlib.suppress(ImportError):
            if not os.environ.get("SSL_CERT_FILE"):
                self._web.trust(_library("certifi").where())  # as its package does

    def _folder(self) -> Iterator[tuple[str, Remote] | None]:
        at = self._files.resolve_path(self._path)
        if not hasattr(at, "repo_id"):  # a bucket
            yield from super()._folder()
            return
        api = self._hub.HfApi(endpoint=self._files.endpoint, token=self._files.token)
        base = f"{at.path_in_repo}/" if at.path_in_repo else ""
        where = {"path_in_repo": at.path_in_repo or None, "revision": at.revision, "repo_type": at.repo_type}
        for each in api.list_repo_tree(at.repo_id, recursive=True, **where):
            if hasattr(each, "blob_id"):
                name, lfs = each.path[len(base) :], each.lfs and {"sha256": each.lfs.sha256}
                info = {"size": each.size, "blob_id": each.blob_id, "lfs": lfs}
                yield name, self._remote(f"{self._path.rstrip('/')}/{name}", info)
            else:
                yield None

    def _mark(self, info: dict[str, Any]) -> str:
        if info.get("lfs"):
            return f"sha256:{info['lfs']['sha256']}"
        return f"git:{info['blob_id']}" if info.get("blob_id") else super()._mark(info)

    def get(self, remote: Remote, start: int, end: int, arrived: Arrived) -> bytes:
        at = self._files.resolve_path(remote.path)
        if not hasattr(at, "repo_id"):
            return super().get(remote, start, end, arrived)
        of = {"repo_type": at.repo_type, "revision": at.revision, "endpoint": self._files.endpoint}
        url = self._hub.hf_hub_url(at.repo_id, at.path_in_repo, **of)
        headers = self._hub.utils.build_hf_headers(token=self._files.token)
        file = http.WebFile(url, remote.size, True, "", "", "")
        return _whole(self._web.read(file, start, end, headers), arrived)


KINDS = {"http": WebStore, "https": WebStore, "s3": S3Store, "hf": HubStore}
