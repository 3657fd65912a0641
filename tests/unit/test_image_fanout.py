"""One stream to several readers: no byte is lost, and the writer never waits for a reader that has given up."""

import threading
import time

import pytest

from launcher.image import tar_stream
from launcher.image.fanout import Channel


def start(target):
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_every_byte_of_every_archive_arrives_in_order_with_a_small_buffer():
    channel, got = Channel(room=10), []
    reader = start(lambda: got.extend(list(archive) for archive in channel.archives()))
    sent = [bytes([n % 256]) * 7 for n in range(500)]
    for _ in range(2):
        for piece in sent:
            assert channel.put(piece)
        channel.end_archive()
    channel.close()
    reader.join(5)
    assert got == [[*sent, tar_stream.end()]] * 2


def test_the_unread_rest_of_an_archive_is_skipped():
    channel = Channel()
    for letter in (b"a", b"b"):
        channel.put(letter)
        channel.put(letter * 2)
        channel.end_archive()
    channel.close()
    assert [next(archive) for archive in channel.archives()] == [b"a", b"b"]


def test_the_writer_waits_for_a_slow_reader_only_while_it_is_alive():
    channel = Channel(room=10)
    assert channel.put(b"x" * 10)
    results = []
    writer = start(lambda: results.append(channel.put(b"y")))
    time.sleep(0.05)
    assert results == []
    channel.give_up()
    writer.join(5)
    assert results == [False]


def test_a_failed_source_is_an_error_at_the_reader_not_an_end_of_file():
    channel = Channel()
    channel.put(b"x")
    channel.close(OSError("broke off"))
    archive = next(channel.archives())
    assert next(archive) == b"x"
    with pytest.raises(OSError, match="broke off"):
        next(archive)
