"""`docker compose up`: training, TensorBoard, exit codes, owners; on a stand-in base with the bed's torch."""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.bed.bed import Bed
from tests.bed.fixtures import unavailable
from tests.bed.settings import BASE_IMAGE, SITE_PACKAGES_IN_NODE, VENV_IN_NODE
from tests.bed.shell import run, succeeds

pytestmark = pytest.mark.bed

REPOSITORY = Path(__file__).parents[2]
OWNER = 4321  # a uid unknown to the image and to this machine
DIGITS = "--data /data/digits.tar --arch smallcnn --image-size 32 --batch-size 128 --epochs 1 --threads 1"


@dataclass(frozen=True)
class Compose:
    """A compose project with its own output folder and port."""

    project: str
    stand_in: Path  # override file: the bed's torch instead of a base image with torch
    output: Path
    port: int

    def __call__(self, *argv: str, check: bool = True, train_args: str = DIGITS) -> CompletedProcess[str]:
        """Run `docker compose ARGV` as a user would in the repository's root."""
        variables = {
            "BASE_IMAGE": BASE_IMAGE,
            "PACKAGES": "",
            "IMAGE": "launcher-compose-stand-in",
            "OUTPUT": str(self.output),
            "OWNER": f"{OWNER}:{OWNER}",
            "TENSORBOARD_PORT": str(self.port),
            "TRAIN_ARGS": train_args,
        }
        settings = [f"{key}={value}" for key, value in variables.items()]
        files = ["-f", str(REPOSITORY / "docker-compose.yml"), "-f", str(self.stand_in)]
        return run(["env", *settings, "docker", "compose", "-p", self.project, *files, *argv], check=check, timeout=240)


@pytest.fixture
def plugin(bed: Bed) -> None:
    if not succeeds(["docker", "compose", "version"]):
        unavailable("no `docker compose` plugin on this machine")


@pytest.fixture
def compose(bed: Bed, plugin: None, tmp_path: Path) -> Iterator[Compose]:
    torch = {
        "volumes": [f"{bed.settings.venv}:{VENV_IN_NODE}:ro"],
        "environment": {"PYTHONPATH": SITE_PACKAGES_IN_NODE, "OMP_NUM_THREADS": "1"},
    }
    stand_in = tmp_path / "stand-in.json"
    stand_in.write_text(json.dumps({"services": {"train": torch, "tensorboard": torch}}))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    project = Compose(f"launcher-test-{os.getpid()}", stand_in, tmp_path / "output", port)
    project("build", "-q")
    yield project
    project("down", "-v", "--remove-orphans", "-t", "5")


def test_training_succeeds_and_tensorboard_keeps_serving(compose: Compose) -> None:
    compose("up", "-d")
    waited = compose("wait", "train", check=False)
    assert waited.returncode == 0, compose("logs", "train").stdout

    files = [path for path in compose.output.rglob("*") if path.is_file()]
    assert any(path.name.startswith("events.out.tfevents") for path in files)
    assert any(path.name == "metrics.jsonl" for path in files)
    assert {(path.stat().st_uid, path.stat().st_gid) for path in [compose.output, *files]} == {(OWNER, OWNER)}

    tags = {tag for run_tags in _scalar_tags(compose.port).values() for tag in run_tags}
    assert {"Loss/train", "Loss/val", "Accuracy/val"} <= tags
    assert compose("ps", "--status", "running", "--services").stdout.split() == ["tensorboard"]


def test_the_exit_code_is_the_trainers_own(compose: Compose) -> None:
    missing = "--data /data/no-such-folder"
    by_run = compose("run", "--rm", "-T", "train", check=False, train_args=missing)
    by_up = compose("up", "--exit-code-from", "train", check=False, train_args=missing)
    assert "/data/no-such-folder" in by_run.stdout + by_run.stderr
    assert by_run.returncode == by_up.returncode == 1


def test_the_gpu_override_requests_all_gpus_with_one_process_each(plugin: None) -> None:
    files = ["-f", str(REPOSITORY / "docker-compose.yml"), "-f", str(REPOSITORY / "docker-compose.gpu.yml")]
    train = json.loads(run(["docker", "compose", *files, "config", "--format", "json"]).stdout)["services"]["train"]
    [device] = train["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", -1, ["gpu"])
    assert train["environment"]["PROCESSES"] == "gpu"


def _scalar_tags(port: int, timeout: float = 60) -> dict[str, dict[str, object]]:
    """Return run -> tag -> ... from TensorBoard's API, after TensorBoard has loaded a validation value."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/plugin/scalars/tags", timeout=5) as response:
                tags: dict[str, dict[str, object]] = json.load(response)
        except (urllib.error.URLError, ConnectionError):
            tags = {}
        if any("Loss/val" in run_tags for run_tags in tags.values()) or time.monotonic() > deadline:
            return tags
        time.sleep(0.5)
