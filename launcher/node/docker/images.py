"""The image store of a node's Docker engine."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import docker.errors
import requests
from docker import APIClient
from docker.utils import parse_repository_tag

from launcher.errors import (
    EngineFailed,
    ImageBuildFailed,
    ImageShipFailed,
    ImageUnfit,
    LauncherError,
    NodeUnfit,
    NoRoom,
)
from launcher.node.docker.errors import FAILURES, explain
from launcher.node.docker.values import image_info
from launcher.node.engine import ImageInfo
from launcher.node.ssh.pool import open_ssh_argv

T = TypeVar("T")
_PIECE = 1 << 20
_PULL_CURE = "check its spelling, the node's way to the registry, and `docker login` on this machine"
_ALIVE = ("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")


class Caller(Protocol):
    """How an engine is asked: `doing` completes "could not ..." in the error."""

    def __call__(self, doing: str, ask: Callable[[APIClient], T], *, bulk: bool = False) -> T: ...


class DockerImages:
    """Implements Images. `ssh`: (host, ssh config) where the OpenSSH client may carry bulk bytes to the node."""

    def __init__(self, node: str, call: Caller, ssh: tuple[str, str | None] | None = None) -> None:
        self._node = node
        self._call = call
        self._ssh = ssh
        self._classic: bool | None = None

    def inspect(self, reference: str) -> ImageInfo | None:
        def ask(api: APIClient) -> ImageInfo | None:
            try:
                return image_info(api.inspect_image(reference))  # type: ignore[no-untyped-call]
            except docker.errors.NotFound:
                return None

        return self._call(f"look at image {reference}", ask)

    def pull(self, reference: str, login: Mapping[str, str] | None = None) -> None:
        repository, tag = parse_repository_tag(reference)

        def ask(api: APIClient) -> None:
            # without a login of ours docker-py would look for one of its own: {} says that there is none
            events = api.pull(repository, tag=tag or "latest", stream=True, decode=True, auth_config=dict(login or {}))
            failure = _follow(events)
            if failure:
                raise ImageUnfit(self._node, f"could not pull {reference}: {failure}", _PULL_CURE)

        self._in_words_of(ImageUnfit, f"pull {reference}", ask)

    def digest(self, reference: str, login: Mapping[str, str] | None = None) -> str:
        def ask(api: APIClient) -> str:
            answer = api.inspect_distribution(reference, auth_config=dict(login or {}))  # type: ignore[no-untyped-call]
            return str(answer["Descriptor"]["digest"])

        return self._in_words_of(ImageUnfit, f"ask the registry for {reference}", ask)

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

        return self._in_words_of(ImageBuildFailed, f"build {tag}", ask)

    def save(self, reference: str) -> Iterator[bytes]:
        """Raises ImageShipFailed; an archive that breaks off raises while it is read."""
        doing = f"save image {reference}"

        def ask(api: APIClient) -> requests.Response:
            # get_image() would not let us end the request early, and its connection would be gone from the pool
            url = f"{api.base_url}/v{api.api_version}/images/{quote(reference, safe='/:@')}/get"
            response = api.get(url, stream=True, timeout=api.timeout)
            try:
                response.raise_for_status()
            except requests.HTTPError as error:
                response.close()
                docker.errors.create_api_error_from_http_exception(error)
            return response

        response = self._in_words_of(ImageShipFailed, doing, ask)
        try:
            yield from response.iter_content(_PIECE)
        except FAILURES as error:
            raise ImageShipFailed(self._node, explain(self._node, "", doing, error).what, "try again") from error
        finally:
            response.close()

    def load(self, pieces: Iterable[bytes]) -> None:
        """Raises ImageShipFailed; whatever `pieces` raises."""
        if self._ssh is not None and shutil.which("ssh"):
            host, config = self._ssh
            argv = open_ssh_argv(host, config, ["docker", "load", "--quiet"])
            self._load_by_command([argv[0], *_ALIVE, *argv[1:]], pieces)
        else:
            self._load_by_api(pieces)

    def fills_in(self) -> bool:
        if self._classic is None:
            status = self._call("ask the engine for its image store", lambda api: api.info()).get("DriverStatus")
            self._classic = not any("io.containerd.snapshotter" in str(entry) for entry in status or ())
        return self._classic

    def tag(self, image: str, reference: str) -> None:
        repository, tag = parse_repository_tag(reference)
        self._call(f"tag image {image}", lambda api: api.tag(image, repository, tag or "latest"))

    def list(self, labels: Mapping[str, str | None]) -> Sequence[ImageInfo]:
        wanted = label_filter(labels)

        def ask(api: APIClient) -> Sequence[str]:
            return [str(image["Id"]) for image in api.images(filters={"label": wanted} if wanted else None)]

        looked = (self.inspect(image) for image in self._call("list images", ask))
        return [image for image in looked if image is not None]  # gone since the list was made

    def remove(self, reference: str) -> None:
        def ask(api: APIClient) -> None:
            try:
                api.remove_image(reference)
            except docker.errors.NotFound:
                return

        self._call(f"remove image {reference}", ask)

    def _load_by_command(self, argv: Sequence[str], pieces: Iterable[bytes]) -> None:
        with tempfile.TemporaryFile() as words:
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=words, stderr=words, start_new_session=True)
            assert process.stdin is not None
            try:
                for piece in pieces:
                    process.stdin.write(piece)
                process.stdin.close()
            except BrokenPipeError:
                pass  # it gave up: why is in its words
            except BaseException:
                process.kill()
                process.wait()
                raise
            code = process.wait()
            words.seek(0)
            said = words.read(4096).decode(errors="replace").strip()
        if code:
            raise self._load_failed(said or f"`docker load` ended with exit code {code}")

    def _load_by_api(self, pieces: Iterable[bytes]) -> None:
        def ask(api: APIClient) -> None:
            stream = (piece for piece in pieces)  # requests takes a list for form fields
            failure = _follow(api.load_image(stream))  # type: ignore[no-untyped-call]
            if failure:
                raise self._load_failed(failure)

        self._in_words_of(ImageShipFailed, "load the image", ask)

    def _load_failed(self, words: str) -> ImageShipFailed:
        if os.strerror(errno.ENOSPC).lower() in words.lower():  # all that an engine tells of it is these words
            cure = "make room: launcher clean, docker system df"
            return NoRoom(self._node, f"its disk is full: {words}", cure)
        return ImageShipFailed(self._node, words, "see whether `docker load` works there by hand")

    def _in_words_of(self, kind: type[LauncherError], doing: str, ask: Callable[[APIClient], T]) -> T:
        """What the engine refuses is told as `kind`, whose phase this is; a node that is away stays just that."""
        try:
            return self._call(doing, ask, bulk=True)
        except (EngineFailed, NodeUnfit) as error:
            raise kind(error.where, error.what, error.next_step) from error


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


def label_filter(labels: Mapping[str, str | None]) -> list[str]:
    """As the API takes it: `name` or `name=value`."""
    return [name if value is None else f"{name}={value}" for name, value in labels.items()]
