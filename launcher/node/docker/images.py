"""The image store of a node's Docker engine."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from launcher.errors import ImageShipFailed, NoRoom
from launcher.node.docker.api import Api, Missing, image_path
from launcher.node.docker.calls import Calls
from launcher.node.docker.values import image_info
from launcher.node.engine import ImageInfo
from launcher.node.ssh.config import open_ssh_argv

if TYPE_CHECKING:  # it loads docker-py
    from launcher.node.docker.bulk import Bulk

_ALIVE = ("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")


class DockerImages:
    """Implements Images. `ssh`: (host, ssh config) where the OpenSSH client may carry bulk bytes to the node."""

    def __init__(
        self, node: str, call: Calls, make_bulk: Callable[[], Bulk], ssh: tuple[str, str | None] | None = None
    ) -> None:
        self._node = node
        self._call = call
        self._make_bulk = make_bulk
        self._made: Bulk | None = None
        self._ssh = ssh
        self._classic: bool | None = None

    def inspect(self, reference: str) -> ImageInfo | None:
        def ask(api: Api) -> ImageInfo | None:
            try:
                return image_info(api.get(f"{image_path(reference)}/json"))
            except Missing:
                return None

        return self._call(f"look at image {reference}", ask)

    def pull(self, reference: str, login: Mapping[str, str] | None = None) -> None:
        self._bulk().pull(reference, login)

    def digest(self, reference: str, login: Mapping[str, str] | None = None) -> str:
        return self._bulk().digest(reference, login)

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
        return self._bulk().build(context, tag=tag, arguments=arguments, labels=labels, network=network, say=say)

    def save(self, reference: str) -> Iterator[bytes]:
        """Raises ImageShipFailed; an archive that breaks off raises while it is read."""
        return self._bulk().save(reference)

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
            status = self._call("ask the engine for its image store", lambda api: api.get("/info").get("DriverStatus"))
            self._classic = not any("io.containerd.snapshotter" in str(entry) for entry in status or ())
        return self._classic

    def tag(self, image: str, reference: str) -> None:
        repository, colon, tag = reference.rpartition(":")
        if not colon or "/" in tag:  # a registry's port, if anything
            repository, tag = reference, "latest"
        query = {"repo": repository, "tag": tag}
        self._call(f"tag image {image}", lambda api: api.post(f"{image_path(image)}/tag", query))

    def list(self, labels: Mapping[str, str | None]) -> Sequence[ImageInfo]:
        wanted = label_filter(labels)

        def ask(api: Api) -> Sequence[str]:
            return [str(image["Id"]) for image in api.get("/images/json", wanted if labels else None)]

        looked = (self.inspect(image) for image in self._call("list images", ask))
        return [image for image in looked if image is not None]  # gone since the list was made

    def remove(self, reference: str) -> None:
        def ask(api: Api) -> None:
            with contextlib.suppress(Missing):
                api.delete(image_path(reference))

        self._call(f"remove image {reference}", ask)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    def _bulk(self) -> Bulk:
        if self._made is None:
            self._made = self._make_bulk()
        return self._made

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
        failure = self._bulk().load(pieces)
        if failure:
            raise self._load_failed(failure)

    def _load_failed(self, words: str) -> ImageShipFailed:
        if os.strerror(errno.ENOSPC).lower() in words.lower():  # all that an engine tells of it is these words
            cure = "make room: launcher clean, docker system df"
            return NoRoom(self._node, f"its disk is full: {words}", cure)
        return ImageShipFailed(self._node, words, "see whether `docker load` works there by hand")


def label_filter(labels: Mapping[str, str | None]) -> Mapping[str, str]:
    """As the API takes it: `name` or `name=value`."""
    wanted = [name if value is None else f"{name}={value}" for name, value in labels.items()]
    return {"filters": json.dumps({"label": wanted})}
