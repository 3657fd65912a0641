"""`image build --with-code --push`: an image with the code in a registry, for systems that run images only."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from tests.bed.debian_registry import forget, need, registry
from tests.bed.host import docker
from tests.bed.settings import TRAIN_IMAGE
from tests.e2e import names
from tests.e2e.cli import Cli
from tests.e2e.programs.lists import tree

pytestmark = pytest.mark.bed


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    project = tmp_path / "project"
    (project / "package").mkdir(parents=True)
    return Cli(project, {"XDG_CACHE_HOME": str(tmp_path / "cache")})


def test_an_image_with_the_code_is_pushed_and_named_by_its_digest(cli: Cli, tmp_path: Path) -> None:
    word = uuid.uuid4().hex
    (cli.cwd / "package" / "main.py").write_text(f"print('{word}')\n")
    name, run = f"push-{word[:8]}", {"script": "package/main.py"}
    file = cli.job(name, image={"ref": TRAIN_IMAGE}, nodes=2, gpus="none", run=run)
    build = ("image", "build", file, "--with-code", "--push")
    with registry(tmp_path) as address:
        try:
            pushed, again = [cli(*build, f"{address}/team").stdout.splitlines()[-1] for _ in range(2)]
            assert pushed == again
            assert pushed.startswith(f"{address}/team/{name}@sha256:")
            forget(f"launcher/{name}-code", f"{address}/team/{name}")
            docker("pull", "-q", pushed)
            assert docker("run", "--rm", pushed, "python3", "package/main.py") == word
            assert pushed in cli("export", file, "--to", "job", "--image", pushed).stdout
        finally:
            forget(f"launcher/{name}-code", f"{address}/team/{name}")


def test_files_with_any_names_are_in_an_image_with_the_code_and_the_trainer_is_added(cli: Cli) -> None:
    need(packages=())
    program = names.project(cli)
    file = cli.job("names", image={"ref": TRAIN_IMAGE}, nodes=2, run={"module": "train"})
    try:
        built = cli("image", "build", file, "--with-code").stdout.split()[-1]
        found = json.loads(docker("run", "--rm", built, "python3", program))
        assert {path: what for path, what in found.items() if not path.startswith("train/")} == tree(cli.cwd)
        assert "--arch" in docker("run", "--rm", built, "python3", "-m", "train", "--help")
    finally:
        forget("launcher/names-code")


def test_an_invalid_registry_is_refused_and_an_unreachable_one_is_reported(cli: Cli) -> None:
    need(packages=())
    file = cli.job("push", image={"ref": TRAIN_IMAGE}, nodes=2, run={"command": ["true"]})
    assert "is not a registry path" in cli("image", "build", file, "--push", "UPPER case", code=2).stderr
    try:
        failed = cli("image", "build", file, "--push", "127.0.0.1:1/team", code=4).stderr
    finally:
        forget("127.0.0.1:1/team/push")
    assert "could not push 127.0.0.1:1/team/push:" in failed
    assert "docker login" in failed
