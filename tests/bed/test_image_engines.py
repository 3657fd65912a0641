"""Engines other than rootful Docker: they get missing layers as usual; the launcher sends images in their place."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.image import peers
from launcher.image.distribution import provide
from launcher.image.image_locations import ImageLocations
from launcher.image.push import remember_link
from launcher.node.connect import caller_engine, connect
from tests.bed import faults
from tests.bed.bed import Bed
from tests.bed.fixtures import unavailable
from tests.bed.settings import TRAIN_IMAGE, BedUnavailable

pytestmark = [pytest.mark.bed, pytest.mark.slow, pytest.mark.timeout(600)]
MORE, MEGABYTE = "launcher-test-engines:1", 10**6


@pytest.fixture(params=["rootless", "podman"])
def engine(clean_bed: Bed, request: pytest.FixtureRequest) -> Iterator[str]:
    """What both nodes have, empty."""
    engines = {"rootless": faults.rootless_engine, "podman": faults.podman_engine}
    try:
        with engines[request.param](clean_bed, *clean_bed.nodes[:2]):
            yield request.param
    except BedUnavailable as reason:
        unavailable(str(reason))


@pytest.fixture
def more() -> Iterator[str]:
    """An image with two megabytes on top of Debian."""
    text = f"FROM {TRAIN_IMAGE}\nRUN head -c {2 * MEGABYTE} /dev/urandom >/more\n"
    argv = ["docker", "build", "-q", "-t", MORE, "-"]
    environment = {**os.environ, "DOCKER_BUILDKIT": "0"}
    subprocess.run(argv, input=text.encode(), env=environment, check=True, capture_output=True)
    yield MORE
    subprocess.run(["docker", "image", "rm", MORE], check=True, capture_output=True)


def test_missing_layers_are_sent_and_peers_replaced(
    clean_bed: Bed, engine: str, more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hosts = [(node.alias, node.alias) for node in clean_bed.nodes[:2]]
    log: list[str] = []
    with connect(hosts, ssh_config=clean_bed.ssh_config) as fleet, caller_engine() as local:
        found = [(facts.engine.kind, facts.engine.rootless) for facts in fleet.facts() if facts.engine]
        assert found == [("podman", False) if engine == "podman" else ("Docker", True)] * 2
        for each in fleet.engines:  # as slow: would be compressed, which podman refuses
            remember_link(each.host, 16 * MEGABYTE, 100.0)
        provide(TRAIN_IMAGE, ImageLocations(fleet.engines, local, log.append))
        done = provide(more, ImageLocations(fleet.engines[:1], local, log.append))
        assert 2 * MEGABYTE < done.shipped["node1"] < 2.1 * MEGABYTE
        done = provide(more, ImageLocations(fleet.engines, None, log.append))
        assert (done.shipped["node2"] < 2.1 * MEGABYTE) == (engine == "rootless")  # podman's store is not read

        for name in (more, TRAIN_IMAGE):
            clean_bed.ssh("node2", "docker", "image", "rm", name)
        monkeypatch.setenv(peers.VARIABLE, "1")
        done = provide(more, ImageLocations(fleet.engines, local, log.append))
        assert done.shipped["node2"] > 10 * MEGABYTE  # all of it, compressed if the link was slow
        reason = {"rootless": "node2 cannot connect to node1", "podman": "node1 cannot serve it"}[engine]
        assert any(reason in line for line in log)
    assert clean_bed.ssh("node1", "docker", "ps", "-aq").stdout == ""
