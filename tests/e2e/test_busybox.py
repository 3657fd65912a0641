"""A node with BusyBox: its find has neither -printf nor -delete."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.node import trees
from launcher.node.engine import CLEAR
from launcher.node.files import FileEntry, Files
from launcher.node.machine import LocalMachine
from launcher.node.process.engine import ProcessEngine
from launcher.run.doctor import _DATA
from tests.e2e.cli import Cli
from tests.unit.test_workdir import Node


@pytest.fixture
def names(tmp_path: Path) -> Path:
    """An output folder with files of every kind and with every name."""
    folder = tmp_path / "out"
    (folder / "a b").mkdir(parents=True)
    (folder / "a b" / "model").write_bytes(b"x" * 1000)
    (folder / "line\nbreak").write_text("abc")
    (folder / "-n").touch()
    (folder / "$(x) 'q'").write_text("1")
    (folder / "link").symlink_to("a b/model")
    os.mkfifo(folder / "pipe")
    for path in folder.rglob("*"):
        os.utime(path, (1.7e9, 1.7e9), follow_symlinks=False)
    return folder


@pytest.fixture
def busybox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    program = shutil.which("busybox")
    assert program is not None, "install busybox"
    applets = tmp_path / "applets"
    applets.mkdir()
    subprocess.run([program, "--install", "-s", applets], check=True)
    with monkeypatch.context() as changed:
        changed.setenv("PATH", str(applets))
        yield


MACHINE = LocalMachine("local-0", "me")
FILES = Files(MACHINE)


def listed(folder: Path) -> list[list[str]]:
    """Files that are read, those that are not, and all with their links."""
    ignored: list[FileEntry] = []
    found = FILES.scan(str(folder), below=str(folder), ignored=ignored.append)
    return [sorted(map(repr, each)) for each in (found, ignored, trees.entries(FILES, str(folder))[0])]


@pytest.mark.usefixtures("busybox")
def test_this_find_lacks_what_is_replaced() -> None:
    for option in ("-printf ''", "-delete"):
        assert MACHINE.script(f"find . -name no-such-file {option}").code, option


def test_files_are_listed_as_by_gnus_find(names: Path, request: pytest.FixtureRequest) -> None:
    expected = listed(names)
    assert list(map(len, expected)) == [4, 2, 5]
    request.getfixturevalue("busybox")
    assert listed(names) == expected


def test_a_hard_link_to_another_users_file_is_not_read(names: Path, request: pytest.FixtureRequest) -> None:
    if os.geteuid() != 0:
        pytest.skip("changes an owner")
    os.chown(names / "-n", 54321, -1)
    os.link(names / "-n", names / "other")
    expected = listed(names)
    assert sum("hard link to another user" in line for line in expected[1]) == 2
    request.getfixturevalue("busybox")
    assert listed(names) == expected


def test_data_has_the_same_digest(names: Path, request: pytest.FixtureRequest) -> None:
    (names / "line\nbreak").unlink()
    expected = MACHINE.script(_DATA, str(names), "16").out
    assert expected.startswith(b"3 ")
    request.getfixturevalue("busybox")
    assert MACHINE.script(_DATA, str(names), "16").out == expected


@pytest.mark.usefixtures("busybox")
def test_unchanged_code_is_removed_with_its_folders(tmp_path: Path) -> None:
    node = Node(tmp_path)
    Path(node.workdir, "alias").unlink()  # BusyBox's tar does not set a link's time, so links of the code stay
    Path(node.workdir, "pkg", "own").write_text("x")
    assert node.written() == ["pkg/own"]
    assert node.down() == [".launcher-run", "workdir", "workdir/a", "workdir/a/pkg", "workdir/a/pkg/own"]


@pytest.mark.usefixtures("busybox")
def test_shared_memory_that_a_process_has_open_stays() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="torch_") as held:
        name = Path(held.name).name
        assert name not in MACHINE.script(CLEAR, "0").out.decode().split()
        assert Path(held.name).exists()


def test_what_is_left_in_shared_memory_is_found(busybox: None) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as held:
        held.write(b"12345")
        held.flush()
        unused = Path(f"{held.name}-unused")
        unused.write_bytes(b"123")
        try:
            left = {each.name: each.size for each in ProcessEngine("local").shared_memory(0.0)}
        finally:
            unused.unlink()
    assert left.get(unused.name) == 3
    assert Path(held.name).name not in left


def test_a_run_is_collected_and_fetched(home_cli: Cli, tmp_path: Path, busybox: None) -> None:
    cli = replace(home_cli, env={**home_cli.env, "PATH": str(tmp_path / "applets")})
    script = "mkdir -p $LAUNCHER_OUTPUT/checkpoints; echo 1 > $LAUNCHER_OUTPUT/checkpoints/a.pt; echo over"
    job = cli.job(
        "job", runtime="process", nodes=["local", "local"], gpus="none", run={"command": ["sh", "-c", script]}
    )
    done = cli("up", job)
    assert done.stdout == "over\n"
    assert "warning" not in done.stderr
    cli("fetch", "--checkpoints")
    assert len(list(cli.runs()[-1].rglob("a.pt"))) == 1
    cli("down")
