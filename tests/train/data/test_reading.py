"""Several items are read with one call as they are one by one, and a read that does not return is known."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from train.data.folder import FileSource, TarSource
from train.data.reading import Progress, Read, longest, read_many
from train.data.roi import ROOM, BuildError, load
from train.data.source import Place


@pytest.fixture(scope="module")
def at_once() -> Read:
    try:
        return load().read
    except BuildError as error:
        pytest.skip(str(error))


def folder(path: Path, contents: Sequence[bytes]) -> FileSource:
    for index, content in enumerate(contents):
        (path / f"{index}.jpg").write_bytes(content)
    return FileSource(path, [f"{index}.jpg" for index in range(len(contents))], np.zeros(len(contents), np.int64))


def test_files_and_parts_of_an_archive_are_read_with_one_call(at_once: Read, tmp_path: Path) -> None:
    contents = [b"first", b"", os.urandom(100_000), b"last"]
    found = [bytes(item) for item in read_many(folder(tmp_path, contents), range(4), at_once)]  # type: ignore[arg-type]
    assert found == contents
    (tmp_path / "archive").write_bytes(b"".join(contents))
    with (tmp_path / "archive").open("rb") as archive:
        extents = [(archive.fileno(), 0, 5), (archive.fileno(), 100_005, 4), (archive.fileno(), 100_005, 400)]
        source = TarSource(tmp_path, ["a", "b", "c"], extents, np.zeros(3, np.int64))
        found = [bytes(item) for item in read_many(source, range(3), at_once)]  # type: ignore[arg-type]
    assert found == [b"first", b"last", b"last"]  # the archive ends there


def test_an_error_is_that_of_reading_one(at_once: Read, tmp_path: Path) -> None:
    source = folder(tmp_path, [b"0", b"1", b"2", b"3"])
    (tmp_path / "1.jpg").unlink()
    (tmp_path / "2.jpg").unlink()
    os.mkfifo(tmp_path / "2.jpg")
    (tmp_path / "3.jpg").unlink()
    (tmp_path / "3.jpg").mkdir()
    together, alone = (list(read_many(source, range(4), how)) for how in (at_once, None))
    assert bytes(together[0]) == alone[0] == b"0"  # type: ignore[arg-type]
    for ours, theirs in zip(together[1:], alone[1:], strict=True):
        assert isinstance(ours, OSError)
        assert isinstance(theirs, OSError)
        assert (ours.errno, ours.strerror, ours.filename) == (theirs.errno, theirs.strerror, theirs.filename)
    assert [str(error.strerror) for error in together[2:]] == ["not a regular file"] * 2  # type: ignore[union-attr]


def test_what_does_not_fit_is_read_alone(at_once: Read, tmp_path: Path) -> None:
    contents = [bytes([index]) * (ROOM // 2 - 1) for index in range(3)] + [b"last", bytes(ROOM + 1)]
    source = folder(tmp_path, contents)
    seen = list(at_once([source.place(index) for index in range(5)], Progress()))
    assert [item is None for item in seen] == [False, False, True, True, True]
    assert [bytes(item) for item in read_many(source, range(5), at_once)] == contents  # type: ignore[arg-type]


def test_the_file_is_named_that_is_not_read(tmp_path: Path) -> None:
    reached, back = threading.Event(), threading.Event()

    def stuck(places: Sequence[Place], progress: Progress) -> list[None]:
        progress.at, progress.since = 2, time.monotonic() - 50
        reached.set()
        back.wait()
        return [None] * len(places)

    source, found = folder(tmp_path, [b"0", b"1", b"2", b"3"]), list[object]()
    thread = threading.Thread(target=lambda: found.extend(read_many(source, range(4), stuck)))
    thread.start()
    reached.wait()
    name, seconds = longest() or ("", 0.0)
    back.set()
    thread.join()
    assert name == f"{tmp_path}/2.jpg"
    assert 50 <= seconds < 80
    assert found == [b"0", b"1", b"2", b"3"]
    assert longest() is None


def test_the_time_of_a_read_is_that_of_the_clock(at_once: Read, tmp_path: Path) -> None:
    progress, before = Progress(), time.monotonic()
    at_once([folder(tmp_path, [b"0"] * 3).place(2)] * 3, progress)
    assert before <= progress.since <= time.monotonic()
    assert progress.at == 2
