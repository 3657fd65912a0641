"""Folders of files on this machine, as `--resume` copies them."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from launcher.errors import NodesFailed, NodeUnfit
from launcher.node import trees
from launcher.node.files import Files
from launcher.node.machine import LocalMachine
from launcher.node.parallel import run_all
from launcher.node.trees import Entry, Place

NODES = 8
AREA = "checkpoints"


@pytest.fixture
def files() -> Files:
    return Files(LocalMachine("local-0", "me"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A program's checkpoints: several folders, an empty file, names with spaces, a link to the last one."""
    folder = tmp_path / "source" / AREA
    for number in range(20):
        (folder / f"epoch-{number:04}").mkdir(parents=True)
        (folder / f"epoch-{number:04}" / "model").write_text(str(number))
        os.utime(folder / f"epoch-{number:04}" / "model", (1.7e9 + number, 1.7e9 + number + 0.123456789))
    (folder / "empty").touch()
    (folder / "a name").write_bytes(os.urandom(200_000))
    (folder / "last").symlink_to("epoch-0019")
    return folder


def listed(files: Files, folder: Path) -> list[Entry]:
    """What is in a folder, in an order that does not depend on the file system."""
    return sorted(trees.entries(files, str(folder))[0], key=lambda entry: entry.path)


def same_tree(one: Path, other: Path) -> bool:
    return subprocess.run(["diff", "-r", "--no-dereference", one, other], check=False).returncode == 0


def test_nodes_that_share_a_folder_may_copy_into_it_at_the_same_time(files: Files, source: Path) -> None:
    """cp alone fails if another process creates the same file or folder."""
    found = listed(files, source)
    target = source.parents[1] / "new" / AREA
    paths = [entry.path for entry in found]
    run_all([partial(trees.copy, files, str(source), str(target), paths, below=str(source.parent))] * NODES)
    assert same_tree(source, target)
    assert all(old.same(new) for old, new in zip(found, listed(files, target), strict=True))


def test_a_copy_that_fails_leaves_no_part(files: Files, tmp_path: Path) -> None:
    with pytest.raises(NodeUnfit, match="could not copy"):
        trees.copy(files, str(tmp_path / "missing"), str(tmp_path / "new" / AREA), ["last.pt"], below=str(tmp_path))
    assert list((tmp_path / "new" / AREA).iterdir()) == []


class Counted(Files):
    """Files that count how many bytes were read."""

    read_bytes = 0

    def read_spans(self, spans, *, below):  # type: ignore[no-untyped-def]
        for span, piece in super().read_spans(spans, below=below):
            self.read_bytes += len(piece)
            yield span, piece


def test_a_file_is_read_once_and_written_to_all_that_lack_it(source: Path, tmp_path: Path) -> None:
    files = Counted(LocalMachine("gpu-a", "me"))
    found = listed(files, source)
    places = [Place(LocalMachine(f"gpu-{n}", "me"), str(tmp_path / f"gpu-{n}" / AREA)) for n in range(NODES)]
    trees.fan_out("gpu-a", files, str(source), dict.fromkeys(found, places), below=str(source.parent))
    assert files.read_bytes == sum(entry.size for entry in found if not entry.link)
    for place in places:
        assert same_tree(source, Path(place.folder))
        assert all(old.same(new) for old, new in zip(found, listed(files, Path(place.folder)), strict=True))


def test_a_node_that_cannot_write_ends_the_copy_and_is_the_only_one_blamed(files: Files, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "last.pt").write_bytes(bytes(50_000_000))
    (tmp_path / "full").touch()  # no folder can be made in it
    entry = Entry("last.pt", 50_000_000, 1.0)
    places = [Place(LocalMachine(name, "me"), str(tmp_path / name / AREA)) for name in ("gpu-b", "full", "gpu-c")]
    with pytest.raises(NodesFailed) as failed:
        trees.fan_out("gpu-a", files, str(tmp_path / "source"), {entry: places}, below=str(tmp_path))
    assert [error.where for error in failed.value.errors] == ["full"]
    assert not [path for path in tmp_path.rglob("*") if path.name == "last.pt" and path.parent.name == AREA]


def test_a_file_that_became_shorter_is_not_written(files: Files, tmp_path: Path) -> None:
    (tmp_path / "last.pt").write_bytes(bytes(1000))
    place = Place(LocalMachine("gpu-b", "me"), str(tmp_path / AREA))
    with pytest.raises(NodesFailed, match=r"gpu-a: .*last.pt could not be read, or was changed"):
        trees.fan_out("gpu-a", files, str(tmp_path), {Entry("last.pt", 2000, 1.0): [place]}, below=str(tmp_path.parent))
    assert list((tmp_path / AREA).iterdir()) == []


def test_the_room_for_a_folder_that_does_not_exist_is_that_of_its_parent(files: Files, tmp_path: Path) -> None:
    assert (
        trees.room(files, str(tmp_path / "a" / "b")).free // 2**30 == trees.room(files, str(tmp_path)).free // 2**30 > 0
    )
