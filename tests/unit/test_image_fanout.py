"""One stream of archives to several readers: no byte lost, the writer never waits for a reader that has given up."""

import io
import tarfile
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import ImageShipFailed
from launcher.image.fanout import ARCHIVE_END, Channel, hand_out


def tar(members, form=tarfile.PAX_FORMAT, **fields):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as out:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in fields.items():
                setattr(info, key, value)
            out.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def cut(data, sizes):
    """The same bytes in pieces of these sizes, again and again."""
    place, turn = 0, 0
    while place < len(data):
        size = sizes[turn % len(sizes)]
        yield data[place : place + size]
        place, turn = place + size, turn + 1


def passed_on(data, leave_out=frozenset(), pieces=(1 << 16,)):
    """What comes out of a channel, by archive."""
    channel = Channel(leave_out, room=0)
    hand_out(cut(data, pieces), [channel])
    channel.close()
    return [b"".join(archive) for archive in channel.archives()]


def contents(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as found:
        return {member.name: found.extractfile(member).read() for member in found if member.isreg()}


def start(target):
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


@settings(max_examples=60, deadline=None)
@given(
    members=st.dictionaries(
        st.text("abcXYZ/é.-", min_size=1, max_size=180).filter(
            lambda n: n.strip("/.") and "//" not in n and n[0] not in "/."
        ),
        st.binary(max_size=3000),
        min_size=1,
        max_size=6,
    ),
    pieces=st.lists(st.integers(1, 1500), min_size=1, max_size=4),
    form=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_every_member_passes_unchanged_however_the_stream_is_cut(members, pieces, form):
    assert [contents(archive) for archive in passed_on(tar(members, form), pieces=pieces)] == [contents(tar(members))]


def test_long_names_and_fractional_times_as_go_writes_them():
    name = "blobs/sha256/" + "a" * 150
    assert passed_on(tar({name: b"content", "b": b""}, mtime=1.5), frozenset([name])) == [
        tar({"b": b""}, mtime=1.5)[: 3 * 512] + ARCHIVE_END
    ]


def test_a_link_stays_a_link():
    """As engines before 25 write a layer that comes again."""
    data = tar({"x/layer.tar": b""}, type=tarfile.SYMTYPE, linkname="../y/layer.tar")
    with tarfile.open(fileobj=io.BytesIO(passed_on(data)[0])) as found:
        assert [(m.name, m.issym(), m.linkname) for m in found] == [("x/layer.tar", True, "../y/layer.tar")]


def test_a_channel_gets_only_the_members_that_it_needs():
    data = tar({"a": b"x" * 5000, "b": b"y"})
    channels = [Channel(frozenset(names), room=0) for names in ([], ["a"])]
    hand_out([data], channels)
    for channel in channels:
        channel.close()
    assert [[set(contents(b"".join(a))) for a in channel.archives()] for channel in channels] == [[{"a", "b"}], [{"b"}]]


def test_archives_that_follow_each_other_are_told_apart():
    both = tar({"a": b"1", "b": b"2"}) + tar({"a": b"3"})
    assert [contents(archive) for archive in passed_on(both, pieces=[700])] == [{"a": b"1", "b": b"2"}, {"a": b"3"}]


@pytest.mark.parametrize("kept", [2047, 1536, 1200, 700, 513, 100, 0])
def test_a_stream_that_breaks_off_is_an_error(kept):
    with pytest.raises(tarfile.ReadError):
        passed_on(tar({"a": b"x" * 1000})[:kept])
    if kept:
        with pytest.raises(tarfile.ReadError):
            passed_on(tar({"b": b""}) + tar({"a": b"x" * 1000})[:kept])


def test_every_byte_of_every_archive_arrives_in_order_through_little_room():
    channel, got = Channel(room=2), []
    reader = start(lambda: got.extend(list(archive) for archive in channel.archives()))
    sent = [bytes([n % 256]) * 7 for n in range(500)]
    for _ in range(2):
        for piece in sent:
            channel.put(piece)
        channel.end_archive()
    channel.close()
    reader.join(5)
    assert got == [[*sent, ARCHIVE_END]] * 2


def test_the_unread_rest_of_an_archive_is_skipped():
    channel = Channel()
    for letter in (b"a", b"b"):
        channel.put(letter)
        channel.put(letter * 2)
        channel.end_archive()
    channel.close()
    assert [next(archive) for archive in channel.archives()] == [b"a", b"b"]


def test_the_writer_waits_for_a_slow_reader_and_not_longer_than_it_lives():
    channel = Channel(room=1)
    channel.put(b"x")
    writer = start(lambda: [channel.put(b"y") for _ in range(5)])
    time.sleep(0.05)
    assert writer.is_alive()
    channel.give_up()
    writer.join(5)
    assert not writer.is_alive()


def test_reading_ends_when_all_readers_have_given_up():
    channel, taken = Channel(), []
    channel.give_up()
    hand_out((taken.append(n) or piece for n, piece in enumerate(cut(tar({"a": bytes(50_000)}), [1000]))), [channel])
    assert len(taken) < 50


def test_a_failed_source_is_an_error_at_the_reader_not_an_end_of_file():
    channel = Channel()
    channel.put(b"x")
    channel.close(ImageShipFailed("a", "broke off"))
    archive = next(channel.archives())
    assert next(archive) == b"x"
    with pytest.raises(ImageShipFailed, match="broke off"):
        next(archive)
