"""The image store of a node's Docker engine."""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from docker.errors import APIError
from docker.utils import parse_repository_tag

from launcher.errors import ImageBuildFailed, ImageShipFailed, ImageUnfit, NoRoom
from launcher.model.facts import ImageInfo
from launcher.node.docker.client import DockerClient, found, ids
from launcher.node.docker.pulling import PullProgress
from launcher.node.docker.values import image_info, label_filter
from launcher.node.ssh.config import open_ssh_argv

_PIECE = 1 << 20


class DockerImages:
    """`ssh`: (host, ssh config) where the OpenSSH client may load images."""

    def __init__(self, client: DockerClient, ssh: tuple[str, str | None] | None = None) -> None:
        self._client = client
        self._ssh = ssh

    def inspect(self, reference: str) -> ImageInfo | None:
        """None where the store does not have it."""
        return self._client.find(f"inspect image {reference}", lambda api: image_info(api.inspect_image(reference)))

    def arch(self) -> str:
        """Which images the engine runs, named as in ImageInfo: `amd64`, `arm64`; "" where it does not say."""
        return self._client.ask("ask its version", lambda api: str(api.version(api_version=False).get("Arch", "")))

    def pull(
        self,
        reference: str,
        login: Mapping[str, str] | None = None,
        report: Callable[[PullProgress], object] = lambda _: None,
    ) -> None:
        """Let the engine pull it; `report` is called while it does. Raises ImageUnfit with the engine's words.

        login: username, password (or identitytoken), serveraddress; sent with this one request and kept nowhere on the
        node.
        """
        fix = "check its spelling, the node's way to the registry, and `docker login` on this machine"
        with self._client.transfer(f"pull {reference}", ImageUnfit, fix) as api:
            # without auth_config docker-py looks for a login of its own: {} says that there is none
            progress = PullProgress()
            for event in _read(api.pull(reference, stream=True, decode=True, auth_config=dict(login or {}))):
                progress.take(event)
                report(progress)

    def digest(self, reference: str, login: Mapping[str, str] | None = None) -> str:
        """What its registry calls it now, `sha256:...`, asked by the engine without pulling. Raises ImageUnfit."""
        with self._client.transfer(f"ask the registry for {reference}", ImageUnfit) as api:
            return str(api.inspect_distribution(reference, auth_config=dict(login or {}))["Descriptor"]["digest"])

    def push(self, reference: str, login: Mapping[str, str] | None = None) -> str:
        """Let the engine push it; the digest that its registry gives it. Raises ImageShipFailed with their words."""
        fix = "check the registry's name, and `docker login` on this machine"
        with self._client.transfer(f"push {reference}", ImageShipFailed, fix, math.inf) as api:
            events = _read(api.push(reference, stream=True, decode=True, auth_config=dict(login or {})))
            told = [aux for event in events if isinstance(aux := event.get("aux"), Mapping) and aux.get("Digest")]
            if not told:
                raise _failure("the engine tells no digest of it")
        return str(told[-1]["Digest"])

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
        """Build with the engine's classic builder from a tar archive with a `Dockerfile` in it; the image's id.

        network: "" for the engine's default, or "host". Every line of its output goes to `say`. Steps that failed leave
        no container. Raises ImageBuildFailed with the last lines.
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
        """The `docker save` archive, in pieces; closing the iterator early ends the request.

        Raises ImageShipFailed, EngineUnavailable; an archive that breaks off raises while it is read.
        """
        with self._client.transfer(f"save image {reference}", ImageShipFailed, longest=math.inf) as api:
            yield from api.get_image(reference, chunk_size=_PIECE)

    def load(self, pieces: Iterable[bytes]) -> None:
        """Take in a `docker save` archive, whole or not at all. Raises ImageShipFailed; whatever `pieces` raises."""
        fix = "see whether `docker load` works there by hand"
        with self._client.transfer("load the image", _not_loaded, fix) as api:
            if self._ssh is not None and shutil.which("ssh"):
                _load_by_command(open_ssh_argv(*self._ssh, ["docker", "load", "--quiet"]), pieces)
            else:
                # not `pieces`: requests takes a list for form fields
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
            with contextlib.suppress(BrokenPipeError):  # it gave up: its output says why
                process.stdin.writelines(pieces)
                process.stdin.close()
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()
        output.seek(0)
        words = output.read(4096).decode(errors="replace").strip()
    if process.returncode:
        raise _failure(words or f"`docker load` ended with exit code {process.returncode}")


def _not_loaded(node: str, what: str, fix: str) -> ImageShipFailed:
    full = "no space left on device" in what.lower()  # the engine has no code for it
    return (NoRoom if full else ImageShipFailed)(node, what, fix)


def _read(answer: Iterable[Any], lines: Iterable[str] = ()) -> Iterator[Mapping[str, Any]]:
    """Progress to its end. Raises APIError then, after `lines`: the engine reports a failure inside of a status 200."""
    failure = ""
    for event in answer:
        if isinstance(event, Mapping):
            failure = failure or str(event.get("error") or event.get("message") or "")
            yield event
    if failure:
        raise _failure("\n".join([*lines, failure]))


def _failure(words: str) -> APIError:
    return APIError(words, explanation=words)
