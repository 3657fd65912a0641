"""Lists of files of a data set: a written list can be read again; paths and links outside the folder are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.features.data.container_scripts import data_tree as tree
from launcher.features.data.container_scripts.data_tree import DataEntry, RefusedError

NAMES = st.binary(min_size=1, max_size=12).filter(
    lambda name: not {b"/"[0], 0} & set(name) and name not in (b".", b"..")
)


@given(st.lists(NAMES, unique=True, max_size=8), st.data())
def test_a_list_of_any_names_is_read_as_it_was_written(names: list[bytes], data: st.DataObject) -> None:
    entries = sorted(
        DataEntry(
            name, tree.FILE, 0o600, data.draw(st.integers(0, 3 * tree.PIECE)), b"", data.draw(st.integers(0, 1 << 62))
        )
        for name in names
    )
    tree.check(entries)
    digests = data.draw(st.randoms(use_true_random=False)).randbytes(sum(e.pieces for e in entries) * tree.DIGEST)
    assert tree.unpack(tree.pack(entries, digests)) == (entries, digests)
    touched = [entry._replace(mtime=0, inode=7) for entry in entries]
    assert tree.content(touched, digests) == tree.content(entries, digests), "times are not part of the content"
    pieces = list(tree.Pieces(entries))
    assert [number for number, *_ in pieces] == list(range(tree.Pieces(entries).count))
    assert sum(size for *_, size in pieces) == sum(entry.size for entry in entries)


HOSTILE = [
    [DataEntry(b"../out", "f", 0o600, 1)],
    [DataEntry(b"/etc/passwd", "f", 0o600, 1)],
    [DataEntry(b"a", "d", 0o700), DataEntry(b"a/../../out", "f", 0o600, 1)],
    [DataEntry(b"a//b", "f", 0o600, 1)],
    [DataEntry(b".", "d", 0o700)],
    [DataEntry(b"", "f", 0o600, 1)],
    [DataEntry(b"a\0b", "f", 0o600, 1)],
    [DataEntry(b"a/b", "f", 0o600, 1)],
    [DataEntry(b"a", "f", 0o600, 1), DataEntry(b"a/b", "f", 0o600, 1)],
    [DataEntry(b"a", "l", 0o777, 0, b"b"), DataEntry(b"a/b", "f", 0o600, 1)],
    [DataEntry(b"a", "l", 0o777, 0, b"/etc")],
    [DataEntry(b"a", "l", 0o777, 0, b"../etc")],
    [DataEntry(b"a", "l", 0o777, 0, b"")],
    [DataEntry(b"a", "b", 0o600, 1)],
    [DataEntry(b"a", "f", 0o600, 1 << 60)],
    [DataEntry(b"b", "f", 0o600, 1), DataEntry(b"a", "f", 0o600, 1)],
    [DataEntry(b"a", "f", 0o600, 1), DataEntry(b"a", "f", 0o600, 1)],
]


@pytest.mark.parametrize("entries", HOSTILE)
def test_a_list_with_paths_outside_is_refused(entries: list[DataEntry]) -> None:
    with pytest.raises(RefusedError):
        tree.check(entries)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
)


@given(JSON)
def test_any_message_is_read_or_refused(found: Any) -> None:
    try:
        tree.check(tree.entries_of(found))
    except RefusedError:
        return


@given(st.binary(max_size=200))
def test_any_manifest_is_read_or_refused(data: bytes) -> None:
    for text in (data, b"launcher data 1\n" + data):
        with pytest.raises(RefusedError):
            tree.unpack(text)


def test_files_that_cannot_be_copied_are_refused_with_their_name(tmp_path: Path) -> None:
    (tmp_path / "inside").symlink_to("file")
    assert [entry.kind for entry in tree.walk(os.fsencode(tmp_path))] == ["l"]
    (tmp_path / "out").symlink_to("../elsewhere")
    with pytest.raises(RefusedError, match=r"out is a link to \.\./elsewhere, outside the data"):
        tree.walk(os.fsencode(tmp_path))
    (tmp_path / "out").unlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RefusedError, match="pipe is not a file"):
        tree.walk(os.fsencode(tmp_path))
