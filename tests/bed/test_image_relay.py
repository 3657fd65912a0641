"""Nodes that have an image serve the others as peers, so it leaves the launcher's machine only once.

Each with both kinds of image stores on the nodes.
"""

import contextlib
import dataclasses
import os
import subprocess
import threading
import uuid

import pytest

from launcher.errors import ImageShipFailed, LauncherError
from launcher.image import peers
from launcher.image.distribution import provide
from launcher.image.image_locations import ImageLocations, same_image
from launcher.image.peers import check_loaded, pull_archive, reachable_address, start_peer
from launcher.node.connect import caller_engine, connect
from tests.bed import cluster, faults
from tests.bed.bed import Bed
from tests.bed.fixtures import with_image_store

pytestmark = [pytest.mark.bed, pytest.mark.slow, pytest.mark.timeout(900)]
MIB = 1 << 20
SIZE = 100 * MIB


@pytest.fixture(scope="module", params=["classic", "containerd"])
def stores(bed, request):
    cluster.up(bed.settings, 4)
    grown = Bed.attach(bed.settings)
    with with_image_store(grown, grown.nodes[:4], request.param):
        yield grown


@pytest.fixture
def four(stores):
    stores.sweep()
    return stores


@pytest.fixture
def image(four, tmp_path):
    name = f"launcher-test-relay:{uuid.uuid4().hex[:12]}"
    lines = ["FROM launcher-bed-train"]
    for number in range(4):
        (tmp_path / str(number)).write_bytes(os.urandom(SIZE // 4))
        lines.append(f"COPY {number} /{number}")
    (tmp_path / "Dockerfile").write_text("\n".join(lines) + "\n")
    argv = ["env", "DOCKER_BUILDKIT=0", "docker", "build", "-q", "-t", name, str(tmp_path)]
    subprocess.run(argv, check=True, capture_output=True, timeout=300)
    yield name
    subprocess.run(["docker", "image", "rm", "-f", name], check=False, capture_output=True)
    for node in four.nodes[:4]:
        four.run(node, "docker", "image", "rm", "-f", name, check=False)
        four.run(node, "docker", "image", "prune", "-f", check=False)


class Log(list):
    def __call__(self, line):
        self.append(line)


@pytest.fixture
def fleet(four):
    hosts = [(node.alias, node.alias) for node in four.nodes[:4]]
    with connect(hosts, ssh_config=four.ssh_config) as connected:
        yield connected


def ids(bed, name):
    return {bed.docker(node, "image", "inspect", "-f", "{{.Id}}", name) for node in bed.nodes[:4]}


def clean(bed):
    """Asserts that no peer and no partial image is left on any node."""
    for node in bed.nodes[:4]:
        assert not bed.docker(node, "ps", "-aq")
        assert not bed.docker(node, "images", "-q", "--filter", "dangling=true")


def test_four_nodes_and_one_image_over_the_uplink(four, fleet, image, monkeypatch):
    monkeypatch.setenv(peers.VARIABLE, "4")
    monkeypatch.setattr(peers, "CHUNK", SIZE // 3)  # several parts
    log = Log()
    with caller_engine() as local:
        done = provide(image, ImageLocations(fleet.engines, local, log))
        assert same_image(fleet.engines[0].images.inspect(image), local.images.inspect(image))
    assert ids(four, image) == {done.id}
    print("\n".join(log))
    assert sorted(done.shipped) == ["node1", "node2", "node3", "node4"]
    assert SIZE < sum(done.shipped.values()) < 1.02 * SIZE
    assert sum("pulled it from node" in line for line in log) == 3
    clean(four)


def test_a_node_that_already_has_the_image_serves_it_and_nothing_is_pushed(four, fleet, image, monkeypatch):
    monkeypatch.setenv(peers.VARIABLE, "3")
    with caller_engine() as local:
        provide(image, ImageLocations(fleet.engines[2:3], local, Log()))
        done = provide(image, ImageLocations(fleet.engines, local, Log()))
    assert done.shipped == {"node1": 0, "node2": 0, "node4": 0}
    assert ids(four, image) == {done.id}
    clean(four)


def test_a_node_that_reaches_no_peer_is_served_by_the_launcher(four, fleet, image, monkeypatch):
    monkeypatch.setenv(peers.VARIABLE, "4")
    log = Log()
    with faults.partition(four, four.nodes[3], four.nodes[0]), caller_engine() as local:
        done = provide(image, ImageLocations(fleet.engines, local, log))
    assert ids(four, image) == {done.id}
    print("\n".join(log))
    assert sum(sent > 0 for sent in done.shipped.values()) <= 2
    assert done.shipped["node4"] > SIZE or any("node4 pulled it from node" in line for line in log)
    clean(four)


def test_a_lost_first_node_is_named_and_the_others_get_the_image(four, fleet, image, monkeypatch):
    monkeypatch.setenv(peers.VARIABLE, "4")
    once = threading.Event()
    with contextlib.ExitStack() as healing, caller_engine() as local:

        def on_progress(at, so_far, total):
            if at == "node1" and so_far * 2 > total and not once.is_set():
                once.set()
                healing.enter_context(faults.without_engine(four, four.nodes[0]))

        with pytest.raises(LauncherError, match="node1"):
            provide(image, ImageLocations(fleet.engines, local, Log(), on_progress))
    found = [four.run(node, "docker", "image", "inspect", image, check=False).returncode for node in four.nodes[:4]]
    assert found == [1, 0, 0, 0]


STRANGER = """
exec 3<>/dev/tcp/$1/$2; read -r hello <&3
echo "00 0 1000000 $(printf 0 | sha256sum | cut -c1-64)" >&3; wc -c <&3
"""


@pytest.fixture
def served(four, fleet, image):
    """(the peer on node1, its address, the image's id): node2 is a client."""
    with caller_engine() as local:
        done = provide(image, ImageLocations(fleet.engines[:1], local, Log()))
    with contextlib.closing(start_peer(fleet.engines[0], done.id, [four.nodes[0].address])) as peer:
        address = reachable_address(fleet.engines[1], peer)
        assert address == four.nodes[0].address
        yield peer, address, done.id
    assert not four.docker(four.nodes[0], "ps", "-aq")


def test_a_client_without_the_token_gets_nothing(four, fleet, served):
    peer, address, image_id = served
    assert four.run(four.nodes[1], "bash", "-c", STRANGER, "-", address, str(peer.port)).stdout.strip() == "0"
    assert peer.token not in four.run(four.nodes[0], "ps", "axww").stdout
    pull_archive(fleet.engines[1], peer, address, 0, 1 << 40)
    assert four.docker(four.nodes[1], "images", "-aq", "--no-trunc").split().count(image_id) == 1


def test_a_wrong_image_is_removed(four, fleet, served):
    """An untrusted peer that knows the token and sends valid hashes."""
    peer, address, image_id = served
    with caller_engine() as local:
        base = local.images.inspect("debian:bookworm-slim")
    assert base
    wanted = dataclasses.replace(base, layers=("sha256:" + "0" * 64,))
    loaded = pull_archive(fleet.engines[1], peer, address, 0, 1 << 40)
    assert loaded == [image_id]
    wanted = dataclasses.replace(wanted, id="sha256:" + "1" * 64, content="1")
    for before, stays in (([image_id], True), ([], False)):
        with pytest.raises(ImageShipFailed, match="received an unexpected image"):
            check_loaded(fleet.engines[1], wanted, loaded, before)
        assert (image_id in four.docker(four.nodes[1], "images", "-aq", "--no-trunc")) == stays
