"""Selection of code files, and adding the launcher's trainer."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import JobInvalid
from launcher.job.loader import parse_job
from launcher.job.models import Job
from launcher.records import snapshot as snapshots
from launcher.records.code_files import code_files
from launcher.records.snapshot import pack, snapshot
from launcher.records.trainer import needed_trainer

ROOT = Path(__file__).resolve().parents[2]


def names(folder: Path) -> set[str]:
    return {file.name for file in code_files(folder)}


def fill(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize("line", ["!", "! ", "/", "!/", "//", "\\", "a\\", "[z-a]", "[", "![", "***/["])
@pytest.mark.parametrize("at", ["", "sub/"])
def test_an_invalid_pattern_ignores_nothing_and_the_others_apply(tmp_path: Path, at: str, line: str) -> None:
    fill(tmp_path, "main", "sub/a", "sub/b", "b")
    (tmp_path / at / ".gitignore").write_text(f"b\n{line}\n")
    assert names(tmp_path) == {"main", "sub/a", f"{at}.gitignore"} | ({"b"} if at else set())


@given(lines=st.lists(st.text(st.sampled_from("!*?[]\\/ab-^# .\x80é"), max_size=6), max_size=3))
def test_no_ignore_file_breaks_the_walk(lines: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (fill(Path(folder), "a/b", "b") / ".gitignore").write_text("\n".join(lines))
        assert names(Path(folder)) <= {"a/b", "b", ".gitignore"}


def test_ignore_files_in_many_folders_cost_little(tmp_path: Path) -> None:
    """Only ignore files in parent folders are evaluated. Measured in CPU time, which other programs do not affect."""

    def cost() -> float:
        began = time.process_time()
        assert len(names(tmp_path)) >= 4000
        return time.process_time() - began

    fill(tmp_path, *(f"{folder}/{file}" for folder in range(400) for file in range(10)))
    without = min(cost() for _ in range(3))
    for folder in range(400):
        (tmp_path / str(folder) / ".gitignore").write_text("*.o\n")
    assert min(cost() for _ in range(3)) < 6 * without


def test_slow_packing_reports_progress_and_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, *map(str, range(50)))
    lines: list[str] = []
    assert snapshot(tmp_path, lines.append)
    assert lines == []
    monkeypatch.setattr(snapshots, "SLOW", 0.0)
    assert snapshot(tmp_path, lines.append)
    assert "1 files found" in lines[0]
    assert ".dockerignore" in lines[0]
    assert " of 50 files" in lines[-1]
    assert len(lines) < 30  # at increasing intervals


def job(module: str) -> Job:
    return parse_job(f"name: j\nruntime: process\nnodes: [local]\nrun:\n  module: {module}\n")


@pytest.mark.parametrize(
    ("files", "module", "needed"),
    [
        (["main.py"], "train", True),
        (["main.py"], "train.data.pack", True),
        (["main.py"], "trainer", False),
        (["main.py"], "main", False),
        (["train.py"], "train", False),
        (["train/__init__.py"], "train", False),
        (["train/deep/er/own.py"], "train.deep.er.own", False),  # a package without __init__.py
        (["src/train/__init__.py"], "train", True),
        (["train/cat/1.jpg", "val/cat/2.jpg"], "train", True),  # data of that name is not a module
        (["training.py", "train.yaml"], "train", True),
    ],
)
def test_the_trainer_is_added_to_code_that_runs_it_and_has_none(
    tmp_path: Path, files: list[str], module: str, needed: bool
) -> None:
    fill(tmp_path, *files)
    found = needed_trainer(job(module), tmp_path, code_files(tmp_path))
    assert found == (ROOT / "train" if needed else None)


def test_a_module_that_is_ignored_is_not_in_the_code(tmp_path: Path) -> None:
    (fill(tmp_path, "train/__init__.py") / ".gitignore").write_text("train/\n")
    assert needed_trainer(job("train"), tmp_path, code_files(tmp_path))


def test_a_link_may_be_the_module_and_another_file_is_a_conflict(tmp_path: Path) -> None:
    fill(tmp_path, "src/train/__main__.py", "data/train/1.jpg")
    (tmp_path / "train").symlink_to("src/train")
    assert needed_trainer(job("train"), tmp_path, code_files(tmp_path)) is None
    (tmp_path / "train").unlink()
    (tmp_path / "train").symlink_to("data/train")
    with pytest.raises(
        JobInvalid, match=r"job\.yaml:5: run\.module: .* conflicts with the launcher's trainer; rename it"
    ):
        needed_trainer(job("train"), tmp_path, code_files(tmp_path))


def test_code_and_trainer_have_a_digest_each(tmp_path: Path) -> None:
    one, two = fill(tmp_path / "one", "a"), fill(tmp_path / "two", "b")
    lines: list[str] = []
    digests = [pack(job("train"), folder, lines.append).digest for folder in (one, two)]
    (first, added), (second, same) = (digest.split(" with train ") for digest in digests)
    assert first == pack(job("main"), one, lines.append).digest == snapshot(one).digest
    assert first != second
    assert added == same
    assert [line.partition(":")[0] for line in lines] == ["the code has no module train"] * 2
