"""Faults while `launcher up` transfers an image: a clear error or none, and the next `up` succeeds.

Each test runs with both kinds of image stores on the nodes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.image import peers
from launcher.image.names import PARTIAL
from tests.bed import faults
from tests.bed.bed import Bed, Node
from tests.bed.fixtures import with_image_store
from tests.e2e.cli import Cli

pytestmark = [pytest.mark.bed, pytest.mark.slow, pytest.mark.timeout(600)]
MIB = 1 << 20
LAYERS, LAYER = 3, 130 * MIB
IMAGE = LAYERS * LAYER
# Run on the node: wait until one `docker load` has received $1 bytes; the second of two gets two thirds.
WAIT = """
while :; do
  for p in $(pgrep -x docker); do
    taken=$(sed -n 's/^rchar: //p' "/proc/$p/io" 2>/dev/null)
    [ "${taken:-0}" -gt "$1" ] && exit
  done
  sleep 0.02
done
"""


@pytest.fixture(params=["classic", "containerd"])
def clean_bed(clean_bed: Bed, request: pytest.FixtureRequest) -> Iterator[Bed]:
    with with_image_store(clean_bed, clean_bed.nodes[:2], request.param):
        yield clean_bed


@pytest.fixture
def image(clean_bed: Bed, tmp_path: Path) -> Iterator[str]:
    """Build an image with random layers on top of an image that every node has."""
    name = f"launcher-test-faults:{uuid.uuid4().hex[:12]}"
    lines = ["FROM launcher-bed-train"]
    for number in range(LAYERS):
        (tmp_path / str(number)).write_bytes(os.urandom(LAYER))
        lines.append(f"COPY {number} /{number}")
    (tmp_path / "Dockerfile").write_text("\n".join(lines) + "\n")
    argv = ["env", "DOCKER_BUILDKIT=0", "docker", "build", "-q", "-t", name, str(tmp_path)]
    subprocess.run(argv, check=True, capture_output=True, timeout=300)
    yield name
    subprocess.run(["docker", "image", "rm", "-f", name], check=False, capture_output=True)
    for node in clean_bed.nodes[:2]:
        clean_bed.run(node, "docker", "image", "rm", "-f", name, check=False)
        clean_bed.run(node, "docker", "image", "prune", "-f", check=False)


@pytest.fixture
def cli(clean_bed: Bed, tmp_path: Path) -> Cli:
    folder = tmp_path / "project"
    folder.mkdir()
    # an empty cache: earlier measurements must not affect parts or compression
    return Cli(folder, {"LAUNCHER_SSH_CONFIG": str(clean_bed.ssh_config), "XDG_CACHE_HOME": str(tmp_path / "cache")})


def job(cli: Cli, image: str) -> Path:
    return cli.job("faults", image={"ref": image}, nodes=["node1", "node2"], gpus="none",
                   run={"command": ["echo", "it ran"]}, timeout="2m")  # fmt: skip


def wait_for(bed: Bed, node: Node, fraction: float) -> None:
    bed.run(node, "timeout", "300", "sh", "-c", WAIT, "sh", str(int(IMAGE * fraction)), timeout=310)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out + err


def untagged(bed: Bed, node: Node) -> list[str]:
    return bed.docker(node, "images", "-q", "--filter", "dangling=true").split()


def parts(bed: Bed, node: Node) -> list[str]:
    return bed.docker(node, "images", "-q", "--filter", "dangling=true", "--filter", f"label={PARTIAL}").split()


def megabytes(bed: Bed, node: Node) -> int:
    return int(bed.sh(node, f"du -sm {faults.DATA_ROOT} | cut -f1"))


def succeeds(bed: Bed, cli: Cli, file: Path, image: str) -> None:
    """Run the next `up`: the job runs, all nodes have the same image, and no partial image remains."""
    assert "it ran" in cli("up", file, timeout=300).stdout
    cli("down", "faults")
    found = {bed.docker(node, "image", "inspect", "-f", "{{.Id}}", image) for node in bed.nodes[:2]}
    assert len(found) == 1
    for node in bed.nodes[:2]:
        assert not untagged(bed, node)


def test_ssh_is_lost_during_a_transfer(clean_bed: Bed, cli: Cli, image: str) -> None:
    """The same `up` recovers from it."""
    file, node = job(cli, image), clean_bed.nodes[0]
    process = cli.start("up", file)
    wait_for(clean_bed, node, 0.5)
    faults.kill_ssh_sessions(clean_bed, node)
    code, output = end(process)
    # The image has one connection, the run another: both were lost, and both are re-established.
    assert code == 0, output
    assert "it ran" in output
    cli("down", "faults")
    succeeds(clean_bed, cli, file, image)


@pytest.mark.parametrize("back", [True, False], ids=["restarted", "gone"])
def test_the_engine_dies_during_a_transfer(clean_bed: Bed, cli: Cli, image: str, back: bool) -> None:
    file, node = job(cli, image), clean_bed.nodes[0]
    process = cli.start("up", file)
    wait_for(clean_bed, node, 0.5)
    with contextlib.ExitStack() as healing:
        healing.enter_context(faults.without_engine(clean_bed, node))
        if back:  # the node responds again before `up` has ended, or just after
            healing.close()
        code, output = end(process)
    if code != 0 or not back:
        assert code in (3, 4), output
        assert "node1" in output
        assert "->" in output  # the next step
        assert "it ran" not in output
    # No partial image: complete layers are labelled as a part, from which the next `up` resumes before it removes it.
    assert set(untagged(clean_bed, node)) <= set(parts(clean_bed, node))
    cli("down", "faults", code=None)
    succeeds(clean_bed, cli, file, image)


def test_the_disk_is_full(clean_bed: Bed, cli: Cli, image: str) -> None:
    file, node = job(cli, image), clean_bed.nodes[0]
    with faults.small_data_root(clean_bed, node, "400m"):
        refused = cli("up", file, code=4, timeout=300)
        assert "node1: the container engine's disk is full" in refused.stderr
        assert "free some space" in refused.stderr
        assert not clean_bed.docker(node, "images", "-aq")
        assert megabytes(clean_bed, node) < 20
    succeeds(clean_bed, cli, file, image)


@pytest.mark.parametrize(("index", "fraction"), [(0, 0.02), (0, 0.6), (1, 0.5)], ids=["begun", "pushed", "served"])
def test_the_launcher_is_killed(clean_bed: Bed, cli: Cli, image: str, index: int, fraction: float) -> None:
    """While it pushes to the first node, and while the first node serves the second.

    An engine that has received all bytes of a part finishes it, even late: as a labelled image, which `clean` removes.
    """
    cli = Cli(cli.cwd, {**cli.env, peers.VARIABLE: "2"})
    file, node = job(cli, image), clean_bed.nodes[index]
    before = megabytes(clean_bed, node)
    process = cli.start("up", file)
    wait_for(clean_bed, clean_bed.nodes[0], 0.01)
    wait_for(clean_bed, node, fraction)
    process.kill()
    process.wait()
    assert clean_bed.wait_clean(clean_bed.nodes[:2], timeout=60, home=True) == []
    deadline = time.monotonic() + 60  # an engine cleans up some time later
    while not untagged(clean_bed, node) and (now := megabytes(clean_bed, node)) > before + 5:
        assert time.monotonic() < deadline, f"{before} MB before, {now} MB now"
        time.sleep(1)
    assert "it ran" in cli("up", file, timeout=300).stdout
    cli("down", "faults")
    for each in clean_bed.nodes[:2]:
        assert set(untagged(clean_bed, each)) <= set(parts(clean_bed, each))
    cli("clean", "--nodes", "node1,node2", "--yes")
    for each in clean_bed.nodes[:2]:
        assert not untagged(clean_bed, each)
        assert clean_bed.docker(each, "image", "inspect", "-f", "{{.Id}}", image)
