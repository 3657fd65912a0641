"""Commands on this machine: both streams, stdin, and answers without an end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launcher.errors import LauncherError, NodeUnfit, NodeUnreachable
from launcher.model.limits import DEFAULT_LIMITS, AnswerLimits
from launcher.node.connect import connect
from launcher.node.machine import LocalMachine, shell


def test_a_command_reads_its_input_and_both_streams_and_the_code_are_told() -> None:
    machine, text = LocalMachine("a", "me"), b"x" * (3 << 20)
    done = machine.run(shell("cat; echo complaint >&2; exit 3"), text)
    assert (done.code, done.out, done.err) == (3, text, b"complaint\n")
    assert machine.run(["cat"]).out == b""
    assert machine.run(shell("kill -9 $$")).code < 0
    assert machine.run(["true"], text).code == 0  # which does not read it


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("yes", NodeUnfit, "printed over 1 MiB"),
        ("while :; do echo x; sleep 0.1; done", NodeUnreachable, "did not end in 1 s"),
        ("sleep 60 & sleep 60", NodeUnreachable, "did not end in 1 s"),
        ("trap '' TERM PIPE; while :; do sleep 0.1; done", NodeUnreachable, "did not end in 1 s"),
    ],
)
def test_a_command_without_an_end_is_given_up_and_ended(
    tmp_path: Path, script: str, error: type[LauncherError], words: str
) -> None:
    began = time.monotonic()
    with pytest.raises(error, match=words):
        LocalMachine("a", "me", AnswerLimits(1 << 20, 1.0)).run(shell(f"echo $$ >{tmp_path}/pid; {script}"))
    assert time.monotonic() - began < 50
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_the_settings_file_has_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with connect([("local", "local")], "process") as fleet:
        assert fleet.engines[0].machine.limits == DEFAULT_LIMITS
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "settings.yaml").write_text("limits: {answer: 1g, wait: 5m}\n")
    with connect([("local", "local")], "process") as fleet:
        assert fleet.engines[0].machine.limits == AnswerLimits(1 << 30, 300)
