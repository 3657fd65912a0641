"""`launcher exec --rank`: the command gets the environment of the rank's process, with any content."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import launcher.run
from launcher.errors import UsageError
from launcher.model.forward import Forward, parse_forward
from launcher.model.plan import new_run_id
from tests.unit.container_box import BUSYBOX_GREP, SHELLS

SCRIPT = (Path(launcher.run.__file__).parent / "as_rank.sh").read_text()
STRANGE = {
    "QUOTED": """it's "$HOME" `x` \\1 &""",
    "LINES": "a\n\nb\n",
    "BYTES": "\udcff\u00e9",
    "a.b": "no name",
    "UID": "7",
}
RUN = new_run_id("as-rank")  # tests of other processes must not find these ranks


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    """A process of rank 3, and one of its children with different variables."""
    env = {**os.environ, **STRANGE, "LAUNCHER_JOB": f"{RUN}/gpu-a", "RANK": "3"}
    child = "import os, subprocess; subprocess.run(['sleep', '60'], env={**os.environ, 'LINES': 'the child'})"
    script = 'LAUNCHER_WORKER=$$ && export LAUNCHER_WORKER && exec "$@"'
    process = subprocess.Popen(["sh", "-c", script, "sh", sys.executable, "-c", child], env=env, start_new_session=True)
    try:
        deadline = time.monotonic() + 30
        while b"LAUNCHER_WORKER" not in Path(f"/proc/{process.pid}/environ").read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield process
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def enter(shell: str, number: int, *command: str, path: str = "") -> subprocess.CompletedProcess[bytes]:
    env = {"PATH": path or os.environ["PATH"], "TERM": "mine", "LAUNCHER_RUN": RUN, "LAUNCHER_NODE": "gpu-a"}
    argv = [shutil.which(shell) or "", *(["sh"] if shell == "busybox" else []), "-c", SCRIPT, "sh", str(number)]
    return subprocess.run([*argv, *command], env=env, capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_gets_the_ranks_variables_to_the_byte(shell: str, rank: subprocess.Popen[bytes]) -> None:
    done = enter(shell, 3, "env", "-0")
    assert done.returncode == 0, done.stderr
    found = dict(os.fsdecode(line).split("=", 1) for line in done.stdout.split(b"\0") if line)
    for name in ("QUOTED", "LINES", "BYTES"):
        assert found[name] == STRANGE[name]
    assert (found["RANK"], found["TERM"]) == ("3", "mine")
    assert not found.keys() & {
        "LAUNCHER_JOB",
        "LAUNCHER_WORKER",
    }  # otherwise the command would be treated as a worker of the run
    assert enter(shell, 3, "sh", "-c", 'exit "$1"', "sh", "7").returncode == 7


@pytest.mark.skipif("busybox" not in SHELLS, reason="needs busybox")
def test_a_rank_is_found_by_busybox_1_38(rank: subprocess.Popen[bytes], tmp_path: Path) -> None:
    (tmp_path / "grep").write_text(BUSYBOX_GREP)
    (tmp_path / "grep").chmod(0o755)
    assert enter("busybox", 3, "true", path=f"{tmp_path}:{os.environ['PATH']}").returncode == 0


@pytest.mark.parametrize("shell", SHELLS)
def test_a_rank_that_does_not_run_is_an_error(shell: str, rank: subprocess.Popen[bytes]) -> None:
    done = enter(shell, 4, "true")
    assert done.returncode == 3
    assert b"no process of rank 4 runs on node gpu-a" in done.stderr


def test_a_port_is_written_as_for_ssh() -> None:
    assert parse_forward("8888") == Forward(8888, 8888)
    assert parse_forward("9000:8888") == Forward(9000, 8888)
    for text in ("", "0", "65536", "8888:", ":8888", "a:8888", "1:2:3", "8888 ", "host:1:2"):
        with pytest.raises(UsageError, match="-L"):
            parse_forward(text)
