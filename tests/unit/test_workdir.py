"""The working directory on a node: what counts as the program's, and what `down` removes from it."""

from __future__ import annotations

import os
import shutil
import time
import zipfile
from pathlib import Path

import pytest

from launcher.errors import NodeUnfit
from launcher.model.limits import AnswerLimits
from launcher.node import output_folder
from launcher.node.files import Files
from launcher.node.machine import LocalMachine
from launcher.records.snapshot import snapshot
from launcher.records.workdir import SENT, SentFile, is_sent, list_sent, remove_sent, sent_files
from launcher.records.written import is_written

HERE = Files(LocalMachine("here", "me"))
RUN = "job-20260101-000000-aaaa"


class Node:
    """A working directory with code in it: main.py, conf/a.yaml, pkg/mod.py, and a link."""

    def __init__(self, folder: Path) -> None:
        code = folder / "project"
        for name in ("main.py", "conf/a.yaml", "pkg/mod.py", "pkg/deep/er/x.py"):
            (code / name).parent.mkdir(parents=True, exist_ok=True)
            (code / name).write_text(name)
        (code / "alias").symlink_to("pkg")
        archive = snapshot(code).archive
        self.sent = sent_files(archive)
        self.output = folder / "output"
        self.workdir = self.output / "workdir" / "a"
        output_folder.make(HERE, str(self.output), RUN, str(self.workdir))
        output_folder.unpack(HERE, str(self.workdir), archive, [("/etc", "data/set"), ("/etc/passwd", "conf/users")])

    def written(self) -> list[str]:
        found = [file for file in HERE.scan(str(self.output)) if is_written(file, ["a"], self.sent)]
        return sorted(file.path.removeprefix("workdir/a/") for file in found)

    def down(self) -> list[str]:
        remove_sent(HERE, str(self.output), "a", list_sent(HERE, str(self.output), "a", self.sent))
        return sorted(str(path.relative_to(self.output)) for path in self.output.rglob("*"))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_unchanged_code_and_mount_points_are_not_the_programs_and_go(node: Node) -> None:
    assert node.written() == []
    assert node.down() == [".launcher-run"]


@pytest.mark.parametrize("zone", ["UTC", "Etc/GMT+12", "Pacific/Kiritimati"])
def test_the_sent_code_can_be_packed_as_zip(node: Node, zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose times are local ones since 1980."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        (node.workdir / "conf/users").unlink()  # a mount point
        assert zipfile.is_zipfile(shutil.make_archive(str(node.output / "code"), "zip", node.workdir))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert {found.mtime for found in node.sent.values()} == {SENT}
    assert is_sent(None, "main.py", 7, SENT)
    assert is_sent(None, "main.py", 7, 0)  # sent by an earlier launcher
    assert not is_sent(None, "main.py", 7, 1.8e9)


@pytest.mark.parametrize(
    ("path", "size", "mtime", "kind", "sent"),
    [
        ("main.py", 7, SENT, "f", True),
        ("main.py", 7, SENT, "l", False),  # the program has replaced the file by a link
        ("alias", 3, SENT, "l", True),  # sizes of links differ between file systems
        ("alias", 3, SENT, "f", False),  # and the link by a file
        ("conf/users", 0, 0, "f", True),  # a mount point
        ("conf/users", 0, 0, "l", False),
    ],
)
def test_a_link_in_place_of_a_sent_file_is_the_programs(
    path: str, size: int, mtime: float, kind: str, sent: bool
) -> None:
    code = {"main.py": SentFile("f", 7, SENT), "alias": SentFile("l", 0, SENT)}
    assert is_sent(code, path, size, mtime, kind) is sent


def test_what_the_program_wrote_or_changed_stays(node: Node) -> None:
    for name in ("checkpoints/last.pt", "-rf", " a ", "pkg/new", "conf\nig", "pkg/__pycache__/mod.cpython-311.pyc"):
        (node.workdir / name).parent.mkdir(exist_ok=True)
        (node.workdir / name).write_text("x")
    (node.workdir / "conf/a.yaml").write_text("CONF/A.YAML")  # of the same size
    shutil.copytree(node.workdir / "pkg", node.workdir / "snapshot")  # with the times of the code
    kept = ["-rf", "checkpoints/last.pt", "conf\nig", "conf/a.yaml", " a ", "pkg/new"]
    copied = [f"snapshot/{name}" for name in ("__pycache__/mod.cpython-311.pyc", "mod.py", "new", "deep/er/x.py")]
    assert node.written() == sorted([*kept, *copied])
    left = node.down()
    assert {name for name in left if (node.output / name).is_file()} == {
        ".launcher-run",
        *(f"workdir/a/{name}" for name in (*kept, *copied)),
    }
    assert not (node.workdir / "alias").is_symlink()
    assert not (node.workdir / "pkg/deep").exists()


@pytest.mark.parametrize("replaced", ["workdir", "workdir/a", "workdir/a/pkg", "workdir/a/pkg/deep"])
def test_nothing_is_removed_through_a_link(node: Node, tmp_path: Path, replaced: str) -> None:
    """The program replaces a folder by a link, between the listing and the removal as well as before."""
    listed = list_sent(HERE, str(node.output), "a", node.sent)
    victim = tmp_path / "victim"
    shutil.copytree(node.output / replaced, victim, symlinks=True)
    (victim / "empty").mkdir()
    before = sorted(victim.rglob("*"))
    shutil.move(node.output / replaced, tmp_path / "moved")
    (node.output / replaced).symlink_to(victim)
    remove_sent(HERE, str(node.output), "a", listed)
    node.down()
    assert sorted(victim.rglob("*")) == before


def test_a_link_in_place_of_a_file_is_removed_only_if_it_was_sent(node: Node, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("main.py")
    os.utime(precious, (0, 0))
    (node.workdir / "main.py").unlink()
    (node.workdir / "main.py").symlink_to(precious)
    (node.workdir / "alias").unlink()
    (node.workdir / "alias").symlink_to("conf")
    node.down()
    assert precious.exists()
    assert (node.workdir / "main.py").is_symlink()
    assert (node.workdir / "alias").is_symlink()


def test_too_many_files_to_list_are_an_error(node: Node) -> None:
    little = Files(LocalMachine("here", "me", AnswerLimits(size=20)))
    with pytest.raises(NodeUnfit, match="printed over"):
        list_sent(little, str(node.output), "a", node.sent)


def test_other_nodes_are_left_alone(node: Node) -> None:
    shutil.copytree(node.workdir, node.output / "workdir" / "b", symlinks=True)
    assert "workdir/b/main.py" in node.down()


def test_files_of_the_code_are_known_by_name_size_and_time(node: Node) -> None:
    assert is_sent(node.sent, "main.py", 7, SENT)
    assert not is_sent(node.sent, "main.py", 8, SENT)
    assert not is_sent(node.sent, "main.py", 7, 0.5)
    assert not is_sent(node.sent, "main.py", 7, 0.0, "l")
    assert not is_sent(node.sent, "other.py", 7, SENT)
    assert not is_sent(node.sent, "__pycache__/other.cpython-311.pyc", 7, 1.0)
