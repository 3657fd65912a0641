"""The end of a run: what only explains or shows it may fail in any way; the outcome and the clean-up are the same."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import launcher
from launcher.node.connect import Fleet
from launcher.node.files import Files
from launcher.node.process.engine import ProcessEngine
from launcher.records.paths import RunPaths
from launcher.records.store import Record
from launcher.run.locate import connected_run
from launcher.run.watch.messages import Message, Warned
from tests.ports import free_port

NAME = "a" * 300  # longer than a file's name


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def up(program: str, said: list[str]) -> launcher.Run:
    argv = ["sh", "-c", textwrap.dedent(program)]
    keys = {"name": "ends", "runtime": "process", "nodes": ["local"], "port": free_port(), "run": {"command": argv}}
    return launcher.up(keys, log=said.append)


def left(run: launcher.Run) -> list[Path]:
    return [*Path.home().joinpath(".launcher", run.id).glob(".node")]


def test_a_search_for_what_was_left_out_that_fails_is_a_warning(project: Path) -> None:
    (project / ".gitignore").write_text("data/\n")
    (project / "data").mkdir()
    (project / "data" / "x.py").write_text("")
    said: list[str] = []
    with up(f"echo \"ModuleNotFoundError: No module named '{NAME}.b'\" >&2; exit 3", said) as run:
        outcome = run.wait()
    assert outcome.failure is not None
    assert (outcome.exit_code, outcome.failure.exit_code) == (1, 3)
    assert left(run) == []
    warned = [line for line in said if line.startswith("warning: whether a file was left out")]
    assert len(warned) == (sys.version_info < (3, 14))  # since then such a file does not exist, without an error
    assert all("File name too long" in line for line in warned)


@pytest.mark.parametrize("code", [0, 3])
def test_metrics_that_cannot_be_recorded_are_a_warning(project: Path, code: int) -> None:
    (project / "deep.py").write_text(
        "import os\ndeep = '[' * 700 + ']' * 700\n"
        "open(os.environ['LAUNCHER_OUTPUT'] + '/metrics.jsonl', 'w')"
        '.write(\'{"kind": "epoch", "step": 1, "x": \' + deep + \'}\\n\')\n'
    )
    seen: list[Message] = []
    with up(f"python3 deep.py; exit {code}", []) as run:
        outcome = run.wait(show=seen.append)
    assert (outcome.state.value, outcome.exit_code) == (("failed", 1) if code else ("done", 0))
    assert (left(run) == []) is bool(code)


def test_steps_of_a_program_need_no_kind(project: Path) -> None:
    """Of the lines of a program of one's own, those with a step are its progress, as `up` shows it."""
    lines = '{"step": 7, "loss": 0.5}\\n{"kind": "mine", "step": 9}\\n{"accuracy": 1}\\n'
    with up(f"printf '{lines}' > \"$LAUNCHER_OUTPUT/metrics.jsonl\"", []) as run:
        run.wait()
        assert run.status().to_dict()["progress"] == {"step": 7, "loss": 0.5, "eta": None}


class Broken(Files):
    """After the run: answers of a node that no one has thought of."""

    over = False

    def run(self, *args: Any, **options: Any) -> Any:
        if self.over:
            raise ValueError("an answer that no one has thought of")
        return super().run(*args, **options)


def test_a_node_whose_files_cannot_be_asked_about_is_a_warning(project: Path) -> None:
    said: list[str] = []
    with up("while [ ! -e ../../go ]; do sleep 0.1; done; exit 3", said) as started:
        engine = ProcessEngine("local")
        files = engine.files = Broken(engine.machine)
        record = Record(RunPaths(started.folder))
        attached = connected_run(record, Fleet([engine], {}, None))
        run = launcher.Run(record, None, said.append, attached, started.plan)

        def show(message: Message) -> None:
            shown.append(message)
            files.over = type(message).__name__ == "NodeEnded" or files.over

        shown: list[Message] = []
        (Path.home() / ".launcher" / run.id / "go").touch()
        outcome = run.wait(show=show)
        assert outcome.failure is not None
        assert (outcome.exit_code, outcome.failure.exit_code) == (1, 3)
        assert left(run) == []
        warned = [message.reason for message in shown if isinstance(message, Warned)]
        unknown = ["whether a disk is full is not known", "the last checkpoint is not known"]
        assert [reason.partition(":")[0] for reason in warned] == unknown
        written = run.written()
        assert written is not None
        assert "an answer that no one has thought of" in written.unlisted
