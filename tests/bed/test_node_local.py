"""The engine of this machine, and a fleet with nodes of every kind."""

from __future__ import annotations

import getpass
import os
import secrets
from pathlib import Path

import pytest

from launcher.errors import EngineUnavailable, NodesFailed
from launcher.model.container import ContainerSpec, Layout
from launcher.model.facts import Reach
from launcher.node.connect import caller_engine, connect
from launcher.node.docker.engine import DockerEngine
from tests.bed.bed import Bed
from tests.bed.settings import TRAIN_IMAGE

pytestmark = pytest.mark.bed


def test_the_local_engine_and_a_remote_one_behave_the_same(bed: Bed, tmp_path: Path) -> None:
    label = secrets.token_hex(4)
    with connect([("here", "local"), ("there", "node1")], "docker", bed.ssh_config) as fleet:
        here, there = fleet.each(lambda engine: engine.facts())
        assert (here.user, here.uid) == (getpass.getuser(), os.getuid())
        assert here.hostname != there.hostname
        out = tmp_path / "out"
        fleet.engines[0].files.make_dir(str(out))
        spec = ContainerSpec(
            name=f"launcher-test-{label}",
            image=TRAIN_IMAGE,
            argv=("sh", "-c", "echo hello >/output/f; echo said"),
            env={},
            labels={"launcher.run": label},
            layout=Layout("/workspace/code", "/output", "/opt/launcher"),
            output_dir=str(out),
            user=f"{os.getuid()}:{os.getgid()}",
        )
        code, output = fleet.engines[0].run_probe(spec)
        assert (code, output) == (0, b"said\n")
        assert fleet.engines[0].files.read(str(out / "f"), below=str(out)) == b"hello\n"
        assert fleet.engines[0].list({"launcher.run": label}) == []
        near, far = (engine.machine for engine in fleet.engines)
        assert near.host_key() is None
        address = bed.nodes[0].address
        assert near.has_host_key(address, 22, far.host_key() or "", 3) is True
        assert near.has_host_key(bed.nodes[1].address, 22, far.host_key() or "", 3) is False
        assert near.reach(address, 29514, 3) is Reach.REFUSED
        assert near.reach(bed.blackhole, 29514, 1) is Reach.SILENT


def test_the_callers_engine_is_optional(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    with caller_engine() as engine:
        assert isinstance(engine, DockerEngine)
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/docker.sock")
    with caller_engine() as engine:
        assert engine is None
    with pytest.raises(NodesFailed) as caught:
        connect([("here", "local")], "docker")
    assert isinstance(caught.value.errors[0], EngineUnavailable)
    assert "DOCKER_HOST" in str(caught.value)
    monkeypatch.setenv("DOCKER_HOST", "ssh://me@elsewhere")
    with pytest.raises(NodesFailed, match="name the node me@elsewhere"):
        connect([("here", "local")], "docker")


def test_local_without_a_runtime_covers_processes_and_containers(bed: Bed) -> None:
    with connect([("local", "local"), ("node1", "node1")], None, bed.ssh_config) as fleet:
        assert [engine.node for engine in fleet.engines] == ["local", "local", "node1"]
        assert [engine.images is None for engine in fleet.engines] == [True, False, False]
