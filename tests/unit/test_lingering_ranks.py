"""torchrun.py names the ranks that still run when another one of their node has exited with code 0."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher import container_scripts


def test_ranks_that_do_not_exit_are_named_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(container_scripts.__file__).parent))
    script = importlib.import_module("torchrun")

    class Context:
        """The parts of torch's PContext that matter."""

        def __init__(self, *programs: str) -> None:
            started = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
            self.subprocess_handlers = {n: SimpleNamespace(proc=process) for n, process in enumerate(started)}
            self.envs = {n: {"RANK": str(4 + n)} for n in range(len(started))}

        def wait(self, timeout: float) -> str:
            return f"{timeout} of torch"

    script.replace_wait(Context, 0.3)
    stays = "import time; time.sleep(100)"
    ranks, other = Context("", stays, "", stays), Context("", "raise SystemExit(3)")
    processes = [each.proc for context in (ranks, other) for each in context.subprocess_handlers.values()]
    for index in (0, 2, 4, 5):
        processes[index].wait(timeout=100)
    for _ in range(20):
        assert (ranks.wait(0), other.wait(timeout=1)) == ("0 of torch", "1 of torch")
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.wait()
    assert [line for line in capfd.readouterr().err.splitlines() if line.startswith("launcher")] == [
        "launcher: ranks 5, 7 still run, 0 s after ranks 4, 6 exited with code 0"
    ]
