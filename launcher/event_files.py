"""TensorBoard's event files, read without TensorBoard, which a user may not have: records, and the points of curves.

A file is a sequence of records: a length (8 bytes), its checksum (4), the event, its checksum (4). An event is a
protocol buffer (tensorboard/compat/proto: event.proto, summary.proto, tensor.proto). Programs write them, so anything
that is no point of a curve is left out, and so is a record that is not whole yet.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import BinaryIO

_LARGEST = 1 << 24  # bytes of an event that is searched for points; a larger one has pictures or sounds
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
# Formats of a tensor's content by its type; the fields that have its values instead, and whether these are varints
_CONTENT = {1: "<f", 2: "<d", 3: "<i", 4: "<B", 5: "<h", 6: "<b", 9: "<q", 19: "<e"}
_FLOATS = {5: "<f", 6: "<d"}
_INTEGERS = (7, 10)
_HALVES = 13


@dataclass(frozen=True)
class Point:
    """A point of a curve. time: seconds since the epoch, by the program's clock."""

    tag: str
    step: int
    time: float
    value: float


def records(stream: BinaryIO, most: int) -> Iterator[tuple[range, bytes]]:
    """Yield the byte range of each record, with framing, and the first `most` bytes of its event."""
    size, start = stream.seek(0, 2), stream.seek(0)
    while len(header := stream.read(12)) == 12:
        stop = start + 16 + int.from_bytes(header[:8], "little")
        if stop > size:  # torn
            return
        yield range(start, stop), stream.read(min(most, stop - start - 16))
        start = stream.seek(stop)


def points(stream: BinaryIO) -> Iterator[Point]:
    """Yield the points of the file's curves: scalars, also as tensors of one element."""
    for span, event in records(stream, _LARGEST):
        if len(span) - 16 <= _LARGEST:
            try:
                yield from _points(event)
            except (ValueError, struct.error):  # not an event
                continue


def _points(event: bytes) -> list[Point]:
    step, time, found = 0, 0.0, list[tuple[str, float]]()
    for number, value in _fields(event):
        if number == 1 and isinstance(value, bytes):
            (time,) = struct.unpack("<d", value)
        elif number == 2 and isinstance(value, int):
            step = value - (1 << 64) if value >> 63 else value
        elif number == 5 and isinstance(value, bytes):
            found += [point for key, one in _fields(value) if key == 1 and (point := _scalar(_bytes(one)))]
    return [Point(tag, step, time, value) for tag, value in found]


def _scalar(summary: bytes) -> tuple[str, float] | None:
    """Return tag and value of a Summary.Value; None for a histogram, a text and so on."""
    tag, value, plugin = "", None, b"scalars"
    for number, field in _fields(summary):
        if number == 1:
            tag = _bytes(field).decode()
        elif number == 2:
            (value,) = struct.unpack("<f", _bytes(field))
        elif number == 8:
            value = _element(_bytes(field))
        elif number == 9:
            data = next((_bytes(one) for key, one in _fields(_bytes(field)) if key == 1), b"")
            plugin = next((_bytes(one) for key, one in _fields(data) if key == 1), plugin)
    return (tag, value) if value is not None and plugin == b"scalars" else None


def _element(tensor: bytes) -> float | None:
    """Return the only element of a TensorProto; None for text, and for more or fewer elements."""
    kind, sizes, values = 0, list[int](), list[float]()
    for number, field in _fields(tensor):
        if number == 1 and isinstance(field, int):
            kind = field
        elif number == 2:
            dims = [_bytes(one) for key, one in _fields(_bytes(field)) if key == 2]
            sizes = [next((one for key, one in _fields(dim) if key == 1 and isinstance(one, int)), 0) for dim in dims]
        elif number == 4 and kind in _CONTENT and len(_bytes(field)) == struct.calcsize(_CONTENT[kind]):
            values += struct.unpack(_CONTENT[kind], _bytes(field))
        elif number in _FLOATS:
            values += [one for (one,) in struct.iter_unpack(_FLOATS[number], _bytes(field))]
        elif number in _INTEGERS:
            values += [float(one - (1 << 64) if one >> 63 else one) for one in _varints(field)]
        elif number == _HALVES and kind == 19:
            values += [struct.unpack("<e", struct.pack("<H", one & 0xFFFF))[0] for one in _varints(field)]
    return float(values[0]) if len(values) == 1 == prod(sizes) else None


def _varints(field: int | bytes) -> list[int]:
    """Return the values of a repeated field, which may be packed."""
    if isinstance(field, int):
        return [field]
    found, at = list[int](), 0
    while at < len(field):
        value, at = _varint(field, at)
        found.append(value)
    return found


def _bytes(field: int | bytes) -> bytes:
    if isinstance(field, int):
        raise ValueError("not a field of this type")  # noqa: TRY004 - of a file
    return field


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte, at = data[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & ((1 << 64) - 1), at
    raise ValueError("not a number")


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field: a varint as int, else its bytes. Raises ValueError."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
        if kind == _BYTES:
            size, at = _varint(message, at)
        if size is None or at + size > len(message):
            raise ValueError("not a field")
        yield key >> 3, message[at : at + size]
        at += size
