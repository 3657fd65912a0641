"""The launcher's text in a run's TensorBoard, as TensorBoard reads it."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launcher.records import board


def test_tensorboard_shows_the_newest_text(tmp_path: Path) -> None:
    board.say(tmp_path, "Network/gradients", "no program has written curves")
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "events.out.tfevents.1.node").touch()
    board.say(tmp_path, "Network/gradients", "an earlier one")
    text = "gradients: RoCE on " + ", ".join(f"mlx5_{number}" for number in range(40))  # lengths of several bytes
    board.say(tmp_path, "Network/gradients", text)
    read = EventAccumulator(str(tmp_path / "launcher"))
    read.Reload()
    assert read.Tags()["tensors"] == ["Network/gradients"]
    [event] = read.Tensors("Network/gradients")
    assert event.tensor_proto.string_val == [text.encode()]
    assert next(iter(event.tensor_proto.tensor_shape.dim)).size == 1
    assert read.SummaryMetadata("Network/gradients").plugin_data.plugin_name == "text"
