"""The caller is a laptop on a home connection: the nodes pull the base and build; the caller sends kilobytes only.

The registry is on this machine, and nodes reach it through tunnels that are not the launcher's. The launcher's own ssh
connections are counted, and so is what the caller's engine pulls.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bed import laptop, registry
from tests.bed.bed import Bed
from tests.bed.host import docker
from tests.bed.laptop import Line
from tests.bed.settings import TRAIN_IMAGE
from tests.bed.shell import run
from tests.e2e.cli import Cli

pytestmark = pytest.mark.bed
MIB = 1 << 20
KILOBYTES = MIB  # limit for each direction of the connection, for all commands; the base has a layer of BASE bytes
BASE = 24 * MIB


@dataclass(frozen=True)
class Scene:
    """A caller, two nodes, and a base image that only a registry has."""

    bed: Bed
    cli: Cli
    line: Line
    registry: registry.Registry
    here: int  # the registry's port for the caller, and in the name of its images
    there: int  # the port that the nodes' tunnels lead to
    folder: Path

    @property
    def base(self) -> str:
        return f"127.0.0.1:{self.here}/team/base:1"

    def tunnels(self, *ranks: int) -> contextlib.AbstractContextManager[None]:
        """Make the registry reachable from the nodes of these ranks."""
        return registry.forwarded(
            self.bed.ssh_config, [self.bed.nodes[rank].alias for rank in ranks], self.here, self.there
        )

    def wait_for_registry(self, *ranks: int) -> None:
        for rank in ranks:
            deadline = time.monotonic() + 10
            script = f"exec 3<>/dev/tcp/127.0.0.1/{self.here}"
            while self.bed.run(self.bed.nodes[rank], "bash", "-c", script, check=False).returncode:
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def job(self, name: str = "laptop", base: str = "", **image: object) -> Path:
        requested = {"base": base or self.base, "torchvision": "keep", "packages": ["six"], **image}
        command = ["python3", "-c", "import six; print('it has', six.__name__)"]
        run = {"command": command}
        return self.cli.job(name, image=requested, nodes=["node1", "node2"], gpus="none", run=run, timeout="2m")

    def ids(self, name: str) -> set[str]:
        return {self.bed.docker(node, "image", "inspect", "-f", "{{.Id}}", name) for node in self.bed.nodes[:2]}

    def from_registry(self) -> tuple[int, int]:
        """Return the bytes pulled by the caller's engine, and by the nodes."""
        return self.registry.sent[self.here], self.registry.sent[self.there]


def grown(folder: Path, tag: str) -> None:
    """An image on this machine's engine: Debian with a layer of BASE random bytes."""
    folder.mkdir()
    (folder / "data").write_bytes(os.urandom(BASE))
    (folder / "Dockerfile").write_text(f"FROM {TRAIN_IMAGE}\nCOPY data /data\n")
    run(["env", "DOCKER_BUILDKIT=0", "docker", "build", "-q", "-t", tag, str(folder)], timeout=120)


def forget(bed: Bed, *beginnings: str) -> None:
    """Return all image names with this prefix, here and on the nodes."""
    chosen = " || ".join(f'index($0, "{beginning}") == 1' for beginning in beginnings)
    script = "docker images --digests --format '{{.Repository}}:{{.Tag}} {{.Repository}}@{{.Digest}}' | tr ' ' '\\n' | "
    script += f"grep -v '<none>' | awk '{chosen}' | sort -u | xargs -r docker image rm -f; docker image prune -f"
    run(["sh", "-c", script], check=False)
    for node in bed.nodes[:2]:
        bed.sh(node, script)


@pytest.fixture(scope="module")
def served(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> registry.Registry:
    """Only the registry has its image."""
    tag, folder = f"launcher-test-laptop:{uuid.uuid4().hex[:8]}", tmp_path_factory.mktemp("registry")
    grown(folder / "base", tag)
    docker("save", "-o", str(folder / "saved.tar"), tag)
    docker("image", "rm", tag)
    return registry.Registry(folder / "saved.tar")


@pytest.fixture
def scene(clean_bed: Bed, cli: Cli, served: registry.Registry, tmp_path: Path) -> Iterator[Scene]:
    folder = tmp_path / "docker-config"
    served.sent.clear()
    line = laptop.counted(clean_bed, tmp_path)
    folder.mkdir()
    with registry.serving(served) as here, registry.serving(served) as there:
        login = base64.b64encode(f"{registry.USER}:{registry.PASSWORD}".encode()).decode()
        (folder / "config.json").write_text(json.dumps({"auths": {f"127.0.0.1:{here}": {"auth": login}}}))
        caller = Cli(cli.cwd, {**cli.env, "LAUNCHER_SSH_CONFIG": str(line.config), "DOCKER_CONFIG": str(folder)})
        yield Scene(clean_bed, caller, line, served, here, there, tmp_path)
        forget(clean_bed, f"127.0.0.1:{here}/", "launcher/laptop", "launcher/base", "launcher-test-laptop")


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    project = tmp_path / "project"
    project.mkdir()
    return Cli(project, {"XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "200"})


@pytest.fixture(
    params=[*(pytest.param(p, marks=pytest.mark.slow) for p in ("like the nodes", "another architecture")), "a Mac"]
)
def caller(scene: Scene, request: pytest.FixtureRequest) -> Iterator[Scene]:
    """The scene with each kind of caller; its own engine could pull the base."""
    with contextlib.ExitStack() as stack:
        env = dict(scene.cli.env)
        if request.param != "like the nodes":
            env["DOCKER_HOST"] = stack.enter_context(laptop.foreign_engine(scene.folder))
        if request.param == "a Mac":
            env.update(laptop.mac(scene.folder))
        yield Scene(
            scene.bed, Cli(scene.cli.cwd, env), scene.line, scene.registry, scene.here, scene.there, scene.folder
        )


def test_the_nodes_pull_and_build_and_the_caller_sends_kilobytes(caller: Scene) -> None:
    """From the first `up` to `down`; then a node without the image gets it from the other node."""
    file, first = caller.job(), caller.bed.nodes[1]
    with caller.tunnels(0, 1):
        caller.wait_for_registry(0, 1)
        done = caller.cli("up", file)
        assert "it has six" in done.stdout
        assert "building on node1" in done.stderr
        here, there = caller.from_registry()
        assert here == 0
        assert there > 2 * BASE  # each node pulls the base itself
    up, down = caller.line.moved()
    assert up < KILOBYTES, done.stderr
    assert down < KILOBYTES, done.stderr
    assert docker("images", "-q", "launcher/laptop") == ""
    name = json.loads((caller.cli.cwd / "laptop.lock.json").read_text())["image"]
    assert len(caller.ids(name)) == 1
    caller.cli("status")
    assert "it has six" in caller.cli("logs", "--no-follow").stdout
    caller.cli("fetch")
    caller.cli("down")

    caller.bed.sh(first, "docker images -q --no-trunc launcher/laptop | xargs docker image rm -f")
    caller.bed.sh(first, f"docker images -q 127.0.0.1:{caller.here}/team/base | sort -u | xargs -r docker image rm -f")
    before = sum(caller.line.moved())
    again = caller.cli("image", "ship", file)
    assert "node2 pulled it from node1" in again.stderr
    assert "node2: 0 bytes" in again.stdout
    assert sum(caller.line.moved()) - before < KILOBYTES
    assert len(caller.ids(name)) == 1
    assert laptop.called(caller.folder) == []


def test_the_base_is_pulled_by_the_node_that_can(scene: Scene) -> None:
    with scene.tunnels(1):
        scene.wait_for_registry(1)
        done = scene.cli("image", "ship", scene.job())
    assert "building on node2" in done.stderr
    assert "node1 pulled it from node2" in done.stderr
    assert scene.from_registry()[0] == 0
    assert max(scene.line.moved()) < KILOBYTES


def test_a_base_that_only_the_caller_has_is_built_there_if_it_suits_the_nodes(scene: Scene) -> None:
    name = f"launcher-test-laptop-only:{uuid.uuid4().hex[:8]}"
    docker("tag", TRAIN_IMAGE, name)
    done = scene.cli("image", "ship", scene.job(base=name, torchvision="keep"))
    assert "building on this machine" in done.stderr
    lock = json.loads((scene.cli.cwd / "laptop.lock.json").read_text())
    assert len(scene.ids(lock["image"])) == 1


@pytest.fixture
def foreign(scene: Scene) -> str:
    """Return the name of an arm64 image of this machine's engine."""
    name = f"launcher-test-laptop:{uuid.uuid4().hex[:8]}"
    laptop.load_foreign(scene.folder, name)
    return name


@pytest.mark.parametrize("key", [pytest.param("base", marks=pytest.mark.slow), "ref"])
def test_the_callers_image_for_another_architecture_is_not_sent(scene: Scene, foreign: str, key: str) -> None:
    """If no node can pull it, the job is refused before anything is built or sent."""
    image = {"base": foreign, "torchvision": "keep", "packages": ["six"]} if key == "base" else {"ref": foreign}
    file = scene.cli.job(
        "laptop", image=image, nodes=["node1", "node2"], gpus="none", run={"command": ["true"]}, timeout="2m"
    )
    refused = scene.cli("up", file, code=4)
    assert f"image {foreign}: this machine has it for arm64, but the nodes need amd64" in refused.stderr
    assert "building" not in refused.stderr
    assert max(scene.line.moved()) < KILOBYTES
    for node in scene.bed.nodes[:2]:
        assert scene.bed.run(node, "docker", "image", "inspect", foreign, check=False).returncode


@pytest.mark.parametrize("key", [pytest.param("base", marks=pytest.mark.slow), "ref"])
def test_nodes_pull_what_the_caller_has_for_another_architecture(scene: Scene, foreign: str, key: str) -> None:
    docker("tag", foreign, scene.base)
    image = {"base": scene.base, "torchvision": "keep"} if key == "base" else {"ref": scene.base}
    file = scene.cli.job("laptop", image=image, nodes=["node1", "node2"], gpus="none", run={"command": ["echo", "ran"]})
    with scene.tunnels(0, 1):
        scene.wait_for_registry(0, 1)
        assert "ran" in scene.cli("up", file).stdout
        scene.cli("down")
    here, there = scene.from_registry()
    assert here == 0
    assert there > 2 * BASE
    assert max(scene.line.moved()) < KILOBYTES


@pytest.mark.slow
def test_an_image_built_here_for_another_architecture_is_not_sent(scene: Scene) -> None:
    """`image build` works on this machine's engine; no node uses that image because of the lock file that it writes."""
    file = scene.job()
    with laptop.foreign_engine(scene.folder) as host:
        caller = Cli(scene.cli.cwd, {**scene.cli.env, "DOCKER_HOST": host})
        assert "building" in caller("image", "build", file).stderr
        with scene.tunnels(0, 1):
            scene.wait_for_registry(0, 1)
            done = caller("up", file)
        assert "it has six" in done.stdout
        assert "this machine has it for arm64, but the nodes need amd64" in done.stderr
        caller("down")
    assert max(scene.line.moved()) < KILOBYTES
