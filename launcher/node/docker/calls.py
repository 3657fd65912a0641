"""Requests to one Docker engine: clients made when needed, broken connections made anew, errors that name the node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal, TypeVar

import docker.errors
from docker import APIClient

from launcher.errors import EngineUnavailable, LauncherError, NodeUnreachable
from launcher.node.docker.errors import FAILURES, NONSENSE, explain, is_lost, is_timeout, nonsense
from launcher.node.machine import Machine

T = TypeVar("T")
API_TIMEOUT = 60.0  # seconds without a byte from the engine
BULK_TIMEOUT = 3600.0  # `docker save` of a big image writes it all to disk before its first byte
_RETRY_PAUSE = 1.0  # seconds between tries to come back to a node that is away


class Calls:
    """Safe for several threads. `connect` makes a client with that time limit; a bulk transfer has one of its own."""

    def __init__(self, node: str, machine: Machine, connect: Callable[[float], APIClient]) -> None:
        self._node = node
        self._machine = machine
        self._connect = connect
        self._clients: dict[float, APIClient] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def __call__(self, doing: str, ask: Callable[[APIClient], T], *, bulk: bool = False) -> T:
        """Ask the engine; once more on a new connection when the one it went over had died. Errors name the node."""
        for last in (bulk, True):
            try:
                return ask(self._client(BULK_TIMEOUT if bulk else API_TIMEOUT))
            except LauncherError:
                raise
            except FAILURES as error:
                if last or not is_lost(error):
                    raise explain(self._node, self._machine.user, doing, error) from error
            except NONSENSE as error:
                raise nonsense(self._node, doing, error) from error
        raise AssertionError("unreachable")

    def until(self, container: str, condition: Literal["next-exit", "not-running"], timeout: float) -> None:
        """Until the engine says so or the time is over; a cut connection is for the caller's next look to find out."""
        try:
            client = self._client(API_TIMEOUT)
            client.wait(container, timeout=timeout, condition=condition)  # type: ignore[arg-type] # seconds may be a float
        except docker.errors.APIError as error:
            raise explain(self._node, self._machine.user, f"wait for {container}", error) from error
        except FAILURES as error:
            if not is_timeout(error) and not is_lost(error):
                raise explain(self._node, self._machine.user, f"wait for {container}", error) from error
        except NodeUnreachable:
            self.pause(min(_RETRY_PAUSE, timeout))

    def patiently(self, ask: Callable[[], T], deadline: float) -> T:
        """Until the node is there again; its last error when the time is over."""
        while True:
            try:
                return ask()
            except (NodeUnreachable, EngineUnavailable):
                left = deadline - time.monotonic()
                if left <= 0 or self.pause(min(_RETRY_PAUSE, left)):
                    raise

    def pause(self, seconds: float) -> bool:
        """Whether it was closed meanwhile."""
        return self._closed.wait(seconds)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def _client(self, timeout: float) -> APIClient:
        with self._lock:
            client = self._clients.get(timeout)
            if client is None:
                client = self._clients[timeout] = self._connect(timeout)
            return client
