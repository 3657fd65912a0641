"""Nodes that reach a registry pull images themselves, by digest, with the caller's login, which is not stored there."""

import base64
import json
import time
import uuid

import pytest

from launcher.errors import ImageUnfit
from launcher.image import lock
from launcher.image.distribution import provide
from launcher.image.ensure import ensure
from launcher.image.image_locations import ImageLocations
from launcher.job.parts import Image
from launcher.node.connect import caller_engine, connect
from tests.bed import laptop, registry
from tests.bed.host import docker

pytestmark = pytest.mark.bed


class Log(list):
    def __call__(self, line):
        self.append(line)


@pytest.fixture
def local():
    with caller_engine() as engine:
        assert engine is not None
        yield engine


@pytest.fixture
def published(clean_bed, tmp_path, monkeypatch):
    """(registry, name, port): an image only in a registry with a password, reachable from here and from the nodes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tag = f"launcher-test-pull:{uuid.uuid4().hex[:8]}"
    (tmp_path / "Dockerfile").write_text(f"FROM launcher-bed-train\nRUN echo {tag} >/pulled\n")
    docker("build", "-q", "-t", tag, str(tmp_path))
    docker("save", "-o", str(tmp_path / "saved.tar"), tag)
    docker("image", "rm", tag)
    served = registry.Registry(tmp_path / "saved.tar")
    aliases = [node.alias for node in clean_bed.nodes[:2]]
    with registry.serving(served) as port, registry.forwarded(clean_bed.ssh_config, aliases, port):
        for alias in aliases:
            wait_for_port(clean_bed, alias, port)
        yield served, f"127.0.0.1:{port}/test/x:1", port
    for node in clean_bed.nodes[:2]:
        for image in clean_bed.docker(node, "images", "-q", f"127.0.0.1:{port}/test/x").split():
            clean_bed.run(node, "docker", "image", "rm", "-f", image, check=False)


def wait_for_port(bed, alias, port, limit=10.0):
    deadline = time.monotonic() + limit
    while bed.ssh(alias, "bash", "-c", f"'exec 3<>/dev/tcp/127.0.0.1/{port}'", check=False).returncode:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def log_in(tmp_path, monkeypatch, port):
    folder = tmp_path / "docker-config"
    folder.mkdir()
    login = base64.b64encode(f"{registry.USER}:{registry.PASSWORD}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {f"127.0.0.1:{port}": {"auth": login}}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))


def engines_of(bed):
    return connect([(node.alias, node.alias) for node in bed.nodes[:2]], ssh_config=bed.ssh_config)


def test_every_node_pulls_the_same_digest_and_the_login_is_not_stored_there(
    clean_bed, local, published, tmp_path, monkeypatch
):
    served, name, port = published
    log_in(tmp_path, monkeypatch, port)
    log = Log()
    with engines_of(clean_bed) as fleet:
        done = provide(name, ImageLocations(fleet.engines, local, log))
        assert done.shipped == {}
        assert {engine.images.inspect(name).id for engine in fleet.engines} == {done.id}
    assert any(f"@{served.digest}" in line for line in log)
    for node in clean_bed.nodes[:2]:
        found = clean_bed.sh(node, "grep -rls s3cret /home /root /etc/docker /var/lib/docker/containers || true")
        assert found == ""


def test_without_a_login_the_registrys_refusal_is_reported(clean_bed, local, published, tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with engines_of(clean_bed) as fleet, pytest.raises(ImageUnfit, match="docker login") as refusal:
        provide(published[1], ImageLocations(fleet.engines, local, Log()))
    assert refusal.value.exit_code == 4


def test_a_node_pulls_an_image_that_the_caller_has_from_a_registry(clean_bed, local, published, tmp_path, monkeypatch):
    _, name, port = published
    log_in(tmp_path, monkeypatch, port)
    local.images.pull(name, {"username": registry.USER, "password": registry.PASSWORD})
    try:
        with engines_of(clean_bed) as fleet:
            done = provide(name, ImageLocations(fleet.engines, local, Log()))
        assert done.shipped == {}
    finally:
        docker("image", "rm", "-f", name)


def test_a_lock_file_pins_a_base_whose_tag_moves(clean_bed, local, published, tmp_path, monkeypatch):
    """The locked image is used, and pulled by digest, even though the tag has moved to another image."""
    served, name, port = published
    log_in(tmp_path, monkeypatch, port)
    requested = Image.model_validate({"base": name, "torchvision": "keep"})
    path = lock.lock_path(tmp_path / "job.yaml")
    with engines_of(clean_bed) as fleet:
        first = ensure(requested, ImageLocations(fleet.engines, None, Log()), job="pull-test", lock_file=path)
        locked = lock.read(path)
        assert (locked.base_digest, locked.base_id) == (served.digest, first.id)
        for engine in fleet.engines:
            engine.images.tag("launcher-bed-train", name)  # the tag is another image now
        again = ensure(requested, ImageLocations(fleet.engines, None, Log()), job="pull-test", lock_file=path)
        assert again.id == first.id
        for engine in fleet.engines:
            engine.images.remove(first.id)
        pulled = ensure(requested, ImageLocations(fleet.engines, None, Log()), job="pull-test", lock_file=path)
        assert pulled.id == first.id  # by digest, although the tag says otherwise


def test_an_image_for_another_architecture_is_refused_before_it_is_pulled(clean_bed, local, tmp_path, monkeypatch):
    """An engine would pull all of it, with a warning, and its programs would end with `exec format error`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    laptop.load_foreign(tmp_path, name := f"launcher-test-arm:{uuid.uuid4().hex[:8]}")
    docker("image", "rm", name)
    aliases = [node.alias for node in clean_bed.nodes[:2]]
    with registry.serving(registry.Registry(tmp_path / "foreign.tar")) as port:
        log_in(tmp_path, monkeypatch, port)
        with registry.forwarded(clean_bed.ssh_config, aliases, port), engines_of(clean_bed) as fleet:
            for alias in aliases:
                wait_for_port(clean_bed, alias, port)
            with pytest.raises(ImageUnfit, match="is for arm64, but this node needs amd64"):
                provide(f"127.0.0.1:{port}/test/x:1", ImageLocations(fleet.engines, None, Log()))
    for node in clean_bed.nodes[:2]:
        assert not clean_bed.docker(node, "images", "-q", f"127.0.0.1:{port}/test/x")
