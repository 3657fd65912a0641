"""Every Dockerfile of the repository passes hadolint; waivers are in the file, with their reasons."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPPED = {".venv", ".git", "runs", "build", "dist"}


def dockerfiles():
    found = (path for path in ROOT.rglob("*Dockerfile") if not SKIPPED.intersection(path.relative_to(ROOT).parts[:1]))
    return sorted(path.relative_to(ROOT) for path in found)


def hadolint(path, text=None):
    """hadolint's exit code and findings of every severity, with the settings of .hadolint.yaml."""
    program = shutil.which("hadolint", path=str(Path(sys.prefix) / "bin")) or shutil.which("hadolint")
    if program is None and "CI" not in os.environ:
        pytest.skip("no hadolint: pip install -c constraints.txt -e '.[dev]' brings it")
    assert program
    argv = [program, "--no-color", str(path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, input=text, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_there_are_dockerfiles():
    assert Path("images/Dockerfile") in dockerfiles()


@pytest.mark.parametrize("path", dockerfiles(), ids=str)
def test_a_dockerfile_passes_hadolint(path):
    assert hadolint(path) == (0, "")


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("FROM quay.example/pytorch:1", "DL3026"),  # not a trusted registry
        ("FROM nvcr.io/nvidia/pytorch:latest", "DL3007"),
        ("FROM nvcr.io/nvidia/pytorch:26.09-py3\nRUN pip install six", "DL3013"),
        ("FROM nvcr.io/nvidia/pytorch:26.09-py3\nRUN set -x | cat", "DL4006"),
        ("FROM nvcr.io/nvidia/pytorch:26.09-py3\nCMD python3 x.py", "DL3025"),
    ],
)
def test_the_linter_settings_reject_bad_dockerfiles(line, rule):
    code, found = hadolint("-", line + "\n")
    assert code != 0
    assert rule in found
