"""The example of docs/own-recipe.md, killed and resumed."""

import re
from pathlib import Path

import pytest
import yaml

from tests.train.runs import ROOT, digit_tree, finish, run, start

PAGE = (ROOT / "docs" / "own-recipe.md").read_text()
KILLED = """
import itertools
import os
import signal

import recipe

calls = itertools.count(1)


def focal(logits, labels):
    if next(calls) > LAST:
        os.kill(os.getpid(), signal.SIGKILL)
    return recipe.focal(logits, labels)
"""


def example(language: str, begins: str = "") -> str:
    """The page's only block of this language that begins so."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if block.startswith(begins)]
    return str(found)


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write the page's recipe and a table of digits; return the options of the page's command, for fewer images."""
    files = sorted(digit_tree(tmp_path / "digits", 90, 20).rglob("*.jpg"))
    rows = [(file.relative_to(tmp_path / "digits"), *reversed(file.parts[-3:-1])) for file in files]
    (tmp_path / "digits" / "images.csv").write_text("".join(f"{path},{label},{split}\n" for path, label, split in rows))
    (tmp_path / "recipe.py").write_text(example("python", "# recipe.py"))
    # at the last third: one call tries it out, and of each mixed batch there are two
    (tmp_path / "killed.py").write_text(KILLED.replace("LAST", str(1 + 2 * 8)))
    monkeypatch.syspath_prepend(tmp_path)  # of the ranks, too, which are forked
    monkeypatch.setenv("DIGITS", str(tmp_path / "digits"))
    words = example("sh").replace("\\\n", " ").split()
    own = words[words.index("launcher.trainer") + 1 :]
    changes = "--image-size 16 --val-resize 16 --epochs 2 --batch-size 8 --checkpoint-every 1 --log-every 1 "
    changes += "--workers 1 --threads 1 --device cpu --print-digest"
    return [*own, *changes.split()]


@pytest.mark.ci
def test_the_example_ends_alike_when_it_is_killed_and_resumed(options: list[str], tmp_path: Path) -> None:
    assert set(re.findall(r"^def (\w+)\(", example("python", "# recipe.py"), re.MULTILINE)) == {
        option.removeprefix("recipe:") for option in options if option.startswith("recipe:")
    }
    whole = run(tmp_path / "whole", 2, *options, "--checkpoints", tmp_path / "a")
    steps = [record["step"] for record in whole[0].metrics("step")]
    assert [int(line.partition(",")[0]) for line in (tmp_path / "losses.csv").read_text().split()] == steps
    dying = [*options, "--checkpoints", tmp_path / "b", "--loss", "killed:focal"]
    assert 0 not in finish(start(tmp_path / "parts", 2, *dying))
    again = run(tmp_path / "parts", 2, *options, "--checkpoints", tmp_path / "b")
    assert "train: resumed" in again[0].text
    assert again[0].digest == whole[0].digest


def test_the_job_has_the_options_of_the_command() -> None:
    job = yaml.safe_load(example("yaml"))
    words = example("sh").replace("\\\n", " ").split()
    args = {f"--{key.replace('_', '-')}": str(value) for key, value in job["run"]["args"].items()}
    own = words[words.index("launcher.trainer") + 1 :]
    assert args == dict(zip(own[::2], own[1::2], strict=True))
