"""Lines from pieces, masks, clocks, and following by offset."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.logs.lines import LONGEST, Lines
from launcher.logs.position import Clock, last_lines, read_from
from launcher.node.files import Files
from launcher.node.machine import LocalMachine
from launcher.records.masking import Masker

FILES = Files(LocalMachine("here", "me"))


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))),
    st.lists(st.integers(0, 500)),
)
def test_lines_are_the_same_however_the_stream_is_split(lines: list[str], cuts: list[int]) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    splitter = Lines()
    found = [line for piece in in_pieces(data, cuts) for line in splitter.feed(piece)]
    assert found + splitter.end() == lines


@given(st.binary(), st.lists(st.integers(0, 500)))
def test_any_bytes_are_decoded(data: bytes, cuts: list[int]) -> None:
    splitter = Lines()
    for piece in in_pieces(data, cuts):
        splitter.feed(piece)
    splitter.end()


def test_a_progress_bar_leaves_its_last_state() -> None:
    splitter = Lines()
    assert splitter.feed(b"10%\r20%\r30%\rdone\r\nnext\n") == ["done", "next"]
    assert splitter.feed(b"half") == []
    assert splitter.end() == ["half"]


def test_the_state_of_a_progress_bar_is_known_before_its_line_ends() -> None:
    splitter = Lines()
    states = [splitter.feed(piece) or splitter.state for piece in (b"\r 0%", b"\r 1", b"0%", b"\r20%\r", b"30%")]
    assert states == [" 0%", " 1", " 10%", "20%", "30%"]
    assert splitter.feed(b" done\nnext") == ["30% done"]
    assert splitter.state == ""
    assert splitter.end() == ["next"]


def test_a_line_without_an_end_is_cut() -> None:
    splitter, piece = Lines(), b"x" * (LONGEST // 4)
    assert [len(line) for _ in range(9) for line in splitter.feed(piece)] == [LONGEST, LONGEST]


def test_a_progress_bar_without_an_end_is_not_kept() -> None:
    splitter = Lines()
    for _ in range(100):
        assert splitter.feed(b"\r" + b"x" * 100_000) == []
    assert len(splitter.state) == 100_000


def test_a_megabyte_line_in_small_pieces_stays_one_line() -> None:
    splitter = Lines()
    for _ in range(1024):
        assert splitter.feed(b"x" * 1024) == []
    assert [len(line) for line in splitter.feed(b"\n")] == [1 << 20]


def test_secrets_are_masked_longest_first_and_short_ones_not_at_all() -> None:
    mask = Masker(["hunter2", "hunter2-and-more", "abc", "line one\nline two"])
    assert mask("a hunter2-and-more b hunter2 c abc") == "a *** b *** c abc"
    assert mask("said line two") == "said ***"
    assert mask.in_place(b"a hunter2 c") == b"a ******* c"
    assert mask.deep({"hunter2": ["hunter2", {"x": 7}, None]}) == {"hunter2": ["***", {"x": 7}, None]}
    assert Masker(['say "x"']).in_place(b'{"message": "say \\"x\\""}') == b'{"message": "*********"}'


def test_a_secret_masked_in_a_file_has_no_length_when_it_is_shown() -> None:
    mask = Masker(["hunter2", "pässword", 'say "x"'])
    for said in ("hunter2", "pässword", 'say \\"x\\"'):
        copied = mask.in_place(f"token={said}, done".encode()).decode()
        assert len(copied) == len(f"token={said}, done".encode())
        assert mask(copied) == "token=***, done"
        assert mask.deep({"words": copied}) == {"words": "token=***, done"}
    assert mask("*" * 80) == "*" * 80
    assert Masker()("*******") == "*******"


def test_a_clock_maps_offsets_to_times_and_times_to_offsets() -> None:
    clock = Clock.parse(b"100 10\n101 10\nx\n102 50\ntorn 5\n103")
    assert clock.time_of(0) == 100
    assert clock.time_of(10) == 102
    assert clock.time_of(50) is None
    assert clock.offset_at(99) == 0
    assert clock.offset_at(102) == 10
    assert clock.offset_at(1000) == 50


@given(st.binary(max_size=300))
def test_a_malformed_clock_is_read_without_a_crash_and_stays_sorted(text: bytes) -> None:
    clock = Clock.parse(text)
    assert list(clock.sizes) == sorted(clock.sizes)


WORDS = st.binary(max_size=9).map(lambda b: b.translate(None, b"\r\n") or b"x")


@pytest.mark.parametrize("ending", [b"", b"\n"])
@given(st.lists(WORDS, max_size=30), st.integers(0, 40))
@settings(max_examples=25, deadline=None)
def test_the_last_lines_begin_at_the_right_offset(ending: bytes, lines: list[bytes], count: int) -> None:
    data = b"\n".join(lines) + (ending if lines else b"")
    with tempfile.TemporaryDirectory() as folder:  # of its own: the size of a file is read from a list of its folder
        log = Path(folder, "log")
        log.write_bytes(data)
        offset = last_lines(FILES, str(log), count, below=folder)
    assert data[offset:].splitlines() == (data.splitlines()[-count:] if count else [])


def test_a_file_is_read_to_its_end_and_a_missing_file_is_empty(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"abcdef")
    assert b"".join(read_from(FILES, str(tmp_path / "log"), 2, below=str(tmp_path))) == b"cdef"
    assert list(read_from(FILES, str(tmp_path / "none"), below=str(tmp_path))) == []


def test_a_file_is_read_as_far_as_is_asked(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"abcdef")
    assert b"".join(read_from(FILES, str(tmp_path / "log"), 2, stop=4, below=str(tmp_path))) == b"cd"
    assert list(read_from(FILES, str(tmp_path / "log"), 4, stop=2, below=str(tmp_path))) == []
    assert last_lines(FILES, str(tmp_path / "none"), 3, below=str(tmp_path)) == 0


def test_a_file_that_grows_while_it_is_read_has_an_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first")
    pieces = read_from(FILES, str(log), below=str(tmp_path))
    assert next(pieces) == b"first"
    with log.open("ab") as file:
        file.write(b"later")
    assert list(pieces) == []
