"""One stream to several readers: no byte lost, nobody waits for one who has given up."""

import threading
import time

import pytest

from launcher.image.tee import Pipe


def start(target):
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_every_byte_arrives_in_order_through_little_room():
    pipe, got = Pipe(room=10), []
    reader = start(lambda: got.extend(pipe))
    sent = [bytes([n % 256]) * 7 for n in range(500)]
    for piece in sent:
        assert pipe.put(piece)
    pipe.close()
    reader.join(5)
    assert got == sent


def test_the_writer_waits_for_a_slow_reader_and_not_longer_than_it_lives():
    pipe = Pipe(room=10)
    assert pipe.put(b"x" * 10)
    results = []
    writer = start(lambda: results.append(pipe.put(b"y")))
    time.sleep(0.05)
    assert results == []
    pipe.give_up()
    writer.join(5)
    assert results == [False]


def test_a_failed_source_is_an_error_at_the_reader_not_an_end():
    pipe = Pipe()
    pipe.put(b"x")
    pipe.close(OSError("broke off"))
    read = iter(pipe)
    assert next(read) == b"x"
    with pytest.raises(OSError, match="broke off"):
        next(read)
