"""The entry point: exceptions that end the program without a traceback."""

from __future__ import annotations

import sys

import pytest

from launcher.cli import main
from launcher.errors import StoppedByUser


def test_ctrl_c_wrapped_in_a_librarys_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def app() -> None:
        raise ValueError("Error building `model` serializer:\n  KeyboardInterrupt: ")

    monkeypatch.setattr(main, "app", app)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == StoppedByUser.exit_code


def test_a_defect_is_one_message_with_a_way_to_report_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app() -> None:
        raise ValueError("no such\x1b[2J thing")

    monkeypatch.setattr(main, "app", app)
    monkeypatch.setattr(sys, "argv", ["launcher", "runs"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "unexpected ValueError: no such\\x1b[2J thing (test_main.py:" in said
    assert "--debug" in said
    monkeypatch.setattr(sys, "argv", ["launcher", "--debug", "runs"])
    with pytest.raises(ValueError, match="no such"):
        main.main()


def test_a_file_of_this_machine_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(main, "app", lambda: open("/nowhere/at/all"))  # noqa: PTH123, SIM115
    monkeypatch.setattr(sys, "argv", ["launcher", "runs"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 3
    assert "this machine: No such file or directory: /nowhere/at/all" in capsys.readouterr().err
