"""Whole images through docker-py: pulled, built, saved, loaded."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import docker.errors
import requests
from docker import APIClient
from docker.utils import parse_repository_tag

from launcher.errors import EngineFailed, ImageBuildFailed, ImageShipFailed, ImageUnfit, LauncherError, NodeUnfit
from launcher.node.docker.errors import NONSENSE, explain, nonsense
from launcher.node.docker.sdk import SDK_FAILURES, plainly
from launcher.node.docker.values import image_info

T = TypeVar("T")
_PIECE = 1 << 20
_PULL_CURE = "check its spelling, the node's way to the registry, and `docker login` on this machine"


class Bulk:
    """Nothing is tried twice here: the caller knows whether that is worth its time. `connect` is called when needed."""

    def __init__(self, node: str, user: str, connect: Callable[[], APIClient]) -> None:
        self._node = node
        self._user = user
        self._connect = connect
        self._client: APIClient | None = None
        self._lock = threading.Lock()

    def pull(self, reference: str, login: Mapping[str, str] | None) -> None:
        repository, tag = parse_repository_tag(reference)

        def ask(api: APIClient) -> None:
            # without a login of ours docker-py would look for one of its own: {} says that there is none
            events = api.pull(repository, tag=tag or "latest", stream=True, decode=True, auth_config=dict(login or {}))
            failure = _follow(events)
            if failure:
                raise ImageUnfit(self._node, f"could not pull {reference}: {failure}", _PULL_CURE)

        self._ask(ImageUnfit, f"pull {reference}", ask)

    def digest(self, reference: str, login: Mapping[str, str] | None) -> str:
        def ask(api: APIClient) -> str:
            answer = api.inspect_distribution(reference, auth_config=dict(login or {}))  # type: ignore[no-untyped-call]
            return str(answer["Descriptor"]["digest"])

        return self._ask(ImageUnfit, f"ask the registry for {reference}", ask)

    def build(
        self,
        context: bytes,
        *,
        tag: str,
        arguments: Mapping[str, str],
        labels: Mapping[str, str],
        network: str,
        say: Callable[[str], None],
    ) -> str:
        lines: list[str] = []

        def hear(event: Mapping[str, Any]) -> None:
            for line in str(event.get("stream", "")).splitlines():
                lines.append(line)
                say(line)

        def ask(api: APIClient) -> str:
            events = api.build(
                fileobj=io.BytesIO(context),
                custom_context=True,
                tag=tag,
                buildargs=dict(arguments),
                labels=dict(labels),
                network_mode=network or None,
                rm=True,
                forcerm=True,
                decode=True,
            )
            failure = _follow(events, hear)
            if failure:
                raise ImageBuildFailed(self._node, "\n".join([f"could not build {tag}:", *lines[-20:], failure]))
            return image_info(api.inspect_image(tag)).id  # type: ignore[no-untyped-call]

        return self._ask(ImageBuildFailed, f"build {tag}", ask)

    def save(self, reference: str) -> Iterator[bytes]:
        doing = f"save image {reference}"
        response = self._ask(ImageShipFailed, doing, lambda api: _archive(api, reference))
        try:
            yield from response.iter_content(_PIECE)
        except SDK_FAILURES as error:
            words = explain(self._node, self._user, doing, plainly(error)).what
            raise ImageShipFailed(self._node, words, "try again") from error
        finally:
            response.close()

    def load(self, pieces: Iterable[bytes]) -> str:
        """What the engine says against it, else ""."""

        def ask(api: APIClient) -> str:
            stream = (piece for piece in pieces)  # requests takes a list for form fields
            return _follow(api.load_image(stream))  # type: ignore[no-untyped-call]

        return self._ask(ImageShipFailed, "load the image", ask)

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _ask(self, kind: type[LauncherError], doing: str, ask: Callable[[APIClient], T]) -> T:
        """What the engine refuses is told as `kind`, whose phase this is; a node that is away stays just that."""
        try:
            with self._lock:
                if self._client is None:
                    self._client = self._connect()
                client = self._client
            return ask(client)
        except LauncherError:
            raise
        except SDK_FAILURES as error:
            told = explain(self._node, self._user, doing, plainly(error))
            if isinstance(told, (EngineFailed, NodeUnfit)):
                raise kind(told.where, told.what, told.next_step) from error
            raise told from error
        except NONSENSE as error:
            told = nonsense(self._node, doing, error)
            raise kind(told.where, told.what, told.next_step) from error


def _archive(api: APIClient, reference: str) -> requests.Response:
    """get_image() would not let us end the request early, and its connection would be gone from the pool."""
    url = f"{api.base_url}/v{api.api_version}/images/{quote(reference, safe='/:@')}/get"
    response = api.get(url, stream=True, timeout=api.timeout)
    try:
        response.raise_for_status()
    except requests.HTTPError as error:
        response.close()
        docker.errors.create_api_error_from_http_exception(error)
    return response


def _follow(events: Iterable[Any], hear: Callable[[Mapping[str, Any]], None] | None = None) -> str:
    """Read progress to its end: the engine reports a failure inside of it, under status 200. Its words, else ""."""
    failure = ""
    for event in events:
        if not isinstance(event, Mapping):
            continue
        failure = failure or str(event.get("error") or event.get("message") or "")
        if hear:
            hear(event)
    return failure
