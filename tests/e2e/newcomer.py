"""A newcomer's machine: the launcher from a wheel of this tree, in a fresh environment, called from an empty folder."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.cli import ROOT, Cli

# What a newcomer changes in the file that `launcher init` writes, for a training of seconds
SMALL = {
    "name": "first",
    "gpus": "none",
    "mounts": "{}",
    "run.args": "{data: data/digits.tar, arch: smallcnn, epochs: 1, batch_size: 32, image_size: 32, val_resize: 32}",
}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a copy of the tree: what a build leaves behind would be taken for code."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("launcher", "train", "images", "jobs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "docs").mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "docs/agents.md"):
        shutil.copy(ROOT / name, source / name)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source)  # setuptools is here: torch needs it
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with that wheel, and with this one's libraries."""
    python = environment(tmp_path_factory.mktemp("newcomer"))
    pip("--python", python, "install", "--no-deps", "--no-index", wheel)
    libraries(python)
    return python


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a machine that has the libraries, and nothing of the launcher."""
    python = environment(tmp_path_factory.mktemp("bare"))
    libraries(python)
    return python


def environment(folder: Path) -> Path:
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


def libraries(python: Path) -> None:
    """This interpreter's, without what is installed in it by reference, as this project is."""
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")


def pip(*args: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def newcomer(installed: Path, project: Path, env: Mapping[str, str]) -> Cli:
    """In an empty folder, with the file that `init` writes and a data folder."""
    cli = Cli(project, {**env, "PYTHONPATH": ""}, (str(installed.with_name("launcher")),))
    cli("init")
    (project / "data").mkdir()
    with tarfile.open(ROOT / "jobs/data/digits.tar") as full, tarfile.open(project / "data/digits.tar", "w") as small:
        for place, member in enumerate(full):
            if member.isreg() and place % 8 == 0:
                content = full.extractfile(member)
                assert content is not None
                small.addfile(member, io.BytesIO(content.read()))
    return cli


def settings(**changes: str) -> list[str]:
    """As options."""
    return [word for key, value in {**SMALL, **changes}.items() for word in ("--set", f"{key}={value}")]
