"""Debian's docker-registry on this machine's loopback interface, for pushes by engines and imports by tools."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bed.fixtures import unavailable
from tests.bed.host import docker
from tests.bed.images import image_id
from tests.bed.settings import TRAIN_IMAGE, BedUnavailable
from tests.slurm.bed import install


def need(*programs: str, packages: tuple[str, ...]) -> None:
    """Skip or fail the test if the programs cannot be installed, or this machine's engine has no test image."""
    if image_id(TRAIN_IMAGE) is None:
        unavailable(f"no image {TRAIN_IMAGE} on this machine's engine: python -m tests.bed up")
    try:
        install(packages, programs, allowed=bool(os.environ.get("LAUNCHER_BED_REQUIRED")))
    except BedUnavailable as error:
        unavailable(str(error))


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Start an empty registry; yield its address `127.0.0.1:PORT`."""
    need("docker-registry", packages=("docker-registry",))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config, log = folder / "registry.yml", folder / "registry.log"
    storage = f"storage: {{filesystem: {{rootdirectory: {folder}/blobs}}}}"
    config.write_text(f"version: 0.1\n{storage}\nhttp: {{addr: '127.0.0.1:{port}'}}\n")
    with log.open("wb") as sink:
        server = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=sink, stderr=sink)
    try:
        deadline = time.monotonic() + 30
        while not _answers(port):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def forget(*repositories: str) -> None:
    """Remove all names in these repositories from this machine's engine."""
    for repository in repositories:
        listed = docker("images", "--digests", "--format", "{{.Tag}} {{.Digest}}", repository)
        for tag, digest in map(str.split, listed.splitlines()):
            docker("image", "rm", f"{repository}@{digest}" if tag == "<none>" else f"{repository}:{tag}")
