"""A text in a run's TensorBoard, written without TensorBoard's own package, which the launcher does not need.

The format is that of launcher.elastic.generations; the checksum of a record is a masked CRC-32C (tensorflow/tsl,
lib/io/record_writer.h), and an event a protocol buffer (tensorboard/compat/proto/event.proto, summary.proto).
"""

from __future__ import annotations

import struct
import time
from functools import cache
from pathlib import Path

from launcher.local_files import write_atomic
from launcher.records.wanted import EVENTS

FOLDER = "launcher"  # its own: TensorBoard reads the last file of a folder, which must stay the trainer's
_STRINGS = 7  # DT_STRING of tensorboard/compat/proto/types.proto


def say(board: Path, tag: str, text: str) -> None:
    """Write the text, in place of an earlier one, if a program has written curves. board: the run's folder of these.

    Raises OSError.
    """
    if any(file.parent.name != FOLDER for file in board.rglob(EVENTS)):
        target = board / FOLDER
        target.mkdir(exist_ok=True)
        events = _record(_event(3, b"brain.Event:2")) + _record(_event(5, _summary(tag.encode(), text.encode())))
        write_atomic(target / "events.out.tfevents.0.launcher", events)


def _event(number: int, content: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", time.time()) + _field(number, content)  # 1: wall time


def _summary(tag: bytes, text: bytes) -> bytes:
    shape = _field(2, _field(2, b"\x08\x01"))  # one dimension of size 1
    tensor = b"\x08" + bytes([_STRINGS]) + shape + _field(8, text)
    return _field(1, _field(1, tag) + _field(8, tensor) + _field(9, _field(1, _field(1, b"text"))))


def _field(number: int, content: bytes) -> bytes:
    """Encode a field that is a string or a message."""
    length, size = b"", len(content)
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def _record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return length + _checksum(length) + event + _checksum(event)


def _checksum(content: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _table()[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # noqa: PLW2901
        table.append(value)
    return table
