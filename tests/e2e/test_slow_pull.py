"""Pulling an image from a slow registry: the progress bar grows to the image's size; Ctrl-C leaves nothing."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed import registry
from tests.bed.bed import Bed
from tests.bed.host import docker
from tests.bed.test_image_pull import log_in, wait_for_port
from tests.e2e.cli import Cli, bed_job
from tests.e2e.terminal import Person

pytestmark = [pytest.mark.bed, pytest.mark.timeout(120)]
RATE = 1_500_000  # bytes per second and layer
LAYERS = (2_600_000, 1_300_000)


@pytest.fixture
def published(
    clean_bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[registry.Registry, str]]:
    """Return registry and name of an image with two layers in a slow registry that the first node can reach."""
    tag, context = f"launcher-test-slow:{uuid.uuid4().hex[:8]}", tmp_path / "context"
    context.mkdir()
    for index, size in enumerate(LAYERS):
        (context / str(index)).write_bytes(os.urandom(size))
    (context / "Dockerfile").write_text("FROM scratch\nCOPY 0 /0\nCOPY 1 /1\n")
    docker("build", "-q", "-t", tag, str(context))
    docker("save", "-o", str(tmp_path / "saved.tar"), tag)
    docker("image", "rm", tag)
    served, node = registry.Registry(tmp_path / "saved.tar"), clean_bed.nodes[0]
    served.rate = RATE
    with registry.serving(served) as port, registry.forwarded(clean_bed.ssh_config, [node.alias], port):
        wait_for_port(clean_bed, node.alias, port)
        log_in(tmp_path, monkeypatch, port)
        yield served, f"127.0.0.1:{port}/test/x:1"
        for image in clean_bed.docker(node, "images", "-q", f"127.0.0.1:{port}/test/x").split():
            clean_bed.run(node, "docker", "image", "rm", "-f", image, check=False)


def shown_megabytes(screen: str) -> list[tuple[float, float]]:
    return [(float(done), float(total)) for done, total in re.findall(r"(\d+\.\d)/(\d+\.\d) MB", screen)]


def test_the_bar_grows_to_the_images_size_and_ctrl_c_leaves_nothing(
    bed_cli: Cli, clean_bed: Bed, published: tuple[registry.Registry, str]
) -> None:
    (served, name), node = published, clean_bed.nodes[0]
    job = bed_cli.job("slow", **bed_job(nodes=[node.alias], image={"ref": name}, run={"command": ["true"]}))
    before = clean_bed.docker(node, "images", "-a", "--no-trunc")

    person = Person(bed_cli, "image", "ship", job)
    person.sees(r"[1-9]\.\d/\d\.\d MB")
    person.type("\x03")
    began = time.monotonic()
    code = person.end()
    took = time.monotonic() - began
    print(f"Ctrl-C during a pull: exit {code} after {took:.2f} s")
    assert code == 5
    assert took < 5  # 1 s on an idle machine
    deadline = time.monotonic() + 30
    while not served.broken:  # the engine stops pulling too
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert clean_bed.docker(node, "images", "-a", "--no-trunc") == before

    person = Person(bed_cli, "image", "ship", job)
    assert person.end() == 0, person.seen
    bytes_ = [done for done, _ in shown_megabytes(person.seen)]
    size = round(sum(LAYERS) / 1e6, 1)
    assert bytes_ == sorted(bytes_)
    assert len(set(bytes_)) > 5
    assert shown_megabytes(person.seen)[-1] == pytest.approx((size, size), abs=0.11)
    assert "MB/s" in person.seen
    assert name in clean_bed.docker(node, "images", "--format", "{{.Repository}}:{{.Tag}}")
