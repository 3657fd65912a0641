"""Files of a node, on this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from launcher.errors import NodeUnfit
from launcher.node.files import Files
from launcher.node.machine import LocalMachine
from launcher.node.parallel import run_all

NODES = 8


@pytest.fixture
def files() -> Files:
    return Files(LocalMachine("local-0", "me"))


def test_nodes_that_share_a_folder_may_copy_into_it_at_the_same_time(files: Files, tmp_path: Path) -> None:
    """As `--resume` does with checkpoints; cp alone fails if another process creates the same file or folder."""
    source = tmp_path / "source"
    for number in range(20):
        (source / f"epoch-{number:04}").mkdir(parents=True)
        (source / f"epoch-{number:04}" / "model").write_text(str(number))
    for turn in range(5):
        target = tmp_path / "runs" / str(turn) / "checkpoints"
        run_all([partial(files.copy_tree, str(source), str(target))] * NODES)
        assert sorted(path.name for path in target.parent.iterdir()) == ["checkpoints"]
        assert len(list(target.glob("epoch-*/model"))) == 20


def test_a_copy_that_fails_leaves_nothing(files: Files, tmp_path: Path) -> None:
    with pytest.raises(NodeUnfit, match="could not copy"):
        files.copy_tree(str(tmp_path / "missing"), str(tmp_path / "new" / "checkpoints"))
    assert list((tmp_path / "new").iterdir()) == []
