"""Runs on nodes that have podman's Docker API instead of Docker."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.bed import faults
from tests.bed.bed import Bed
from tests.bed.fixtures import unavailable
from tests.bed.settings import TRAIN_IMAGE, BedUnavailable
from tests.e2e.cli import Cli, bed_job

pytestmark = [pytest.mark.bed, pytest.mark.slow, pytest.mark.timeout(600)]
MORE = "launcher-test-podman:1"


@pytest.fixture
def podman_bed(clean_bed: Bed) -> Iterator[Bed]:
    nodes = clean_bed.nodes[:2]
    try:
        with faults.podman_engine(clean_bed, *nodes):
            yield clean_bed
    except BedUnavailable as reason:
        unavailable(str(reason))


def podman(bed: Bed, *argv: str) -> list[str]:
    return [line for node in bed.nodes[:2] for line in bed.run(node, "podman", *argv).stdout.splitlines()]


def test_two_nodes_train_on_podman(bed_cli: Cli, podman_bed: Bed) -> None:
    """Train twice, the second time with one more layer in the image; nothing is left afterwards."""
    seen = json.loads(bed_cli("doctor", "node1", "node2", "--json").stdout)
    engines = [check["what"] for check in seen["checks"] if check["name"] == "engine"]
    assert len(engines) == 2
    assert all(what.startswith("podman 4.") and "podman's image store" in what for what in engines)

    bed_cli.program("plain.py")
    file = bed_cli.job("podman", **bed_job(run={"script": "plain.py"}))
    assert "restarts cannot be followed" in bed_cli("up", file, "--set", "restarts=2", code=3).stderr
    assert "rank 0 of 2: sum 3" in bed_cli("up", file).stdout

    text = f"FROM {TRAIN_IMAGE}\nRUN head -c 2000000 /dev/urandom >/more\n"
    subprocess.run(
        ["docker", "build", "-q", "-t", MORE, "-"],
        input=text.encode(), env={**os.environ, "DOCKER_BUILDKIT": "0"}, check=True, capture_output=True,
    )  # fmt: skip
    try:
        keys = bed_job(run={"script": "plain.py"}) | {"image": {"ref": MORE}}
        assert "rank 0 of 2: sum 3" in bed_cli("up", bed_cli.job("more", **keys)).stdout
    finally:
        subprocess.run(["docker", "image", "rm", MORE], check=True, capture_output=True)
    assert "rank 0 of 2" in bed_cli("logs", "more", "--no-follow").stdout
    for name in ("podman", "more"):
        bed_cli("down", name, "--purge")
    assert podman(podman_bed, "ps", "-aq") == []
    left = podman_bed.wait_clean(podman_bed.nodes[:2], home=True)
    assert [line for line in left if "podman" not in line and "/libpod_lock" not in line] == []  # podman's own files
