"""The entry point: exceptions that end the program without a traceback."""

from __future__ import annotations

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


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def app() -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(main, "app", app)
    with pytest.raises(ValueError, match="no such thing"):
        main.main()
