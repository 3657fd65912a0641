"""Getting images to real nodes: what is sent, from which node, and every way it can fail."""

import contextlib
import os
import subprocess
import tarfile
import threading
import uuid

import pytest

from launcher.errors import EngineUnavailable, ImageShipFailed, ImageUnfit, NodesFailed, NodeUnreachable
from launcher.image import export
from launcher.image.distribution import provide
from launcher.image.image_locations import ImageLocations
from launcher.image.push import push
from launcher.node.connect import caller_engine, connect
from launcher.node.docker.values import tool_argv
from launcher.run.end.leftovers import find_leftovers, remove_leftovers, unused_images
from tests.bed import faults
from tests.bed.host import docker

pytestmark = pytest.mark.bed
BASE = "launcher-bed-train"  # on every node
MIB = 1 << 20


@pytest.fixture
def engines(clean_bed):
    hosts = [(node.alias, node.alias) for node in clean_bed.nodes[:2]]
    with connect(hosts, ssh_config=clean_bed.ssh_config) as fleet:
        yield fleet.engines


@pytest.fixture
def local():
    with caller_engine() as engine:
        assert engine is not None
        yield engine


@pytest.fixture
def make(clean_bed, tmp_path):
    """Builds an image with random layers of these sizes (MiB) on top of another; removed everywhere afterwards."""
    made = []

    def build(*layers, base=BASE, name=None, where=None):
        name = name or f"launcher-test-ship:{uuid.uuid4().hex[:12]}"
        folder = tmp_path / uuid.uuid4().hex
        folder.mkdir()
        lines = [f"FROM {base}"]
        for number, size in enumerate(layers):
            (folder / f"{number}").write_bytes(os.urandom(int(size * MIB)))
            lines.append(f"COPY {number} /layer-{uuid.uuid4().hex}")
        (folder / "Dockerfile").write_text("\n".join(lines) + "\n")
        subprocess.run(
            ["docker", "build", "-q", "-t", name, str(folder)],
            check=True, capture_output=True, env={**os.environ, "DOCKER_BUILDKIT": "0"}, timeout=120,
        )  # fmt: skip
        made.append(name)
        return name

    yield build
    for name in reversed(made):
        subprocess.run(["docker", "image", "rm", "-f", name], capture_output=True, check=False, timeout=60)
        for node in clean_bed.nodes[:2]:
            clean_bed.run(node, "docker", "image", "rm", "-f", name, check=False)
    for node in clean_bed.nodes[:2]:
        clean_bed.run(node, "docker", "image", "prune", "-f", check=False)


def ids(bed, name):
    return [bed.docker(node, "image", "inspect", "-f", "{{.Id}}", name) for node in bed.nodes[:2]]


def untagged(bed, node):
    """Images without a name, which an incomplete load could leave."""
    return bed.docker(node, "images", "-q", "--filter", "dangling=true").split()


class Log(list):
    def __call__(self, line):
        self.append(line)


def test_only_missing_layers_are_sent_and_all_nodes_get_the_same_image(clean_bed, engines, local, make):
    name = make(20, 5)
    done = provide(name, ImageLocations(engines, local, Log()))
    assert set(ids(clean_bed, name)) == {done.id} == {docker("image", "inspect", "-f", "{{.Id}}", name)}
    for sent in done.shipped.values():
        assert 25 * MIB < sent <= 25 * MIB * 1.02  # Debian's 145 MB are already there

    again = provide(name, ImageLocations(engines, local, Log()))
    assert again.shipped == {}


def test_adding_a_layer_sends_only_that_layer(engines, local, make):
    first = make(20)
    provide(first, ImageLocations(engines, local, Log()))
    done = provide(make(2, base=first), ImageLocations(engines, local, Log()))
    assert all(2 * MIB < sent <= 2 * MIB * 1.05 for sent in done.shipped.values())


def test_a_repeated_layer(engines, local, make, tmp_path):
    """Empty layers repeat in real images; older engines write such a layer once and link to it."""
    name = f"launcher-test-ship:{uuid.uuid4().hex[:12]}"
    (tmp_path / "Dockerfile").write_text(f"FROM {make(1)}\nRUN touch -d @0 /x\nRUN rm /x\nRUN touch -d @0 /x\n")
    subprocess.run(["docker", "build", "-q", "-t", name, str(tmp_path)], check=True, capture_output=True)
    try:
        done = provide(name, ImageLocations(engines, local, Log()))
        assert len(done.shipped) == 2
    finally:
        docker("image", "rm", name)


def test_a_large_image_is_sent_in_parts_and_resumes_after_a_lost_connection(
    clean_bed, engines, local, make, monkeypatch
):
    # after every piece, so that the fault is in the middle of a part: after its end, its loss looks like a rejection
    monkeypatch.setattr("launcher.image.push.PROGRESS_INTERVAL", 0)
    name = make(30, 30, 30)
    info = local.images.inspect(name)
    node = clean_bed.nodes[0]
    cut = threading.Event()

    def on_progress(at, so_far, total):
        if at == "node1" and so_far > 75 * MIB and not cut.is_set():
            cut.set()
            faults.kill_ssh_sessions(clean_bed, node)

    sent = push(local, info, name, engines, on_progress, chunk=25 * MIB)
    assert cut.is_set()
    assert set(ids(clean_bed, name)) == {info.id}
    assert sent["node2"] < 91 * MIB
    assert sent["node1"] < 150 * MIB  # 90 plus the interrupted part, not twice 90
    for each in clean_bed.nodes[:2]:
        assert not untagged(clean_bed, each)  # no parts are left


def test_parts_of_an_unfinished_image_are_leftovers(clean_bed, engines, local, make, monkeypatch):
    monkeypatch.setattr(
        "launcher.image.push.PROGRESS_INTERVAL", 0
    )  # after every piece, so that the fault is never too late
    name = make(20, 20, 20, 20)
    info = local.images.inspect(name)
    node = clean_bed.nodes[0]
    with contextlib.ExitStack() as healing:
        once = threading.Event()

        def on_progress(at, so_far, total):
            if so_far > 50 * MIB and not once.is_set():
                once.set()
                healing.enter_context(faults.without_sshd(clean_bed, node))

        with pytest.raises(NodesFailed, match="node1"):
            push(local, info, name, engines[:1], on_progress, chunk=10 * MIB)
    with connect([(node.alias, node.alias)], ssh_config=clean_bed.ssh_config) as fleet:
        parts = unused_images(fleet.engines[0])
        assert parts
        assert not any(part.tags for part in parts)
        (found,) = find_leftovers(fleet.engines, [])
        remove_leftovers(found)
        assert unused_images(fleet.engines[0]) == []
    assert not untagged(clean_bed, node)


def test_a_node_gets_the_image_from_another_node_if_the_caller_has_no_docker(clean_bed, engines, local, make):
    name = make(5)
    provide(name, ImageLocations(engines[:1], local, Log()))
    log = Log()
    done = provide(name, ImageLocations(engines, None, log))
    assert list(done.shipped) == ["node2"]
    assert any("from node1 to node2" in line for line in log)
    assert len(set(ids(clean_bed, name))) == 1


def test_the_callers_image_replaces_one_of_the_same_name_and_this_is_reported(clean_bed, engines, local, make):
    name = make(1)
    provide(name, ImageLocations(engines, local, Log()))
    make(1, name=name)
    log = Log()
    done = provide(name, ImageLocations(engines, local, log))
    assert set(ids(clean_bed, name)) == {done.id}
    assert any("node1, node2 had a different" in line for line in log)


def test_an_image_that_exists_nowhere_is_refused(engines, local):
    with pytest.raises(ImageUnfit, match="was not found on node1, node2 or on this machine") as refusal:
        provide("launcher/none:0123", ImageLocations(engines, local, Log()))
    assert refusal.value.exit_code == 4
    assert refusal.value.next_step


def test_layers_read_from_the_store_equal_those_of_docker_save(local, make, tmp_path):
    """Read directly, through a container, and by the engine, the layers are the same."""
    name = make(3, 1)
    info = local.images.inspect(name)
    [store] = export.stores(local)

    def layers(pieces):
        path = tmp_path / uuid.uuid4().hex
        with path.open("wb") as out:
            for piece in pieces:
                out.write(piece)
        with tarfile.open(path) as found:
            sizes = [member.size for member in found if "blobs/" in member.name or "layer.tar" in member.name]
        return sorted(size for size in sizes if size > 100_000)  # without the metadata of the image

    saved = layers(local.images.save(info.id))
    assert len(saved) >= 3
    container = tool_argv(store.tool(info.id, "0", str(1 << 40)), f"test-{uuid.uuid4().hex}", os.getuid())
    found = subprocess.run(container, check=True, capture_output=True).stdout
    assert layers([found]) == saved
    if os.geteuid() == 0:
        direct = subprocess.run(store.direct(info.id, "0", str(1 << 40)), check=True, capture_output=True).stdout
        assert direct == found


def at_half(action):
    """Calls `action` once, when half of the image has been sent."""
    once = threading.Event()

    def on_progress(at, so_far, total):
        if so_far * 2 > total and not once.is_set():
            once.set()
            action()

    return on_progress


def test_a_connection_lost_halfway_is_recovered(clean_bed, engines, local, make):
    name = make(60, 60)
    node = clean_bed.nodes[0]
    done = provide(
        name, ImageLocations(engines, local, Log(), at_half(lambda: faults.kill_ssh_sessions(clean_bed, node)))
    )
    assert set(ids(clean_bed, name)) == {done.id}
    assert not untagged(clean_bed, node)
    assert done.shipped["node1"] > done.shipped["node2"]  # bytes sent in vain are counted too


@pytest.mark.parametrize("fault", [pytest.param("sshd gone", marks=pytest.mark.slow), "engine killed"])
def test_a_lost_node_is_named_keeps_no_partial_image_and_a_retry_succeeds(clean_bed, engines, local, make, fault):
    name = make(60, 60)
    node = clean_bed.nodes[0]
    with contextlib.ExitStack() as healing:
        broken = faults.without_sshd if fault == "sshd gone" else faults.without_engine

        def break_it():
            healing.enter_context(broken(clean_bed, node))

        with pytest.raises(NodesFailed) as failure:
            provide(name, ImageLocations(engines, local, Log(), at_half(break_it)))
    assert isinstance(failure.value.errors[0], (ImageShipFailed, NodeUnreachable, EngineUnavailable))
    assert "node1" in str(failure.value)
    assert "node2" not in str(failure.value)
    assert ids_or_none(clean_bed, clean_bed.nodes[1], name)  # the other one has it
    assert not ids_or_none(clean_bed, node, name)
    assert not untagged(clean_bed, node)
    hosts = [(n.alias, n.alias) for n in clean_bed.nodes[:2]]
    with connect(hosts, ssh_config=clean_bed.ssh_config) as fleet:
        done = provide(name, ImageLocations(fleet.engines, local, Log()))
    assert list(done.shipped) == ["node1"]
    assert set(ids(clean_bed, name)) == {done.id}


def ids_or_none(bed, node, name):
    return bed.run(node, "docker", "image", "inspect", "-f", "{{.Id}}", name, check=False).stdout.strip()


def test_a_full_disk_is_reported_and_the_other_node_gets_the_image(clean_bed, local, make):
    name = make(60, 60)
    node = clean_bed.nodes[0]
    hosts = [(n.alias, n.alias) for n in clean_bed.nodes[:2]]
    with faults.small_data_root(clean_bed, node, "90m"):
        with connect(hosts, ssh_config=clean_bed.ssh_config) as fleet, pytest.raises(NodesFailed) as failure:
            provide(name, ImageLocations(fleet.engines, local, Log()))
        assert "node1" in str(failure.value)
        assert "disk is full" in str(failure.value)
        assert not clean_bed.docker(node, "images", "-aq")
        used = clean_bed.sh(node, "du -sm /var/lib/docker | cut -f1")
        assert int(used) < 20
    assert ids_or_none(clean_bed, clean_bed.nodes[1], name)
    with connect(hosts, ssh_config=clean_bed.ssh_config) as fleet:
        assert list(provide(name, ImageLocations(fleet.engines, local, Log())).shipped) == ["node1"]
