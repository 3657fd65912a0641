"""Requests to one Docker engine: what a broken connection, a node that is away and an odd answer mean to the caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal, TypeVar

from launcher.errors import EngineUnavailable, LauncherError, NodeUnreachable
from launcher.node.docker.api import Api, segment
from launcher.node.docker.errors import FAILURES, NONSENSE, explain, is_lost, nonsense
from launcher.node.machine import Machine

T = TypeVar("T")
_RETRY_PAUSE = 1.0  # seconds between tries to come back to a node that is away


class Calls:
    """Safe for several threads."""

    def __init__(self, node: str, machine: Machine, api: Api) -> None:
        self._node = node
        self._machine = machine
        self._api = api
        self._closed = threading.Event()

    def __call__(self, doing: str, ask: Callable[[Api], T]) -> T:
        """Ask the engine; once more on a new connection when the one it went over had died. Errors name the node."""
        for last in (False, True):
            try:
                return ask(self._api)
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
            self._api.post(f"/containers/{segment(container)}/wait", {"condition": condition}, timeout=timeout)
        except FAILURES as error:
            if not isinstance(error, TimeoutError) and not is_lost(error):
                raise explain(self._node, self._machine.user, f"wait for {container}", error) from error
        except NONSENSE as error:
            raise nonsense(self._node, f"wait for {container}", error) from error
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
        self._api.close()
