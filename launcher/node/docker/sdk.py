"""docker-py, for what is big and rare: over our ssh channels, its failures in plain words.

Its own ssh transport knows no ProxyJump and no host key of ours; this adapter gives it our channels instead.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import docker
import docker.errors
import requests
import urllib3.exceptions
from docker import APIClient
from docker.transport.basehttpadapter import BaseHTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool

from launcher.errors import LauncherError
from launcher.node.docker.api import Refused
from launcher.node.docker.dialstdio import ChannelWire, dial
from launcher.node.docker.errors import NOBODY_THERE
from launcher.node.ssh.commands import Ssh

BULK_TIMEOUT = 3600  # seconds: `docker save` of a big image writes it all to disk before its first byte
SDK_FAILURES = (docker.errors.DockerException, requests.RequestException, urllib3.exceptions.HTTPError, OSError)
_CONNECTIONS = 2
_POOL_TIMEOUT = 120.0
_URL = "http://docker:80"  # never looked up: the adapter mounted on it makes the connection


def local_sdk() -> APIClient:
    """This machine's engine, as DOCKER_HOST or the docker context say."""
    client: APIClient = docker.from_env(version="auto", timeout=BULK_TIMEOUT).api
    return client


class SshClient(APIClient):
    """docker-py's client over one node's ssh. Asks the engine for its version at once."""

    def __init__(self, ssh: Ssh) -> None:
        self._adapter = _SshAdapter(ssh)
        super().__init__(base_url=_URL, version="auto", timeout=BULK_TIMEOUT)

    def _retrieve_server_version(self) -> str:
        # called by the constructor above once it has made itself a requests session
        self.trust_env = False
        self.mount(_URL, self._adapter)
        return str(self.version(api_version=False)["ApiVersion"])


class _SshAdapter(BaseHTTPAdapter):
    def __init__(self, ssh: Ssh) -> None:
        self._http = _Pool(ssh)
        super().__init__()

    def get_connection(self, *_: object) -> _Pool:
        return self._http

    def request_url(self, request: requests.PreparedRequest, *_: object) -> str:
        return request.path_url  # a proxy of the caller's environment has no say here

    def close(self) -> None:
        super().close()
        self._http.close()


class _Pool(HTTPConnectionPool):
    def __init__(self, ssh: Ssh) -> None:
        super().__init__("docker", timeout=BULK_TIMEOUT, maxsize=_CONNECTIONS, block=True)
        self._ssh = ssh

    def _new_conn(self) -> _Connection:
        return _Connection(self._ssh)

    def _get_conn(self, timeout: float | None = None) -> Any:
        # requests passes no pool time-out: without one a full pool would wait for ever
        return super()._get_conn(timeout or _POOL_TIMEOUT)


class _Connection(HTTPConnection):
    def __init__(self, ssh: Ssh) -> None:
        super().__init__("docker", timeout=BULK_TIMEOUT)
        self._ssh = ssh

    def connect(self) -> None:
        self.sock = _ChannelSocket(dial(self._ssh))

    @property
    def is_connected(self) -> bool:
        return isinstance(self.sock, _ChannelSocket) and self.sock.idle


class _ChannelSocket(io.RawIOBase):
    """A channel as the socket that http.client expects."""

    def __init__(self, wire: ChannelWire) -> None:
        super().__init__()
        self._wire = wire
        self._readers = 0
        self._ending = False

    @property
    def idle(self) -> bool:
        return self._wire.idle

    def sendall(self, data: bytes) -> None:
        self._wire.sendall(data)

    def settimeout(self, timeout: float | None) -> None:
        self._wire.settimeout(timeout)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._wire.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def makefile(self, *_: object, **__: object) -> io.BufferedReader:
        """http.client makes one a response and closes it after; the channel lives on for the next request."""
        self._readers += 1
        return _Reader(self, 1 << 16)

    def fileno(self) -> int:
        raise io.UnsupportedOperation("a channel has no file")  # nobody may select() on it

    def reader_closed(self) -> None:
        self._readers -= 1
        if self._ending and self._readers <= 0:
            self._wire.close()

    def close(self) -> None:
        """http.client closes its connection while a response without a length is still being read: wait for that."""
        self._ending = True
        if self._readers <= 0:
            self._wire.close()
            super().close()

    def shutdown(self, _how: int) -> None:
        self._wire.close()


class _Reader(io.BufferedReader):
    """One response: closing it leaves the channel open."""

    def __init__(self, source: _ChannelSocket, size: int) -> None:
        super().__init__(source, size)
        self._source: _ChannelSocket | None = source

    def close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.reader_closed()

    @property
    def closed(self) -> bool:
        return self._source is None


def plainly(error: Exception) -> Exception:
    """What docker-py, requests and urllib3 have wrapped up, as api.py would raise it."""
    inner = list(_chain(error))
    for one in inner:
        if isinstance(one, (LauncherError, *NOBODY_THERE)):
            return one
        if isinstance(one, docker.errors.APIError):
            missing = isinstance(one, docker.errors.NotFound)
            return Refused(one.status_code or (404 if missing else 500), str(one.explanation or one).strip())
    if any(isinstance(one, (TimeoutError, urllib3.exceptions.TimeoutError, requests.Timeout)) for one in inner):
        return TimeoutError(str(error))
    return ConnectionError(str(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and all that it was made of: requests and urllib3 put the cause into args, reason or __context__."""
    seen: set[int] = set()
    todo: list[BaseException] = [error]
    while todo:
        one = todo.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        inner = [one.__cause__, one.__context__, getattr(one, "reason", None), *one.args]
        todo += [item for item in inner if isinstance(item, BaseException)]
