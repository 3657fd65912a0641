"""The entry script with its files in the layout of an engine, in all common shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher import container_scripts

SHELLS = [name for name in ("dash", "bash", "busybox") if shutil.which(name)]

needs_root = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")

# As that of BusyBox 1.38, which with -F finds nothing behind a null byte: no variable but the first.
BUSYBOX_GREP = f"""#!/bin/sh
case "$*" in -*F*/environ*) exit 1 ;; esac
exec {shutil.which("busybox")} grep "$@"
"""


@dataclass
class Box:
    """The scripts and an output folder in the layout of an engine; `run` is one attempt."""

    root: Path
    shell: str
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.kit / "home").mkdir(parents=True)
        for name, text in container_scripts.scripts().items():
            (self.kit / name).parent.mkdir(parents=True, exist_ok=True)
            (self.kit / name).write_bytes(text)
        self.output.mkdir()
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.root),
            "LAUNCHER_OUTPUT": str(self.output),
            "LAUNCHER_RUN": str(self.root),  # another one per test: the script finds its processes by it
            "LAUNCHER_NODE": "gpu-a",
        }
        if self.shell == "busybox":  # without tools of coreutils
            tools = self.root / "applets"
            tools.mkdir()
            subprocess.run(["busybox", "--install", "-s", tools], check=True)
            (tools / "grep").unlink()
            (tools / "grep").write_text(BUSYBOX_GREP)
            (tools / "grep").chmod(0o755)
            self.env["PATH"] = str(tools)

    @property
    def kit(self) -> Path:
        return self.root / "kit"

    @property
    def output(self) -> Path:
        return self.root / "out"

    @property
    def log(self) -> Path:
        return self.output / "logs" / "gpu-a.log"

    @property
    def attempts(self) -> list[str]:
        return (self.output / "state" / "gpu-a.attempts").read_text().splitlines()

    def change(self, line: str, new: str) -> None:
        """Replace a constant of the entry script, so that a test does not wait for a limit."""
        script = (self.kit / "entry.sh").read_text()
        assert script.count(line) == 1, line
        (self.kit / "entry.sh").write_text(script.replace(line, new))

    def secret(self, name: str, value: bytes) -> None:
        folder = self.kit / "secrets"
        folder.mkdir(exist_ok=True, mode=0o700)
        (folder / name).write_bytes(value)
        (folder / name).chmod(0o600)

    def argv(self, *argv: str) -> list[str]:
        sh = [shutil.which("busybox") or "", "sh"] if self.shell == "busybox" else [shutil.which(self.shell) or ""]
        return [*sh, str(self.kit / "entry.sh"), *argv]

    def start(self, *argv: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.argv(*argv),
            env=self.env | dict(env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, *argv: str, env: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Return the exit code and the content of Docker's log."""
        process = self.start(*argv, env=env)
        out, _ = process.communicate(timeout=120)
        return process.returncode, out

    def until(self, text: bytes) -> None:
        deadline = time.monotonic() + 60
        while text not in (self.log.read_bytes() if self.log.exists() else b""):
            assert time.monotonic() < deadline, f"{text!r} is not in the log"
            time.sleep(0.01)


@pytest.fixture(params=SHELLS)
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Box:
    return Box(tmp_path, request.param)


@pytest.fixture
def one(tmp_path: Path) -> Box:
    """For tests that do not depend on the shell."""
    return Box(tmp_path, SHELLS[0])
