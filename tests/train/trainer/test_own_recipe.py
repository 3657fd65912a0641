"""The example of docs/own-recipe.md, stopped and resumed."""

import re
import signal
from pathlib import Path

import pytest

from tests.train.runs import ROOT, digit_tree, finish, run, start

PAGE = (ROOT / "docs" / "own-recipe.md").read_text()


@pytest.mark.ci
def test_the_example_ends_alike_with_and_without_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(# recipe.py.*?)```", PAGE, re.DOTALL)
    (tmp_path / "recipe.py").write_text(code)
    (command,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    own = [word for word in command.split() if word.startswith("recipe:")]
    data = digit_tree(tmp_path / "data", 90, 20)
    options = (
        f"--data {data} --image-size 16 --epochs 2 --batch-size 8 --workers 1 --threads 1 --device cpu --mixup 0.2 "
        f"--arch {own[0]} --loss {own[1]} --schedule {own[2]} --log-every 1 --print-digest"
    ).split()
    monkeypatch.syspath_prepend(tmp_path)  # of the ranks, too, which are forked
    whole = run(tmp_path / "whole", 2, *options, "--checkpoints", tmp_path / "a")
    parts = start(tmp_path / "parts", 2, *options, "--checkpoints", tmp_path / "b")
    parts[0].wait_for("Epoch: [1][1/")
    parts[1].process.send_signal(signal.SIGTERM)
    assert finish(parts) == [143, 143], parts[0].text
    again = run(tmp_path / "parts", 2, *options, "--checkpoints", tmp_path / "b")
    assert "train: resumed" in again[0].text
    assert again[0].digest == whole[0].digest
