"""A person at a tmux of 80 columns debugs two ranks of a run on two machines, and loses the connection on the way."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bed import faults
from tests.bed.bed import Bed
from tests.e2e.cli import ROOT, Cli, bed_job

PROGRAM = """
import torch.distributed as dist
dist.init_process_group("gloo")
for turn in (1, 0):
    mine = dist.get_rank()
    if mine == turn:
        breakpoint()
    dist.barrier()
print("rank", mine, "went through", flush=True)
dist.destroy_process_group()
"""
COLUMNS = 80
FORGOTTEN = 120.0  # seconds for which the rank waits; hang_timeout is half of it


class Tmux:
    """A window in which somebody types. What has scrolled away is still seen; lines are as the terminal wraps them."""

    def __init__(self, folder: Path, cli: Cli, name: str) -> None:
        self._call = ["tmux", "-S", str(folder / name)]
        env = {**cli.env, "CI": "", "PYTHONPATH": str(ROOT)}
        del env["COLUMNS"]
        own = ["env", *(f"{key}={value}" for key, value in env.items()), "sh"]
        size = ["-x", str(COLUMNS), "-y", "30"]
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "-c", str(cli.cwd), shlex.join(own))

    def _tmux(self, *arguments: str) -> str:
        return subprocess.run([*self._call, *arguments], check=True, capture_output=True, text=True, timeout=60).stdout

    def types(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)
        self._tmux("send-keys", "Enter")

    def calls(self, *arguments: str) -> None:
        """Clears the window, and types a call of the launcher."""
        self._tmux("send-keys", "-R")
        self._tmux("clear-history")
        self.types(f"{shlex.quote(sys.executable)} -m launcher {' '.join(arguments)}; echo ex''it=$?")

    def shown(self) -> str:
        return self._tmux("capture-pane", "-p", "-S", "-")

    def sees(self, *texts: str, timeout: float = 180) -> str:
        """Waits for one of the texts, however it is wrapped; returns it."""
        deadline, wanted = time.monotonic() + timeout, {"".join(text.split()): text for text in texts}
        while True:
            window = self.shown()
            if found := [text for short, text in wanted.items() if short in "".join(window.split())]:
                return found[0]
            assert time.monotonic() < deadline, f"{texts} did not appear:\n{window}"
            time.sleep(0.5)

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.mark.slow
@pytest.mark.bed
@pytest.mark.timeout(900)
def test_two_ranks_one_after_another(bed_cli: Cli, bed: Bed, tmp_path: Path) -> None:
    if shutil.which("tmux") is None:
        pytest.skip("no tmux")
    (bed_cli.cwd / "walk.py").write_text(PROGRAM)
    job = bed_cli.job("walk", **bed_job(run={"script": "walk.py"}, gpus="none", hang_timeout="60s"))
    follows, person = Tmux(tmp_path, bed_cli, "follows"), Tmux(tmp_path, bed_cli, "person")
    try:
        follows.calls("up", str(job))
        follows.sees("rank 1 on node2 waits in walk.py:7, breakpoint(): launcher debug walk-")
        time.sleep(FORGOTTEN)
        person.calls("status")
        person.sees("exit=0")
        assert "running" in person.shown()
        person.calls("debug")
        person.sees("(Pdb rank 1)")
        person.types("p 6 * 7")
        person.sees("42 (Pdb rank 1)")
        faults.kill_ssh_sessions(bed, bed.nodes[1])  # the connection is cut
        person.sees("exit=")
        person.calls("debug")
        person.sees("-> dist.barrier() (Pdb rank 1)")
        person.sees("rank 1 on node2 stopped in walk.py:7")
        person.types("p turn, mine")
        person.sees("(1, 1)")
        person.types("c")
        person.sees("rank 1 goes on")
        if person.sees("(Pdb rank 0)", "exit=0") == "exit=0":  # rank 0 was not there yet
            follows.sees("rank 0 on node1 waits in walk.py:7, breakpoint(): launcher debug")
            person.calls("debug")
            person.sees("(Pdb rank 0)")
        person.types("c")
        person.sees("rank 0 goes on")
        person.sees("exit=0")
        assert all(len(line) <= COLUMNS for line in person.shown().splitlines())
        follows.sees("exit=0")
        assert bed_cli.result()["state"] == "done"
    finally:
        follows.close()
        person.close()
