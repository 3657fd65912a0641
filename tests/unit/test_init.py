"""`launcher init --skill`: what a coding assistant reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.unit.test_record_fuzz import call

ROOT = Path(__file__).parents[2]


def test_the_skill_has_a_header_and_the_page_without_links_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed = call("init", "--skill")
    assert code == 0
    _, header, text = printed.split("---\n", 2)
    known = yaml.safe_load(header)
    assert known.keys() == {"name", "description"}
    assert re.fullmatch("[a-z0-9-]{1,64}", known["name"])
    assert len(known["description"]) <= 1024
    assert not re.search(r"\]\((?!https?:)", text)
    page = (ROOT / "docs" / "agents.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in page.splitlines() if line.startswith("#")
    ]
    assert "Ask before `down`" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("more", [["job.yaml"], ["--example", "quickstart"], ["--force"]])
def test_the_skill_is_printed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed = call("init", "--skill", *more)
    assert (code, "--skill: writes no file" in printed) == (2, True)
    assert not list(tmp_path.iterdir())
