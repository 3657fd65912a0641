"""Stand-ins for broken images: real torch and real torchvision in versions that do not match."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from launcher.image.builder import has_buildx
from tests.bed.images import image_id
from tests.bed.shell import run

FOLDER = Path(__file__).parent / "faulty"
FAULTY = "launcher-bed-faulty"
TIMEOUT = 1500  # seconds: torch and its requirements are 3 GB of wheels


def download(requirement: str, folder: Path) -> Path:
    """The wheel that this machine's pip would install."""
    run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), requirement], timeout=TIMEOUT)
    [wheel] = folder.glob("*.whl")
    return wheel


def faulty(tag: str = FAULTY, *wheels: Path, **arguments: str) -> str:
    """Builds a stand-in on this machine's engine: torch 2.14.1 with torchvision 0.2.1 unless `arguments` say otherwise.

    Takes minutes and 4 GB the first time, a second with the builder's cache.
    """
    with tempfile.TemporaryDirectory(prefix="launcher-bed-") as folder:
        context = Path(folder)
        for path in (*FOLDER.glob("*.*"), FOLDER / "Dockerfile", *wheels):
            shutil.copy(path, context)
        authority = os.environ.get("PIP_CERT", "")
        if authority:  # pip in the build trusts the same authority as pip here
            shutil.copy(authority, context / "ca.crt")
        for path in context.iterdir():
            os.utime(path, (0, 0))
        argv = ["docker", "buildx", "build", "--builder", "default", "--load"] if has_buildx() else ["docker", "build"]
        for key, value in arguments.items():
            argv += ["--build-arg", f"{key}={value}"]
        run([*argv, "-q", "--network", "host", "-t", tag, folder], timeout=TIMEOUT)
    assert image_id(tag)
    return tag


def on_top(base: str, tag: str, *lines: str) -> str:
    """Builds an image from `base` and these Dockerfile lines."""
    text = "\n".join([f"FROM {base}", *lines]) + "\n"
    subprocess.run(
        ["docker", "build", "-q", "-t", tag, "-"],
        input=text.encode(), env={**os.environ, "DOCKER_BUILDKIT": "0"}, capture_output=True, check=True, timeout=300,
    )  # fmt: skip
    return tag
