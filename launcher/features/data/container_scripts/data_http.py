"""Reads ranges of a file from a web server, and believes nothing that the server says about them.

An answer has to be the range that was asked for, of the file that was looked at, neither compressed nor longer: not one
byte more is read. Credentials are sent to the URL's own server, and to no other one that it redirects to.
Python 3.8 without packages.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote, urlencode, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CONNECT = 10.0  # seconds to connect
SILENCE, LEAST = 30.0, 16 << 10  # seconds in which an answer has to begin, or so many bytes of it to arrive
REDIRECTS = 10
BUFFER = 1 << 18
_CONTENT_RANGE = re.compile(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20}|\*)", re.IGNORECASE)
_OF_READING = {"block_size", "cache_type", "cache_options", "size_policy", "simple_links", "same_scheme", "encoded"}
_SHA256 = re.compile('"?([0-9a-f]{64})"?')


class WrongError(Exception):
    """The server's answer is not what was asked for. The message is shown to the user."""


class RedirectError(WrongError):
    """It leads to no file."""


class CutError(ConnectionError):
    """A part of an answer, and then the end. The message is shown to the user."""


class ReplacedError(Exception):
    """The file is no longer the one that was looked at."""


class StatusError(Exception):
    """An answer that is no success. headers: by lower-case name."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str]) -> None:
        super().__init__(reason)
        self.status, self.headers = status, headers


class WebFile(NamedTuple):
    """A file on a web server. ranges: whether it sends parts. digest: `md5:...`, "" if the server tells none."""

    url: str
    size: int
    ranges: bool
    etag: str
    modified: str
    digest: str


class Options(NamedTuple):
    """What FSSPEC_HTTP and FSSPEC_HTTPS set, as fsspec's file system for these servers has it."""

    headers: dict[str, str]
    params: dict[str, str]
    verify: bool


def options(environ: Mapping[str, str]) -> Options:
    """Raises ValueError for one that would have no effect."""
    found: dict[str, Any] = {}
    for name in ("FSSPEC_HTTP", "FSSPEC_HTTPS"):
        given = json.loads(environ.get(name) or "{}")
        if not isinstance(given, dict):
            raise ValueError(f"{name} is no JSON object")  # noqa: TRY004 - as for one that is no JSON
        found.update(given)
    client = found.pop("client_kwargs", {})
    headers = {**client.pop("headers", {}), **found.pop("headers", {})}
    if cookies := found.pop("cookies", {}):
        headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
    made = Options(headers, found.pop("params", {}), found.pop("ssl", True) is not False)
    if unknown := {*found, *client} - _OF_READING - {"trust_env", "timeout"}:
        known = "headers, cookies, params and ssl"
        raise ValueError(f"FSSPEC_HTTP and FSSPEC_HTTPS may have {known}, not {min(unknown)}")
    return made


class Web:
    """A client of web servers. May be used by several threads; each keeps its connections."""

    def __init__(self, given: Options, connect: float = CONNECT, silence: float = SILENCE) -> None:
        self._given, self._connect, self._silence = given, connect, silence
        self._context = ssl.create_default_context()
        if not given.verify:
            self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
        self._kept = threading.local()
        self._running: set[_WebAnswer] = set()
        threading.Thread(target=self._watch, daemon=True).start()

    def trust(self, authorities: str) -> None:
        """Trust the certificates of a file, beside those of the system."""
        self._context.load_verify_locations(authorities)

    def look(self, url: str) -> WebFile:
        """Return what a URL names now. Raises WrongError, StatusError, OSError."""
        try:
            with self._answer("GET", url, {"Range": "bytes=0-0"}, {}) as answer:
                answer.require_plain()
                size, ranges = answer.total()
                digest = answer.digest(whole=not ranges)
                etag, modified = answer.get("ETag"), answer.get("Last-Modified")
        except StatusError as error:
            sent = error.headers.get("content-range", "")
            if error.status != 416 or sent not in ("bytes */0", "") or (not sent and not self._is_empty(url)):
                raise
            return WebFile(url, 0, True, "", "", "")
        if ranges and not digest:  # a part may have a checksum of its own
            digest = self._checksum(url, size, etag)
        return WebFile(url, size, ranges, etag, modified, digest)

    def _is_empty(self, url: str) -> bool:
        with contextlib.suppress(StatusError, OSError, WrongError), self._answer("HEAD", url, {}, {}) as answer:
            return answer.get("Content-Length") == "0"
        return False

    def _checksum(self, url: str, size: int, etag: str) -> str:
        """Return what the server says of a whole file; "" also if it refuses to say something without its bytes."""
        asked = {"X-Amz-Checksum-Mode": "ENABLED"}
        with contextlib.suppress(StatusError, OSError, WrongError), self._answer("HEAD", url, asked, {}) as answer:
            if answer.get("ETag") == etag and answer.get("Content-Length") == str(size):
                return answer.digest(whole=True)
        return ""

    def read(self, file: WebFile, start: int, end: int, headers: Mapping[str, str] | None = None) -> Iterator[bytes]:
        """Yield exactly these bytes. headers: for the URL's own server.

        Raises WrongError, ReplacedError, StatusError; OSError if the server is silent or the connection is lost.
        """
        part = {"Range": f"bytes={start}-{end - 1}"} if file.ranges else {}
        with self._answer("GET", file.url, part, headers or {}) as answer:
            answer.require_plain()
            answer.require_same(file)
            answer.require_range(start, end, file)
            yield from answer.bytes(end - start)

    @contextlib.contextmanager
    def _answer(
        self, method: str, url: str, part: Mapping[str, str], headers: Mapping[str, str]
    ) -> Iterator[_WebAnswer]:
        """Follow redirects to an answer that is a success. headers: for the URL's own server. part: for every one."""
        own, more = _origin(url), urlencode(self._given.params)
        at = _plain(f"{url}{'&' if '?' in url else '?'}{more}" if more else url)
        linked: dict[str, str] = {}
        for _ in range(REDIRECTS):
            private = {**self._given.headers, **headers} if _origin(at) == own else {}
            named = {name.title(): value for name, value in {"User-Agent": "launcher", **private}.items()}
            answer = self._asked(method, at, {**named, **part, "Accept-Encoding": "identity"})
            if answer.status in (301, 302, 303, 307, 308) and answer.get("Location"):
                linked = linked or answer.linked()
                answer.skip()
                answer.close()
                at = _plain(urljoin(at, answer.get("Location")))
                continue
            answer.headers.update(linked)
            try:
                if not 200 <= answer.status < 300:
                    raise StatusError(answer.status, answer.reason, answer.headers)
                yield answer
            finally:
                answer.close()
            return
        raise RedirectError(f"it redirects more than {REDIRECTS} times")

    def _asked(self, method: str, url: str, headers: Mapping[str, str]) -> _WebAnswer:
        """Send a request; a kept connection that its server has closed meanwhile is opened again."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RedirectError(f"it redirects to {parts.scheme}://, which is no web server")
        kept = self._kept.__dict__.setdefault("connections", {})
        connection = kept.pop(_origin(url), None)
        if connection is not None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self._sent(connection, method, url, headers)
        return self._sent(self._connected(url), method, url, headers)

    def _sent(
        self, connection: http.client.HTTPConnection, method: str, url: str, headers: Mapping[str, str]
    ) -> _WebAnswer:
        answer = _WebAnswer(connection, method, self, self._silence)
        self._running.add(answer)
        try:
            parts = urlsplit(url)
            path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
            extra: Mapping[str, str] = getattr(connection, "of_proxy", {})
            target = f"{parts.scheme}://{parts.netloc}{path}" if hasattr(connection, "of_proxy") else path
            connection.request(method, target, headers={**headers, **extra})
            answer.begin(_origin(url))
        except BaseException:
            answer.close()
            raise
        return answer

    def _connected(self, url: str) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        host, secure = str(parts.hostname), parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        proxy = getproxies().get(parts.scheme, "")
        through = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else None
        if through is None or not through.hostname or proxy_bypass(f"{host}:{port}"):
            through = None
        elif through.scheme not in ("http", "https"):
            raise WrongError(f"the proxy of {parts.scheme}_proxy is none of HTTP: {through.scheme}://")
        place = (str(through.hostname), through.port or 80) if through else (host, port)
        login = {}
        if through and through.username:
            given = f"{unquote(through.username)}:{unquote(through.password or '')}"
            login = {"Proxy-Authorization": f"Basic {base64.b64encode(given.encode()).decode()}"}
        connection: http.client.HTTPConnection
        if secure:
            connection = http.client.HTTPSConnection(*place, timeout=self._connect, context=self._context)
            if through:
                connection.set_tunnel(host, port, login)
        else:
            connection = http.client.HTTPConnection(*place, timeout=self._connect)
            if through:
                connection.of_proxy = login  # type: ignore[attr-defined]
        connection.connect()
        connection.sock.settimeout(self._silence)
        return connection

    def keep(self, origin: tuple[str, str, int], connection: http.client.HTTPConnection) -> None:
        self._kept.__dict__.setdefault("connections", {})[origin] = connection

    def ended(self, answer: _WebAnswer) -> None:
        self._running.discard(answer)

    def _watch(self) -> None:
        never = threading.Event()
        while not never.wait(min(1.0, self._silence / 4)):
            now = time.monotonic()
            for answer in [*self._running]:
                answer.check(now)


class _WebAnswer:
    """A request and its answer. It is ended by `check` if too little arrives."""

    def __init__(self, connection: http.client.HTTPConnection, method: str, web: Web, silence: float) -> None:
        self._connection, self._method, self._web, self._silence = connection, method, web, silence
        self._received, self._mark, self._since, self._late = 0, 0, time.monotonic(), False
        self._socket = connection.sock
        self.status, self.reason = 0, ""
        self.headers: dict[str, str] = {}

    def begin(self, origin: tuple[str, str, int]) -> None:
        self._origin = origin
        try:
            self._response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None
        if self._late:  # its end would be that of the headers
            raise self._lost(EOFError())
        self._mark, self._since = 0, time.monotonic()
        self.status, self.reason = self._response.status, self._response.reason
        self.headers = {name.lower(): value for name, value in reversed(self._response.getheaders())}

    def get(self, name: str) -> str:
        return self.headers.get(name.lower(), "")

    def check(self, now: float) -> None:
        """End it if fewer than LEAST bytes have come for so long."""
        if now - self._since < self._silence:
            return
        if self._received - self._mark < LEAST:
            self._late = True
            with contextlib.suppress(OSError):
                socket.socket.shutdown(
                    self._socket, socket.SHUT_RDWR
                )  # wakes what reads from it; ssl's own forgets its keys
        self._mark, self._since = self._received, now

    def _lost(self, error: Exception) -> OSError:
        if self._late:
            return TimeoutError(f"less than {LEAST >> 10} KiB in {self._silence:.0f} s")
        return error if isinstance(error, OSError) else ConnectionError(f"{type(error).__name__}: {error}")

    def skip(self) -> None:
        """Read a short body that nobody needs, so that the connection can be used again."""
        length = self.get("Content-Length")
        if self._method != "HEAD" and re.fullmatch("[0-9]{1,5}", length):
            with contextlib.suppress(OSError, WrongError):
                b"".join(self.bytes(int(length)))

    def linked(self) -> dict[str, str]:
        """Return what the Hugging Face Hub says of a file when it redirects to its store."""
        return {name: self.headers[name] for name in ("x-linked-etag", "x-linked-size") if name in self.headers}

    def require_plain(self) -> None:
        """Raises WrongError if the body is not the file's bytes."""
        coding = self.get("Content-Encoding") or "identity"
        if coding.lower() != "identity":
            raise WrongError(f"it sends the file compressed ({coding}), although it was asked for its bytes")
        if (transfer := self.get("Transfer-Encoding") or "identity").lower() not in ("chunked", "identity"):
            raise WrongError(f"it sends the file in an unknown way: Transfer-Encoding {transfer}")

    def total(self) -> tuple[int, bool]:
        """Return the file's size, from the answer to a request for its first byte, and whether this is that byte."""
        if self.status == 206:
            found = _CONTENT_RANGE.fullmatch(self.get("Content-Range"))
            if not found or found.group(1, 2) != ("0", "0") or found[3] == "*":
                raise WrongError(f"asked for its first byte, it sends {self._range()}")
            b"".join(self.bytes(1))
            return int(found[3]), True
        if self.status != 200:
            raise WrongError(f"it answers with the status {self.status}")
        length = self.get("Content-Length")
        if not re.fullmatch("[0-9]{1,20}", length):
            raise WrongError("it does not tell the file's size")
        return int(length), length == "0"

    def _range(self) -> str:
        return (
            f"the range {self.get('Content-Range')!r}" if self.get("Content-Range") else "a range that it does not name"
        )

    def require_same(self, file: WebFile) -> None:
        """Raises ReplacedError."""
        for before, now in ((file.etag, self.get("ETag")), (file.modified, self.get("Last-Modified"))):
            if before and now:
                if before != now:
                    raise ReplacedError
                return

    def require_range(self, start: int, end: int, file: WebFile) -> None:
        """Raises WrongError, ReplacedError."""
        if self.status == 206:
            found = _CONTENT_RANGE.fullmatch(self.get("Content-Range"))
            if not found or tuple(map(int, found.group(1, 2))) != (start, end - 1) or found[3] == "*":
                raise WrongError(f"asked for the bytes {start}-{end - 1}, it sends {self._range()}")
            if int(found[3]) != file.size:
                raise ReplacedError
        elif self.status != 200 or (start, end) != (0, file.size):
            raise WrongError(f"asked for the bytes {start}-{end - 1}, it answers with the status {self.status}")
        length = self.get("Content-Length")
        if length and length != str(end - start):
            if self.status == 200:
                raise ReplacedError
            raise WrongError(f"asked for {end - start} bytes, it sends {length}")

    def bytes(self, size: int) -> Iterator[bytes]:
        """Yield exactly so many bytes of the body. Raises WrongError if it is longer, OSError if it is shorter."""
        left = size
        try:
            while left:
                data = self._response.read1(min(left, BUFFER))
                if not data or self._late:
                    raise CutError(f"the connection ended after {size - left} of {size} bytes")
                left -= len(data)
                self._received += len(data)
                yield data
            more = self._response.read1(1)
            if not more and self._response.length == 0 and not self._response.isclosed():
                self._response.read()  # says that it has ended: the connection may be used again
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None
        if more:
            raise WrongError(f"asked for {size} bytes, it sends more")

    def digest(self, *, whole: bool) -> str:
        """Return the checksum of the file that the answer has. whole: its body is the whole file, not a part."""
        if found := _SHA256.fullmatch(self.get("x-linked-etag")):
            return f"sha256:{found[1]}"
        plain = self.get("ETag").strip('"')
        encrypted = self.get("x-amz-server-side-encryption").startswith("aws:kms")
        if self.get("x-amz-request-id") and re.fullmatch("[0-9a-f]{32}", plain) and not encrypted:
            return f"md5:{plain}"
        for kind, size in (("sha256", 32), ("sha1", 20), ("crc32", 4)) if whole else ():
            if value := decoded(self.get(f"x-amz-checksum-{kind}"), size):  # of several parts, it ends with -N
                return f"{kind}:{value}"
        value = decoded(self.get("Content-MD5"), 16) if whole else ""
        return f"md5:{value}" if value else ""

    def close(self) -> None:
        self._web.ended(self)
        response = getattr(self, "_response", None)
        if response is not None and response.isclosed() and not response.will_close and not self._late:
            self._web.keep(self._origin, self._connection)
        else:
            self._connection.close()


def decoded(value: str, size: int) -> str:
    """Return the bytes of a checksum in Base64 as hexadecimal digits, "" if it is not one of this size."""
    with contextlib.suppress(ValueError):
        found = base64.b64decode(value, validate=True)
        return found.hex() if len(found) == size else ""
    return ""


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80)


def _plain(url: str) -> str:
    """Return a URL as it is sent: in ASCII, without a login, blanks and control characters."""
    parts = urlsplit(url)
    host = (parts.hostname or "").encode("idna").decode() if not (parts.hostname or "").isascii() else parts.hostname
    host = f"[{host}]" if ":" in (host or "") else host
    place = f"{host}:{parts.port}" if parts.port else host
    path, query = (
        quote(re.sub("%(?![0-9A-Fa-f]{2})", "%25", each), safe="/%:@!$&'()*+,;=~-._?")
        for each in (parts.path, parts.query)
    )
    return f"{parts.scheme}://{place}{path}{f'?{query}' if query else ''}"
