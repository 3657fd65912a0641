"""TensorBoard's files, as the launcher and as TensorBoard's own reader read them."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # type: ignore[import-untyped]
from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
from tensorboard.util.tensor_util import make_ndarray, make_tensor_proto  # type: ignore[import-untyped]

from launcher.event_files import Point, points

TAGS = st.text(min_size=1, max_size=30)
KINDS = st.sampled_from([np.float16, np.float32, np.float64, np.int8, np.uint8, np.int16, np.int32, np.int64])


def metadata(plugin: str) -> object:
    return summary_pb2.SummaryMetadata(plugin_data={"plugin_name": plugin})


@st.composite
def values(draw: st.DrawFn) -> object:
    """Return a value of a summary: a scalar, as TensorFlow 1, 2 or PyTorch write it, or something else."""
    tag = draw(TAGS)
    match draw(st.integers(0, 4)):
        case 0:
            return summary_pb2.Summary.Value(tag=tag, simple_value=draw(st.floats(width=32)))
        case 1:
            number = np.array(draw(st.integers(0, 100)), dtype=draw(KINDS))
            packed = make_tensor_proto(number) if draw(st.booleans()) else _content(number)
            return summary_pb2.Summary.Value(tag=tag, tensor=packed, metadata=metadata("scalars"))
        case 2:
            many = make_tensor_proto(np.zeros(draw(st.integers(2, 4)), dtype=np.float32))
            return summary_pb2.Summary.Value(tag=tag, tensor=many, metadata=metadata("pr_curves"))
        case 3:
            text = make_tensor_proto(np.array([draw(TAGS).encode()], dtype=object))
            return summary_pb2.Summary.Value(tag=tag, tensor=text, metadata=metadata("text"))
        case _:
            return summary_pb2.Summary.Value(
                tag=tag, histo=summary_pb2.HistogramProto(min=draw(st.floats()), bucket=[1])
            )


def _content(number: np.ndarray) -> object:
    kind = make_tensor_proto(number).dtype
    return tensor_pb2.TensorProto(dtype=kind, tensor_shape={}, tensor_content=number.tobytes())


@st.composite
def files(draw: st.DrawFn) -> bytes:
    out = io.BytesIO()
    writer = RecordWriter(out)
    writer.write(event_pb2.Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())
    for _ in range(draw(st.integers(0, 6))):
        step = draw(st.integers(-(2**63), 2**63 - 1))
        summary = summary_pb2.Summary(value=draw(st.lists(values(), max_size=3)))
        event = event_pb2.Event(wall_time=draw(st.floats(0, 1e10)), step=step, summary=summary)
        writer.write(event.SerializeToString())
    whole = out.getvalue()
    return whole[: draw(st.integers(0, len(whole)))] if draw(st.booleans()) else whole


def of_tensorboard(file: Path) -> list[Point]:
    found = []
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                element = float(make_ndarray(value.tensor).item())
                found.append(Point(value.tag, event.step, event.wall_time, element))
    return found


@given(files())
def test_points_are_those_of_tensorboards_own_reader(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "events.out.tfevents.1"
        file.write_bytes(content)
        assert repr([*points(io.BytesIO(content))]) == repr(of_tensorboard(file))  # nan is nan


@given(files(), st.data())
def test_a_file_that_is_damaged_has_points_or_none(content: bytes, data: st.DataObject) -> None:
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 5)) if content else 0):
        damaged[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    assert all(isinstance(point, Point) for point in points(io.BytesIO(bytes(damaged))))


@pytest.mark.parametrize("size", [0, 5, 11, 12, 20])
def test_a_record_that_is_not_whole_is_left_out(size: int) -> None:
    assert [*points(io.BytesIO(b"\x20" + bytes(size)))] == []
