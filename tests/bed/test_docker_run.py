"""`launcher plan --docker`: the printed line, pasted into a node's shell, creates the same container as `up`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from launcher.job.parts import DockerOptions
from launcher.model.container import ContainerSpec, Layout, Mount
from launcher.node.connect import connect
from launcher.node.docker.values import container_request, docker_run
from launcher.node.engine import Engine
from tests.bed.bed import Bed
from tests.bed.settings import TRAIN_IMAGE

pytestmark = pytest.mark.bed
OUTPUT = "/home/trainer/.launcher/docker-run"
PLAIN = ContainerSpec(
    name="launcher-pasted",
    image=TRAIN_IMAGE,
    argv=("sh", "-c", 'echo "$WORDS" $(id -u) "$PWD" && ls /output'),
    env={"WORDS": 'it\'s "two\nlines"', "EMPTY": ""},
    labels={"launcher.run": "t", "launcher.purpose": "run"},
    layout=Layout("/workspace/code", "/output", "/.launcher"),
    output_dir=OUTPUT,
    user="1001:1001",
)
# Every key of `docker` in the job file, with the schema's example
FIELDS = DockerOptions.model_fields.items()
EXAMPLES = dict(DockerOptions.model_validate({key: next(iter(field.examples or ())) for key, field in FIELDS}))
FULL = replace(
    PLAIN,
    groups=(4, 27),
    mounts=(Mount("/etc", "/host,etc", read_only=True),),
    ulimits=(("nofile", 4096),),
    docker={**EXAMPLES, "devices": ("/dev/null:/dev/zilch:r",)},
    shm_size=1 << 26,
    memory=1 << 28,
    cpus=0.5,
    restarts=2,
)


@pytest.fixture
def engine(clean_bed: Bed) -> Iterator[Engine]:
    with connect([("a", "node1")], "docker", clean_bed.ssh_config) as fleet:
        fleet.engines[0].files.make_dir(OUTPUT)
        yield fleet.engines[0]


def inspected(bed: Bed, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bed.sh(bed.nodes[0], f"docker inspect {name}"))[0]
    config = found["Config"]
    program = [*(config.pop("Entrypoint") or []), *(config.pop("Cmd") or [])]
    for own in ("Hostname", "AttachStdout", "AttachStderr"):  # these depend on -d
        config.pop(own, None)
    config["Env"].sort()
    requested = container_request(FULL)["HostConfig"]  # docker's command line fills in engine defaults for the rest
    host = {key: value for key in requested if (value := found["HostConfig"][key])}
    if "CapAdd" in host:  # the `docker` of newer engines writes the names out
        host["CapAdd"] = [name.removeprefix("CAP_") for name in host["CapAdd"]]
    return {"Program": program, "Config": config, "HostConfig": host}


@pytest.mark.parametrize("spec", [PLAIN, FULL], ids=["plain", "full"])
def test_a_pasted_line_creates_the_same_container_as_up(bed: Bed, engine: Engine, spec: ContainerSpec) -> None:
    bed.sh(bed.nodes[0], docker_run(spec))
    engine.create(replace(spec, name="launcher-created"))
    pasted, created = inspected(bed, "launcher-pasted"), inspected(bed, "launcher-created")
    assert pasted == created


def test_a_pasted_line_runs(bed: Bed, engine: Engine) -> None:
    bed.sh(bed.nodes[0], f"touch {OUTPUT}/here; " + docker_run(PLAIN))
    state = engine.wait("launcher-pasted", 30)
    assert state.exit_code == 0
    assert engine.logs("launcher-pasted") == b'it\'s "two\nlines" 1001 /workspace/code\nhere\n'
