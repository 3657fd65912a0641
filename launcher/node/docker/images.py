"""The image store of a node's Docker engine."""

from __future__ import annotations

import contextlib
import io
import math
import os
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from docker.errors import APIError
from docker.utils import parse_repository_tag

from launcher.errors import ImageBuildFailed, ImageShipFailed, ImageUnfit, NoRoom
from launcher.faults import disk
from launcher.model.facts import ImageInfo
from launcher.node.docker.client import DockerClient, found, ids
from launcher.node.docker.pulling import PullProgress
from launcher.node.docker.values import image_info, label_filter
from launcher.node.ssh.config import open_ssh_argv

_PIECE = 1 << 20


class DockerImages:
    """`ssh`: (host, ssh config) if the OpenSSH client may load images."""

    def __init__(self, client: DockerClient, ssh: tuple[str, str | None] | None = None) -> None:
        self._client = client
        self._ssh = ssh

    def inspect(self, reference: str) -> ImageInfo | None:
        """Return None if the image is not in the store."""
        return self._client.find(f"inspect image {reference}", lambda api: image_info(api.inspect_image(reference)))

    def arch(self) -> str:
        """Return the architecture of the engine, named as in ImageInfo: `amd64`, `arm64`; "" if unknown."""
        return self._client.ask("get its version", lambda api: str(api.version(api_version=False).get("Arch", "")))

    def pull(
        self,
        reference: str,
        login: Mapping[str, str] | None = None,
        report: Callable[[PullProgress], object] = lambda _: None,
    ) -> None:
        """Let the engine pull an image; `report` is called with the progress. Raises ImageUnfit with its message.

        login: username, password (or identitytoken), serveraddress; sent with this request only, never stored on the
        node.
        """
        fix = "check its spelling, the node's connection to the registry, and `docker login` on this machine"
        with self._client.transfer(f"pull {reference}", ImageUnfit, fix) as api:
            # without auth_config docker-py searches for credentials itself: {} means anonymous
            progress = PullProgress()
            for event in _read(api.pull(reference, stream=True, decode=True, auth_config=dict(login or {}))):
                progress.take(event)
                report(progress)

    def digest(self, reference: str, login: Mapping[str, str] | None = None) -> str:
        """Return its current digest in the registry, `sha256:...`; the engine does not pull. Raises ImageUnfit.

        Also if it is not for this engine's architecture: an engine pulls all of such an image, and then cannot run it.
        """
        with self._client.transfer(f"ask the registry for {reference}", ImageUnfit) as api:
            found = api.inspect_distribution(reference, auth_config=dict(login or {}))
        has = {str(each.get("architecture", "")) for each in found.get("Platforms") or ()} - {"", "unknown"}
        if has and (own := self.arch()) and own not in has:
            what = f"{reference} is for {', '.join(sorted(has))}, but this node needs {own}"
            fix = "choose an image that has both; NVIDIA's are for amd64 and arm64"
            raise ImageUnfit(self._client.node, what, fix)
        return str(found["Descriptor"]["digest"])

    def push(self, reference: str, login: Mapping[str, str] | None = None) -> str:
        """Let the engine push an image; return its digest in the registry. Raises ImageShipFailed with the message."""
        fix = "check the registry's name, and `docker login` on this machine"
        with self._client.transfer(f"push {reference}", ImageShipFailed, fix, math.inf) as api:
            events = _read(api.push(reference, stream=True, decode=True, auth_config=dict(login or {})))
            reported = [aux for event in events if isinstance(aux := event.get("aux"), Mapping) and aux.get("Digest")]
            if not reported:
                raise _failure("the engine reported no digest for the pushed image")
        return str(reported[-1]["Digest"])

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
        """Build from a tar archive with a `Dockerfile`, with the engine's classic builder; return the image's id.

        network: "" for the engine's default, or "host". `say` gets every line of output. Containers of failed steps
        are removed. Raises ImageBuildFailed with the last lines.
        """
        lines: deque[str] = deque(maxlen=20)

        with self._client.transfer(f"build {tag}", ImageBuildFailed) as api:
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
            for event in _read(events, lines):
                for line in filter(str.strip, str(event.get("stream", "")).splitlines()):
                    lines.append(line)
                    say(line)
            return image_info(api.inspect_image(tag)).id

    def save(self, reference: str) -> Iterator[bytes]:
        """Yield the `docker save` archive in pieces; closing the iterator early aborts the request.

        Raises ImageShipFailed, EngineUnavailable, also during iteration if the archive is truncated.
        """
        with self._client.transfer(f"save image {reference}", ImageShipFailed, longest=math.inf) as api:
            yield from api.get_image(reference, chunk_size=_PIECE)

    def load(self, pieces: Iterable[bytes]) -> None:
        """Load a `docker save` archive completely or not at all. Raises ImageShipFailed, and errors of `pieces`."""
        fix = "on the node: check that `docker load` works"
        with self._client.transfer("load the image", _not_loaded, fix) as api:
            if self._ssh is not None and shutil.which("ssh"):
                _load_by_command(open_ssh_argv(*self._ssh, ["docker", "load", "--quiet"]), pieces)
            else:
                # not `pieces`: requests treats a list as form fields
                deque(_read(api.load_image(piece for piece in pieces)), maxlen=0)

    def tag(self, image: str, reference: str) -> None:
        self._client.ask(f"tag image {image}", lambda api: api.tag(image, *parse_repository_tag(reference)))

    def list(self, labels: Mapping[str, str | None]) -> Sequence[ImageInfo]:
        """Images that carry all these labels (None: any value)."""
        wanted = label_filter(labels) if labels else None
        return found(self.inspect, self._client.ask("list images", lambda api: ids(api.images(filters=wanted))))

    def remove(self, reference: str) -> None:
        self._client.find(f"remove image {reference}", lambda api: api.remove_image(reference))


def _load_by_command(argv: Sequence[str], pieces: Iterable[bytes]) -> None:
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True)
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it exited: its output has the reason
                process.stdin.writelines(pieces)
                process.stdin.close()
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - 4096))
        text = output.read().decode(errors="replace").strip()
    if process.returncode:
        raise _failure(text or f"`docker load` exited with code {process.returncode}")


def _not_loaded(node: str, what: str, fix: str) -> ImageShipFailed:
    full = what.startswith(disk.full(disk.ENGINE).what)  # the engine has no error code for this
    return (NoRoom if full else ImageShipFailed)(node, what, fix)


def _read(answer: Iterable[Any], lines: Iterable[str] = ()) -> Iterator[Mapping[str, Any]]:
    """Yield all events. Raises APIError, with `lines`, at the end: failures are reported with HTTP status 200."""
    failure = ""
    for event in answer:
        if isinstance(event, Mapping):
            failure = failure or str(event.get("error") or event.get("message") or "")
            yield event
    if failure:
        raise _failure("\n".join([*lines, failure]))


def _failure(text: str) -> APIError:
    return APIError(text, explanation=text)
