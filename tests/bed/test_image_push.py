"""`image build --with-code --push`: an image with the code in a registry, for what takes code from nowhere else."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed.fixtures import unavailable
from tests.bed.host import docker
from tests.bed.images import image_id
from tests.bed.settings import TRAIN_IMAGE, BedUnavailable
from tests.e2e.cli import Cli
from tests.slurm.bed import install

pytestmark = pytest.mark.bed


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Debian's docker-registry, empty, on this machine's loopback interface."""
    if image_id(TRAIN_IMAGE) is None:
        unavailable(f"no image {TRAIN_IMAGE} on this machine's engine: python -m tests.bed up")
    try:
        install(["docker-registry"], ["docker-registry"], allowed=bool(os.environ.get("LAUNCHER_BED_REQUIRED")))
    except BedUnavailable as error:
        unavailable(str(error))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = tmp_path / "registry.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {tmp_path}/blobs}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    with (tmp_path / "registry.log").open("wb") as log:
        server = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline, (tmp_path / "registry.log").read_text()
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


def test_an_image_with_the_code_is_pushed_and_named_by_its_digest(registry: str, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "package").mkdir(parents=True)
    word = uuid.uuid4().hex
    (project / "package" / "main.py").write_text(f"print('{word}')\n")
    cli = Cli(project, {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    run = {"script": "package/main.py"}
    name = f"push-{word[:8]}"
    file = cli.job(name, image={"ref": TRAIN_IMAGE}, nodes=2, gpus="none", run=run)
    try:
        pushed = [
            cli("image", "build", file, "--with-code", "--push", f"{registry}/team").stdout.splitlines()[-1]
            for _ in range(2)
        ]
        assert pushed[0] == pushed[1]
        assert pushed[0].startswith(f"{registry}/team/{name}@sha256:")
        remove(name, registry)
        run_it = ("run", "--rm", "--pull", "always", pushed[0], "python3", "package/main.py")
        assert docker(*run_it).split()[-1] == word
        assert pushed[0] in cli("export", file, "--to", "job", "--image", pushed[0]).stdout
    finally:
        remove(name, registry)


def remove(name: str, registry: str) -> None:
    """Every name of its images on this machine's engine."""
    for repository in (f"launcher/{name}-code", f"{registry}/team/{name}"):
        listed = docker("images", "--digests", "--format", "{{.Tag}} {{.Digest}}", repository)
        for tag, digest in map(str.split, listed.splitlines()):
            docker("image", "rm", f"{repository}@{digest}" if tag == "<none>" else f"{repository}:{tag}")


def test_a_registry_that_does_not_answer_is_named(tmp_path: Path) -> None:
    if image_id(TRAIN_IMAGE) is None:
        unavailable(f"no image {TRAIN_IMAGE} on this machine's engine: python -m tests.bed up")
    project = tmp_path / "project"
    project.mkdir()
    cli = Cli(project, {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    file = cli.job("push", image={"ref": TRAIN_IMAGE}, nodes=2, run={"command": ["true"]})
    failed = cli("image", "build", file, "--push", "127.0.0.1:1/team", code=4).stderr
    assert "could not push 127.0.0.1:1/team/push:" in failed
    assert "docker login" in failed
    assert "is no place in a registry" in cli("image", "build", file, "--push", "UPPER case", code=2).stderr
    remove("push", "127.0.0.1:1")
