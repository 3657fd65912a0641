"""git, only to read: no checkout, index or reference is changed, and no hook is run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

# fsmonitor: listing files should not run a program that the repository's settings name
_SETTINGS = ("core.fsmonitor=false", "core.hooksPath=/dev/null")


class GitError(Exception):
    """What git said, in one line. code: its exit code; 0: it was not run."""

    def __init__(self, said: str, code: int = 0) -> None:
        super().__init__(said)
        self.code = code


def git(
    folder: Path,
    *arguments: str,
    settings: tuple[str, ...] = (),
    environ: Mapping[str, str] | None = None,
    given: str = "",
) -> str:
    """Return what git prints. given: its stdin. Raises GitError."""
    program = shutil.which("git")
    if program is None:
        raise GitError("there is no program git")
    # not the repository of a hook that called the launcher; LC_ALL for messages that are compared
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or k.startswith("GIT_CONFIG")}
    env |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", **(environ or {})}
    options = [word for setting in (*_SETTINGS, *settings) for word in ("-c", setting)]
    command = [program, "-C", str(folder), *options, *arguments]
    done = subprocess.run(command, env=env, input=os.fsencode(given), capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
        raise GitError(said or f"git {arguments[0]} exited with code {done.returncode}", done.returncode)
    return os.fsdecode(done.stdout)
