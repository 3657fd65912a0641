"""Nodes whose engines have different image stores: the ids differ, the image must not."""

import json
import os
import subprocess

import pytest

from launcher.image.distribution import provide
from launcher.image.ensure import ensure
from launcher.image.image_locations import ImageLocations, same_image
from launcher.image.names import PARTIAL
from launcher.job.parts import Image
from launcher.node.connect import caller_engine, connect
from tests.bed import cluster
from tests.bed.fixtures import with_image_store
from tests.e2e.cli import Cli

pytestmark = pytest.mark.bed
NAME, OTHER = "launcher-test-stores:1", "launcher-test-stores:other"


class Log(list):
    def __call__(self, line):
        self.append(line)


@pytest.fixture(scope="module")
def stores(bed):
    with with_image_store(bed, bed.nodes[1:2], "containerd"):
        yield


@pytest.fixture
def mixed(clean_bed, stores):
    """node1 with a classic store, node2 with containerd's."""
    yield clean_bed
    subprocess.run(["docker", "image", "rm", "-f", NAME], capture_output=True, check=False)
    for node in clean_bed.nodes[:2]:
        clean_bed.run(node, "docker", "image", "rm", "-f", NAME, OTHER, check=False)


@pytest.fixture
def image(tmp_path):
    """Two layers on Debian, with a configuration."""
    (tmp_path / "x").write_bytes(os.urandom(3 << 20))
    lines = ["FROM launcher-bed-train", "COPY x /x", "ENV A=b", "WORKDIR /w", "LABEL c=d", 'CMD ["python3"]']
    (tmp_path / "Dockerfile").write_text("\n".join(lines) + "\n")
    subprocess.run(
        ["docker", "build", "-q", "-t", NAME, str(tmp_path)],
        env={**os.environ, "DOCKER_BUILDKIT": "0"}, check=True, capture_output=True,
    )  # fmt: skip
    return NAME


def hosts(bed, *ranks):
    return [(bed.nodes[rank].alias, bed.nodes[rank].alias) for rank in ranks]


def test_both_stores_get_the_same_image_under_different_ids(mixed, image):
    with connect(hosts(mixed, 0, 1), ssh_config=mixed.ssh_config) as fleet, caller_engine() as local:
        locations = ImageLocations(fleet.engines, local, Log())
        done = provide(image, locations)
        assert done.ids["node1"] == local.images.inspect(image).id == done.id
        assert done.ids["node2"] != done.id
        assert done.ids["node2"] == mixed.docker(mixed.nodes[1], "image", "inspect", "-f", "{{.Id}}", image)
        assert all(3 << 20 < sent < 4 << 20 for sent in done.shipped.values())  # Debian is on both
        again = provide(image, locations)
        assert again.shipped == {}
        assert again.ids == done.ids
        renamed = ensure(Image(ref=done.id), locations, job="x")  # an id that node2 does not know
        assert renamed.shipped == {}
        assert renamed.ids == done.ids


def test_one_more_package_sends_only_its_layer(mixed, image):
    """Also to a node whose base was loaded by `docker load` from an archive in docker's own format."""
    more = "launcher-test-stores:more"
    argv = ["docker", "build", "-q", "-t", more, "-"]
    text = f"FROM {image}\nRUN head -c 2000000 /dev/urandom >/more\n"
    subprocess.run(
        argv, input=text.encode(), env={**os.environ, "DOCKER_BUILDKIT": "0"}, check=True, capture_output=True
    )
    cluster.preload(mixed.settings, 2, image)
    with connect(hosts(mixed, 0, 1), ssh_config=mixed.ssh_config) as fleet, caller_engine() as local:
        try:
            provide(image, ImageLocations(fleet.engines, local, Log()))
            done = provide(more, ImageLocations(fleet.engines, local, Log()))
            assert all(2_000_000 < sent < 2_100_000 for sent in done.shipped.values())
            assert len(done.shipped) == 2
            for engine in fleet.engines:
                assert not engine.images.list({PARTIAL: None})
                engine.images.remove(more)
        finally:
            local.images.remove(more)


def test_another_configuration_is_another_image(mixed, image, tmp_path):
    """The same layers with a different environment are a different image in every store."""
    text = f"FROM {image}\nENV A=c\n"
    argv = ["docker", "build", "-q", "-t", OTHER, "-"]
    subprocess.run(
        argv, input=text.encode(), env={**os.environ, "DOCKER_BUILDKIT": "0"}, check=True, capture_output=True
    )
    with connect(hosts(mixed, 1), ssh_config=mixed.ssh_config) as fleet, caller_engine() as local:
        try:
            provide(OTHER, ImageLocations(fleet.engines, local, Log()))
            theirs, [node] = local.images.inspect(image), fleet.engines
            assert not same_image(node.images.inspect(OTHER), theirs)
            assert same_image(node.images.inspect(OTHER), local.images.inspect(OTHER))
            assert list(provide(image, ImageLocations(fleet.engines, local, Log())).shipped) == ["node2"]
        finally:
            local.images.remove(OTHER)


def test_from_a_containerd_store_to_a_classic_one(mixed, image):
    """The caller has no Docker; only node2 has the image, and it is read as usual."""
    with caller_engine() as local:
        with connect(hosts(mixed, 1), ssh_config=mixed.ssh_config) as fleet:
            provide(image, ImageLocations(fleet.engines, local, Log()))
        theirs = local.images.inspect(image)
        with connect(hosts(mixed, 0, 1), ssh_config=mixed.ssh_config) as fleet:
            done = provide(image, ImageLocations(fleet.engines, None, Log()))
            assert list(done.shipped) == ["node1"]
            assert done.ids["node1"] == theirs.id
            assert done.shipped["node1"] < 4 << 20  # Debian is on node1


def test_a_job_runs_on_both(mixed, image, tmp_path):
    cli = Cli(tmp_path, {"LAUNCHER_SSH_CONFIG": str(mixed.ssh_config)})
    job = cli.job(
        "stores", image={"ref": image}, nodes=["node1", "node2"], gpus="none",
        run={"command": ["sh", "-c", "echo A is $A; test $A = b"]}, timeout="2m",
    )  # fmt: skip
    done = cli("up", job)
    assert "A is b" in done.stdout
    [plan] = tmp_path.glob("runs/*/plan.json")
    images = [node["container"]["image"] for node in json.loads(plan.read_text())["nodes"]]
    assert len(set(images)) == 2
    cli("down", "stores")
