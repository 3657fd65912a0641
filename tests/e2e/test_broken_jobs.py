"""Every broken job file through the command: exit 2, one readable message with file:line, nothing touched."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from launcher.cli.main import main
from tests.e2e.cli import Cli

BROKEN = Path(__file__).parents[1] / "unit" / "broken_jobs"
FILES = sorted(BROKEN.iterdir())


def test_there_are_enough_broken_jobs() -> None:
    assert len(FILES) >= 50


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_broken_job_file(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["launcher", "up", str(path)])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    assert caught.value.code == 2, err
    assert not out
    assert err.startswith("error ")
    assert "Traceback" not in err
    assert re.search(rf"{re.escape(path.name)}(:\d+)?", err), err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["missing.yaml", "folder"])
def test_a_missing_file(cli: Cli, name: str) -> None:
    (cli.cwd / "folder").mkdir()
    refused = cli("up", name, code=2)
    assert name in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_program_refuses_a_typo_and_suggests_the_closest_key(cli: Cli) -> None:
    job = cli.job("typo", runtime="process", nodes=["local"], run={"moduel": "train"})
    refused = cli("up", job, code=2)
    assert re.search(r"typo\.yaml:\d+: run\.moduel: unknown key; did you mean 'module'\?", refused.stderr)
