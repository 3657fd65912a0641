"""Git repositories of a test."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

_OWN = ("-c", "user.email=a@b", "-c", "user.name=a", "-c", "commit.gpgsign=false")


def git(folder: Path, *args: str) -> str:
    command = ["git", "-C", str(folder), *_OWN, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(repository: Path, files: Mapping[str, str]) -> str:
    """Write and commit these files. Return the commit's name."""
    for name, text in files.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
        git(repository, "add", "--force", name)  # also one that .gitignore lists
    git(repository, "commit", "--quiet", "--message", "x")
    return git(repository, "rev-parse", "HEAD")
