"""A node's files over ssh."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import pytest

from launcher.errors import NodeUnfit, NodeUnreachable
from launcher.node.files import Files, Span
from launcher.node.ssh.connection import SshPool
from launcher.node.ssh.machine import SshMachine
from launcher.node.tail import Tail
from tests.bed import faults
from tests.bed.bed import Bed

pytestmark = pytest.mark.bed
ROOT = "/home/trainer/.launcher/files-test"


@pytest.fixture
def files(bed: Bed) -> Iterator[Files]:
    pool = SshPool(str(bed.ssh_config))
    made = Files(SshMachine("a", "node1", pool))
    made.make_dir(ROOT)
    yield made
    bed.sh(bed.nodes[0], f"rm -rf {ROOT}")
    pool.close()


def write(files: Files, path: str, data: bytes) -> None:
    files.write(path, [data], len(data), below=ROOT if path.startswith(ROOT) else "/root")


def test_a_written_file_can_be_read_from_any_offset(files: Files) -> None:
    data = os.urandom(3_000_001)
    write(files, f"{ROOT}/f", data)
    for offset, limit in [(0, 1 << 20), (5, 70_000), (65_536, 65_536), (2_999_999, 100), (0, 10 << 20), (3_000_001, 9)]:
        assert files.read(f"{ROOT}/f", offset, limit, below=ROOT) == data[offset : offset + limit]
    assert files.read(f"{ROOT}/f", 9_000_000, below=ROOT) == b""


def test_modes_and_difficult_names(bed: Bed, files: Files) -> None:
    name = "a b'$(c)\"\\ü\n-d"
    write(files, f"{ROOT}/{name}", b"1")
    files.make_dir(f"{ROOT}/-x/y")
    write(files, f"{ROOT}/-x/y/z", b"22")
    assert sorted((entry.path, entry.size) for entry in files.scan(ROOT)) == [("-x/y/z", 2), (name, 1)]
    assert files.read(f"{ROOT}/{name}", below=ROOT) == b"1"
    modes = bed.sh(bed.nodes[0], f"stat -c %a {ROOT} {ROOT}/-x {ROOT}/-x/y {ROOT}/-x/y/z {ROOT}/a*").split()
    assert modes == ["700", "700", "700", "600", "600"]


def test_missing_files(files: Files) -> None:
    with pytest.raises(FileNotFoundError):
        files.read(f"{ROOT}/none", below=ROOT)
    assert files.scan(f"{ROOT}/none") == []


def test_links_are_not_followed(bed: Bed, files: Files) -> None:
    bed.sh(bed.nodes[0], f"ln -s /etc {ROOT}/etc; ln -s /etc/passwd {ROOT}/passwd", user="trainer")
    assert files.scan(ROOT) == []


def test_denied_access_is_reported(files: Files) -> None:
    with pytest.raises(NodeUnfit, match="a: could not write /root/x"):
        write(files, "/root/x", b"")
    for folder, name in (("/etc", "shadow"), ("/root", "x")):
        with pytest.raises(NodeUnfit, match="Permission denied"):
            files.read(f"{folder}/{name}", below=folder)
    with pytest.raises(NodeUnfit, match="Permission denied"):
        files.scan("/root/x")
    with pytest.raises(NodeUnfit, match="could not make the folder"):
        files.make_dir("/root/y")


def test_a_full_disk_leaves_no_partial_file(bed: Bed, files: Files) -> None:
    with faults.small_disk(bed, bed.nodes[0], f"{ROOT}/small", "64k"):
        with pytest.raises(NodeUnfit, match="the output folder's disk is full"):
            write(files, f"{ROOT}/small/f", b"x" * 1_000_000)
        assert files.scan(f"{ROOT}/small") == []
    bed.sh(bed.nodes[0], f"rmdir {ROOT}/small")


def test_many_spans_of_many_files_come_in_one_response(files: Files) -> None:
    data = {f"{ROOT}/{name}": os.urandom(size) for name, size in (("a", 200_000), ("b c'd", 10), ("e", 0))}
    for path, content in data.items():
        write(files, path, content)
    big, small, empty = data
    spans = [
        Span(big, 5, 150_000),
        Span(small, 2, 3),
        Span(f"{ROOT}/none", 0, 9),
        Span(empty, 0, 4),
        Span(small, 9, 50),
    ]
    came: dict[Span, bytes] = {}
    for span, piece in files.read_spans(spans, below=ROOT):
        came[span] = came.get(span, b"") + piece
    assert came == {spans[0]: data[big][5:150_005], spans[1]: data[small][2:5], spans[4]: data[small][9:]}


def until(follower: Tail, path: str, size: int) -> bytes:
    """Reads `size` bytes of a followed file."""
    found = b""
    while len(found) < size:
        got = follower.next(60)
        assert got is not None, f"received only {found!r}"
        if got[0] == path:
            found += got[1]
    return found


def following(bed: Bed) -> str:
    return bed.sh(bed.nodes[0], "pgrep -fa 'tail -[c]' || true")


def test_appended_data_is_pushed_from_the_offset_and_no_process_is_left(bed: Bed, files: Files) -> None:
    log, lines = f"{ROOT}/log", f"{ROOT}/sub/lines"
    write(files, log, b"0123456789")
    with contextlib.closing(files.tail(log, 4, {lines: 0}, below=ROOT)) as follower:
        assert until(follower, log, 6) == b"456789"
        assert follower.next(0.3) is None
        bed.sh(bed.nodes[0], f"printf 'abc\\0\\377' >>{log}", user="trainer")
        assert until(follower, log, 5) == b"abc\0\xff"
        files.make_dir(f"{ROOT}/sub")  # did not exist when following began
        write(files, lines, b"1\n\n{a b}\nhalf")
        assert until(follower, lines, 8) == b"1\n\n{a b}\n"
        assert following(bed)
    deadline = time.monotonic() + 60
    while following(bed) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert following(bed) == ""


def test_a_lost_connection_is_reported_for_a_quiet_file_and_no_process_is_left(bed: Bed, files: Files) -> None:
    write(files, f"{ROOT}/log", b"abc")
    with contextlib.closing(files.tail(f"{ROOT}/log", 0, {}, below=ROOT)) as follower:
        assert until(follower, f"{ROOT}/log", 3) == b"abc"
        faults.kill_ssh_sessions(bed, bed.nodes[0])
        with pytest.raises(NodeUnreachable):
            follower.next(60)
    with contextlib.closing(files.tail(f"{ROOT}/log", 3, {}, below=ROOT)) as follower:  # on a new connection
        bed.sh(bed.nodes[0], f"printf def >>{ROOT}/log", user="trainer")
        assert until(follower, f"{ROOT}/log", 3) == b"def"
    deadline = time.monotonic() + 60
    while following(bed) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert following(bed) == ""
