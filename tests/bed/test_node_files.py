"""A node's files over ssh."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from launcher.errors import NodeUnfit
from launcher.node.ssh.commands import Ssh
from launcher.node.ssh.connection import SshPool
from launcher.node.ssh.files import RemoteFiles
from tests.bed import faults
from tests.bed.bed import Bed

pytestmark = pytest.mark.bed
ROOT = "/home/trainer/.launcher/files-test"


@pytest.fixture
def files(bed: Bed) -> Iterator[RemoteFiles]:
    pool = SshPool(str(bed.ssh_config))
    made = RemoteFiles(Ssh("a", "node1", pool))
    made.make_dir(ROOT)
    yield made
    made.remove_tree(ROOT)
    made.close()
    pool.close()


def test_what_is_written_is_read_from_any_place(files: RemoteFiles) -> None:
    data = os.urandom(3_000_001)
    files.write(f"{ROOT}/f", data)
    for offset, limit in [(0, 1 << 20), (5, 70_000), (65_536, 65_536), (2_999_999, 100), (0, 10 << 20), (3_000_001, 9)]:
        assert files.read(f"{ROOT}/f", offset, limit) == data[offset : offset + limit]
    assert files.read(f"{ROOT}/f", 9_000_000) == b""


def test_modes_and_names_that_are_not_nice(bed: Bed, files: RemoteFiles) -> None:
    name = "a b'$(c)\"\\ü\n-d"
    files.write(f"{ROOT}/{name}", b"1", 0o640)
    files.make_dir(f"{ROOT}/-x/y")
    files.write(f"{ROOT}/-x/y/z", b"22")
    assert sorted((entry.path, entry.size) for entry in files.scan(ROOT)) == [("-x/y/z", 2), (name, 1)]
    assert files.read(f"{ROOT}/{name}") == b"1"
    modes = bed.sh(bed.nodes[0], f"stat -c %a {ROOT} {ROOT}/-x {ROOT}/-x/y {ROOT}/-x/y/z {ROOT}/a*").split()
    assert modes == ["700", "700", "700", "600", "640"]


def test_what_is_not_there(files: RemoteFiles) -> None:
    with pytest.raises(FileNotFoundError):
        files.read(f"{ROOT}/none")
    assert files.scan(f"{ROOT}/none") == []
    files.remove_tree(f"{ROOT}/none")
    files.make_dir(ROOT)


def test_links_are_not_followed(bed: Bed, files: RemoteFiles) -> None:
    bed.sh(bed.nodes[0], f"ln -s /etc {ROOT}/etc; ln -s /etc/passwd {ROOT}/passwd", user="trainer")
    assert files.scan(ROOT) == []
    files.remove_tree(ROOT)
    assert bed.sh(bed.nodes[0], "ls /etc/passwd").strip() == "/etc/passwd"
    files.make_dir(ROOT)


def test_what_may_not_be_touched_is_said(files: RemoteFiles) -> None:
    with pytest.raises(NodeUnfit, match="a: could not write /root/x"):
        files.write("/root/x", b"")
    with pytest.raises(PermissionError):
        files.read("/etc/shadow")
    with pytest.raises(NodeUnfit, match="could not make the folder"):
        files.make_dir("/root/y")


@pytest.mark.parametrize("path", ["/", "/home", "relative", "/home/trainer/../..", "/./home/"])
def test_nothing_near_the_root_is_ever_removed(files: RemoteFiles, path: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        files.remove_tree(path)


def test_a_full_disk_leaves_no_half_file(bed: Bed, files: RemoteFiles) -> None:
    with faults.small_disk(bed, bed.nodes[0], f"{ROOT}/small", "64k"):
        with pytest.raises(NodeUnfit, match="No space left"):
            files.write(f"{ROOT}/small/f", b"x" * 1_000_000)
        assert files.scan(f"{ROOT}/small") == []
    bed.sh(bed.nodes[0], f"rmdir {ROOT}/small")


def test_a_server_without_sftp_is_read_all_the_same(bed: Bed, files: RemoteFiles) -> None:
    files.write(f"{ROOT}/f", b"0123456789" * 1000)
    files._by_command = True
    assert files.read(f"{ROOT}/f", 3, 5) == b"34567"
    assert files.read(f"{ROOT}/f", 9_998) == b"89"
    assert files.read(f"{ROOT}/f", 10_000) == b""
    with pytest.raises(FileNotFoundError):
        files.read(f"{ROOT}/none")
