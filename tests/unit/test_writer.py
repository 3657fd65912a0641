"""Local copies of files on nodes: each byte once and without secrets, for any number of writers and any pieces."""

from __future__ import annotations

import itertools
import os
import resource
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.records.masking import Masker
from launcher.records.writer import ABANDONED, append, replace

SECRET = Masker(["hunter2"])
TEXTS = st.lists(st.sampled_from([b"hunter2", b"hun", b"ter2", b"h", b"2", b"*", b"\n", b"xyz"])).map(b"".join)


def masked(data: bytes) -> bytes:
    return data.replace(b"hunter2", b"*" * 7)


def test_only_bytes_beyond_the_end_are_appended(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "a"
    assert not append(file, 3, b"later"), "the bytes before it are not here"
    assert file.read_bytes() == b""
    assert append(file, 0, b"abcdef")
    assert append(file, 4, b"efgh"), "a part of it is here already"
    assert append(file, 0, b"ab")
    assert not append(file, 9, b"jk")
    assert file.read_bytes() == b"abcdefgh"


@given(TEXTS, st.lists(st.tuples(st.sampled_from(["one", "two", "collector"]), st.integers(0, 12))), st.integers(0, 40))
@settings(deadline=None)
def test_two_writers_and_a_collector_in_any_order_make_the_file_of_the_node(
    source: bytes, steps: list[tuple[str, int]], begin: int
) -> None:
    """The second writer starts at `begin`, as with `--tail`; the collector starts at the end of the local file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "logs", "a")
        reached = {"one": 0, "two": min(begin, len(source))}
        for who, size in [*steps, ("collector", len(source))]:
            here = file.stat().st_size if file.exists() else 0
            offset = here if who == "collector" else reached[who]
            piece = source[offset : offset + size]
            assert append(file, offset, piece, SECRET) == (offset <= here)
            if who != "collector":
                reached[who] += len(piece)
        assert file.read_bytes() == masked(source)


@given(TEXTS, st.lists(st.integers(0, 60)), st.lists(st.integers(0, 60)), st.lists(st.booleans()))
@settings(deadline=None)
def test_data_read_by_a_writer_that_knows_the_secret_is_masked(
    source: bytes, cuts: list[int], other_cuts: list[int], turns: list[bool]
) -> None:
    """Another writer, which does not know it, may write before or after it at any position."""

    def pieces(positions: list[int]) -> list[tuple[int, bytes]]:
        ends = sorted({min(position, len(source)) for position in positions} | {0, len(source)})
        return [(start, source[start:end]) for start, end in itertools.pairwise(ends)]

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "a")
        file.touch()
        knows, other = pieces(cuts), pieces(other_cuts)
        for mine in [*turns, *[True] * len(knows), *[False] * len(other)]:
            if left := knows if mine else other:
                append(file, *left.pop(0), SECRET if mine else Masker())
        assert file.read_bytes() == masked(source)


def test_concurrent_writers_keep_each_byte_once(tmp_path: Path) -> None:
    source, file = os.urandom(200_000).replace(b"h", b"x") + b"hunter2" * 1000, tmp_path / "a"

    def follow(size: int) -> None:
        for offset in range(0, len(source), size):
            append(file, offset, source[offset : offset + size], SECRET)

    threads = [threading.Thread(target=follow, args=(size,)) for size in (997, 1009, 4096)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_bytes() == masked(source)


def test_a_write_that_fails_leaves_the_file_as_long_as_it_was(tmp_path: Path) -> None:
    """Half of the data fits; the secret in it is not split."""
    file, (soft, hard) = tmp_path / "a", resource.getrlimit(resource.RLIMIT_FSIZE)
    assert append(file, 0, b"x" * 4096, SECRET)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            append(file, 4096, b"y" * 4092 + b"hunter2", SECRET)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == b"x" * 4096
    assert append(file, 4096, b"y" * 4092 + b"hunter2", SECRET)
    assert file.read_bytes() == b"x" * 4096 + b"y" * 4092 + b"*" * 7


def test_a_file_is_replaced_or_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "errors" / "a.json"
    assert replace(file, [b"it is hun", b"ter2"], 1e9, SECRET) == 13
    assert (file.read_bytes(), file.stat().st_mtime) == (b"it is *******", 1e9)

    def cut() -> object:
        yield b"other"
        raise ConnectionError

    with pytest.raises(ConnectionError):
        replace(file, cut(), 2e9)  # type: ignore[arg-type]
    assert file.read_bytes() == b"it is *******"
    assert [path.name for path in file.parent.iterdir()] == ["a.json"]


def test_abandoned_temporary_files_are_removed(tmp_path: Path) -> None:
    left, written = tmp_path / "last.pt.0011aabb.part", tmp_path / "last.pt.2233ccdd.part"
    for path in (left, written):
        path.write_bytes(b"x")
    os.utime(left, (1e9, 1e9))
    assert ABANDONED > 60
    replace(tmp_path / "last.pt", [b"new"], 1e9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pt", written.name]
