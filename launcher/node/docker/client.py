"""docker-py's APIClient over our own connections; its errors are raised as LauncherError.

docker-py's ssh transport supports neither ProxyJump nor the host keys that we have verified.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

import docker.errors
import requests
from docker import APIClient
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool

from launcher.errors import EngineFailed, LauncherError, NodeUnfit
from launcher.model.limits import DEFAULT_LIMITS, AnswerLimits
from launcher.node.docker.channel import EngineConnection
from launcher.node.docker.errors import SDK_ERRORS, explain, is_lost, unwrap_sdk_error
from launcher.node.parallel import in_background

S = TypeVar("S", bound=requests.Session)
T = TypeVar("T")
CONNECTIONS = 5  # of the node's 8 ssh channels; the others are for image transfers, commands and sftp
TRANSFER_TIMEOUT = 3600.0  # `docker save` writes a whole image to disk before it sends the first byte
_POOL_TIMEOUT = 120.0  # seconds to wait for a free connection
_URL = "http://docker:80"  # never resolved: the adapter mounted on it connects
_VERSION = re.compile(r"\d{1,3}\.\d{1,3}")

Dial = Callable[[], EngineConnection]


class DockerClient:
    """Client of one node's engine. Thread-safe.

    `dial` opens a connection; its errors are passed on. Errors name the node.
    """

    def __init__(self, node: str, user: str, dial: Dial, limits: AnswerLimits = DEFAULT_LIMITS) -> None:
        self.node = node
        self._user = user
        self._dial = dial
        self._limits = limits
        self._adapter = _Adapter(dial, CONNECTIONS, limits.size)
        self._api: APIClient | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def ping(self) -> None:
        """Raise unless the engine answers."""
        self.ask("talk to the engine", lambda api: api)

    def ask(self, doing: str, request: Callable[[APIClient], T]) -> T:
        """Send a request; retry once if the connection was lost. `doing` completes "could not ..."."""
        for last in (False, True):
            try:
                return request(self._connected())
            except SDK_ERRORS as error:
                if last or not is_lost(unwrap_sdk_error(error)):
                    raise self._explain(doing, error) from error
        raise AssertionError("unreachable")

    def find(self, doing: str, request: Callable[[APIClient], T]) -> T | None:
        """Like ask(), but return None if the object does not exist."""

        def ask(api: APIClient) -> T | None:
            with suppress(docker.errors.NotFound):
                return request(api)
            return None

        return self.ask(doing, ask)

    def pause(self, seconds: float) -> bool:
        """Sleep; return True if this client is closed."""
        return self._closed.wait(seconds)

    @contextmanager
    def transfer(
        self, doing: str, failure: Callable[[str, str, str], LauncherError], fix: str = "", longest: float = 0
    ) -> Iterator[APIClient]:
        """Open a separate connection for a long image transfer, without retries; it is closed at the end of the block.

        A refusal by the engine is raised as `failure`, with `fix` if the message suggests none. longest: bytes of a
        response, 0 for the default limit.
        """
        connections: list[EngineConnection] = []

        def dial() -> EngineConnection:
            connections.append(connection := self._dial())
            return connection

        try:
            version = self._connected().api_version
            adapter = _Adapter(dial, 1, longest or self._limits.size, timed=False)
            yield _api_client(self.node, version, adapter, TRANSFER_TIMEOUT)
        except SDK_ERRORS as error:
            explained = self._explain(doing, error)
            if isinstance(explained, (EngineFailed, NodeUnfit)):
                raise failure(explained.where, explained.what, explained.next_step or fix) from error
            raise explained from error
        finally:
            for connection in connections:
                connection.shutdown(socket.SHUT_RDWR)  # close() would wait for an open response

    def _explain(self, doing: str, error: Exception) -> LauncherError:
        return explain(self.node, self._user, doing, unwrap_sdk_error(error))

    def close(self) -> None:
        """Close idle connections now, and each connection in use after its request."""
        self._closed.set()
        self._adapter.close()

    def _connected(self) -> APIClient:
        with self._lock:
            if self._api is None:
                # APIClient would request the version before an adapter can be mounted
                session = _mount(requests.Session(), self._adapter)
                answer = checked(session.get(f"{_URL}/_ping", timeout=self._limits.seconds))
                version = answer.headers.get("Api-Version", "")
                if not _VERSION.fullmatch(version):
                    raise ValueError(f"invalid API version {version!r}")
                self._api = _api_client(self.node, version, self._adapter, self._limits.seconds)
            return self._api


def checked(response: requests.Response) -> requests.Response:
    """Return the response. Raises docker.errors.APIError for an error status."""
    try:
        response.raise_for_status()
    except requests.HTTPError as error:
        docker.errors.create_api_error_from_http_exception(error)
    return response


def ids(listed: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(item["Id"]) for item in listed]


def found(ask: Callable[[str], T | None], names: Sequence[str]) -> list[T]:
    """Return the objects that exist, requested over all connections concurrently; raises the first error."""
    results: list[T | None] = []
    for start in range(0, len(names), CONNECTIONS):
        waiting = [in_background(partial(ask, name)) for name in names[start : start + CONNECTIONS]]
        results += [result() for result in waiting]
    return [result for result in results if result is not None]


def _api_client(node: str, version: str, adapter: HTTPAdapter, timeout: float) -> APIClient:
    try:
        api = APIClient(base_url=_URL, version=version, timeout=cast(int, timeout))
    except (docker.errors.InvalidConfigFile, AttributeError, TypeError) as error:
        fix = "correct config.json in ~/.docker (or $DOCKER_CONFIG) on this machine"
        raise EngineFailed(node, f"invalid Docker configuration: {error}", fix) from error
    return _mount(api, adapter)


def _mount(session: S, adapter: HTTPAdapter) -> S:
    session.trust_env = False  # ignore proxies in the environment, and netrc
    for scheme in ("http://", "https://"):  # a redirect must stay on this engine, too
        session.mount(scheme, adapter)
    return session


class _Connection(HTTPConnection):
    def __init__(self, *arguments: Any, dial: Dial, longest: float, timed: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._dial = dial
        self._longest = longest
        self._timed = timed

    def connect(self) -> None:
        connection = self._dial()
        connection.longest, connection.timed = self._longest, self._timed
        connection.settimeout(self.timeout)
        self.sock = cast(socket.socket, connection)

    @property
    def is_connected(self) -> bool:
        return isinstance(self.sock, EngineConnection) and self.sock.idle


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection

    def urlopen(self, *arguments: Any, **options: Any) -> Any:
        # requests sets no pool timeout: without it, a request would wait forever for a connection
        return super().urlopen(*arguments, **({"pool_timeout": _POOL_TIMEOUT} | options))


class _Adapter(HTTPAdapter):
    def __init__(self, dial: Dial, connections: int, longest: float, *, timed: bool = True) -> None:
        """longest, timed: attributes of each Connection."""
        super().__init__()
        self._connections = _Pool("docker", maxsize=connections, block=True, dial=dial, longest=longest, timed=timed)

    def get_connection_with_tls_context(self, *_: object, **__: object) -> _Pool:
        return self._connections

    def send(self, *arguments: Any, **options: Any) -> requests.Response:
        options["timeout"] = options.get("timeout") or TRANSFER_TIMEOUT  # docker-py sets none for pull and build
        return super().send(*arguments, **options)

    def close(self) -> None:
        super().close()
        self._connections.close()
