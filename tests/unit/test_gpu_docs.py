"""The tables of docs/gpu.md and the recorded texts of tests/gpu_rows.py are about the same messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gpu_rows import RECORDED, TOOLKIT, output

PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
TEXTS = {
    "What CUDA and NCCL say": [output(words, log) for _, words, log, _, _ in RECORDED],
    "What the Container Toolkit says": [words for _, words, _, _ in TOOLKIT],
}


@pytest.mark.parametrize(("heading", "texts"), TEXTS.items())
def test_each_row_has_a_recorded_text_and_each_text_a_row(heading: str, texts: list[str]) -> None:
    table = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ")[0] for line in table.replace("\\|", "").splitlines() if line.startswith("| ")][1:]
    rows = [[message.removesuffix(" ...") for message in re.findall("`([^`]+)`", cell)] for cell in cells]
    assert [row for row in rows if not any(message in text for message in row for text in texts)] == []
    every = [message for row in rows for message in row]
    assert [text for text in texts if not any(message in text for message in every)] == []
