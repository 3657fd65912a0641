"""GPUs by CDI: a newer engine on this machine, and a handwritten specification with /dev/null as GPUs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed.fixtures import unavailable
from tests.bed.host import docker, newer_engine
from tests.bed.images import base_tarball
from tests.bed.settings import BASE_IMAGE, BedUnavailable, Settings
from tests.bed.shell import succeeds
from tests.e2e.cli import Cli
from tests.nvidia import Card, Machine

pytestmark = [pytest.mark.bed, pytest.mark.slow, pytest.mark.timeout(300)]
SUITE = "forky"  # the first Debian with an engine (28.2 or later) that lists CDI devices
UUIDS = ["GPU-a", "GPU-b"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of a separate engine with a Debian image: docker.sock, and cdi/ for specifications."""
    folder = tmp_path_factory.mktemp("engine")
    (folder / "cdi").mkdir()
    settings = Settings.from_environment()
    try:
        programs = newer_engine(settings, SUITE)
    except BedUnavailable as reason:
        unavailable(str(reason))
    if not base_tarball(settings).exists():
        unavailable(f"no {base_tarball(settings)}: `python -m tests.bed up` makes it")
    socket = f"unix://{folder}/docker.sock"
    places = [f"--{name}={folder / name}" for name in ("data-root", "exec-root", "pidfile")]
    options = [f"--host={socket}", f"--cdi-spec-dir={folder / 'cdi'}", "--bridge=none", "--iptables=false"]
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}:/usr/sbin:/sbin"}
    with (folder / "log").open("wb") as log:
        argv = [
            "unshare",
            "--net",
            "--mount",
            "sh",
            "-c",
            'ip link set lo up; exec dockerd "$@"',
            "-",
            *places,
            *options,
        ]
        with subprocess.Popen(argv, env=env, stdout=log, stderr=log) as process:
            try:
                while not succeeds(["docker", "-H", socket, "version"]):
                    assert process.poll() is None, (folder / "log").read_text()
                    time.sleep(0.2)
                docker("-H", socket, "import", str(base_tarball(settings)), BASE_IMAGE)
                yield folder
            finally:
                process.terminate()
    shutil.rmtree(folder / "data-root", ignore_errors=True)


@pytest.fixture
def cdi_cli(home_cli: Cli, engine: Path, tmp_path: Path) -> Cli:
    """Return the launcher on this machine, with that engine and two GPUs."""
    Machine([Card(f"0{7 + n}:00.0", uuid) for n, uuid in enumerate(UUIDS)]).install(tmp_path)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DOCKER_HOST": f"unix://{engine}/docker.sock"}
    return Cli(home_cli.cwd, {**home_cli.env, **path})


def specify(engine: Path, names: list[str], device: str = "/dev/null") -> None:
    """Define a device file and a variable per GPU: github.com/cncf-tags/container-device-interface, SPEC.md."""
    gpus = [
        {
            "name": name,
            "containerEdits": {
                "deviceNodes": [{"path": f"/dev/nvidia{index}", "hostPath": device}],
                "env": [f"CDI_{index}={name}"],
            },
        }
        for index, name in enumerate(names)
    ]
    text = json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": gpus})
    (engine / "cdi" / "nvidia.json").write_text(text)


def job(cli: Cli) -> Path:
    command = ["sh", "-c", "ls /dev/nvidia*; env | grep ^CDI_; echo written >/dev/nvidia1"]
    return cli.job("cdi", nodes=["local"], image={"ref": BASE_IMAGE}, gpus=[1], run={"command": command})


def test_a_runs_container_has_the_gpu_that_the_specification_describes(cdi_cli: Cli, engine: Path) -> None:
    specify(engine, UUIDS)
    assert cdi_cli("up", job(cdi_cli)).stdout.split() == ["/dev/nvidia1", "CDI_1=GPU-b"]
    plan = json.loads((cdi_cli.runs()[-1] / "plan.json").read_text())
    container = plan["nodes"][0]["container"]
    assert (container["gpu_driver"], container["gpus"], container["docker"]["devices"]) == ("cdi", ["GPU-b"], [])


def test_a_specification_that_names_gpus_by_index_is_refused(cdi_cli: Cli, engine: Path) -> None:
    specify(engine, ["0", "1", "all"])
    refused = cdi_cli("up", job(cdi_cli), code=3).stderr
    assert "node local: has GPUs, but its CDI specification does not name them by UUID" in refused
    assert "--device-name-strategy=uuid" in refused


def test_an_outdated_specification_is_explained(cdi_cli: Cli, engine: Path) -> None:
    specify(engine, UUIDS, "/dev/nvidia7")
    refused = cdi_cli("up", job(cdi_cli), code=3).stderr
    assert "local: its CDI specification lacks the GPU" in refused
    assert "nvidia-ctk cdi generate" in refused
