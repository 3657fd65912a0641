"""Comparisons: the published ratios from their raw numbers, and tables from records."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.features.compare.comparison import amdahl, cells, compare, markdown
from launcher.features.compare.measured import Measured, measure
from launcher.job.scalars import ArgValue
from tests.features.compare.test_measured import lines


def timed(run: str, method: str, devices: int, batch: int, seconds_per_batch: float, **more: Any) -> Measured:
    return Measured(run, run, method, devices, batch, batch / seconds_per_batch, **more)


def test_experiment_0_data_parallel() -> None:
    """0.742 s per batch of 256 on one GPU, 0.378 s on four."""
    alone, four = compare([timed("one", "single", 1, 256, 0.742), timed("four", "dp", 4, 256, 0.378)])
    assert alone.against is None
    assert four.speed_up == pytest.approx(1.963, abs=5e-4)
    assert four.efficiency == pytest.approx(0.49, abs=5e-3)
    assert four.parallel_fraction == pytest.approx(0.654, abs=5e-4)
    assert [cell[-3:] for cell in cells([alone, four])[1:]] == [("1", "-", "-"), ("1.963", "49%", "65.4%")]


def test_experiment_1_two_nodes() -> None:
    """Two epochs in 1:30:40 on one node and in 0:48:45 on two."""
    images = 2 * 1_281_167
    runs = [
        Measured("one", "one", "ddp", 1, 256, images / 5440, arch="resnet50"),
        Measured("two", "two", "ddp", 2, 512, images / 2925, arch="resnet50"),
    ]
    assert cells(compare(runs))[2][-3:] == ("~1.860", "93%", "92.5%")


def test_experiment_4_model_parallel_is_4_times_slower() -> None:
    model, data = compare([timed("model", "model", 4, 512, 1.616), timed("dp", "dp", 4, 512, 0.396)])
    assert data.against == "model"
    assert data.speed_up == pytest.approx(4.08, abs=5e-3)
    assert data.efficiency is None
    assert data.parallel_fraction is None
    turned, _ = compare([model.measured, data.measured], baseline="dp")
    assert turned.speed_up == pytest.approx(1 / 4.08, abs=5e-4)


@given(st.floats(0.01, 1), st.integers(2, 512))
def test_amdahl_recovers_the_parallel_fraction(share: float, devices: int) -> None:
    assert amdahl(1 / (1 - share + share / devices), devices) == pytest.approx(share, rel=1e-6)


def test_amdahl_is_undefined_for_a_slow_down_or_equal_devices() -> None:
    assert amdahl(0.7, 4) is None
    assert amdahl(1.5, 1) is None


def test_baseline_is_the_fewest_devices_at_the_same_batch_and_model() -> None:
    runs = [
        timed("wide", "ddp", 4, 512, 1.0),
        timed("small", "single", 1, 128, 1.0),
        timed("large", "single", 1, 512, 3.0),
        timed("other", "single", 1, 512, 0.1, arch="other"),
    ]
    assert [row.against for row in compare(runs)] == ["large", None, None, None]


def test_peak_memory_and_mfu_are_columns_where_they_are_known() -> None:
    found = lines(100.0, 2, 32)
    for line, mfu in zip(found[1:5], (0.1, 0.4, 0.42, 0.41), strict=True):
        line["mfu"] = mfu
    run = measure(found, "r", "r")
    assert (run.memory_mb, run.mfu) == (82.772, pytest.approx(0.405))
    head, known, unknown = cells(compare([run, timed("old", "ddp", 2, 32, 1.0)]))
    columns = [head.index("memory MB"), head.index("MFU")]
    assert [known[column] for column in columns] == ["82.8", "40.5%"]
    assert [unknown[column] for column in columns] == ["-", "-"]


def test_how_gradients_are_compressed_is_a_column_where_any_are() -> None:
    found = lines(100.0, 2, 32)
    found[0]["config"] = {"gradient_compression": "powersgd:4"}
    compressed, plain = measure(found, "r", "r"), measure(lines(50.0, 2, 32), "p", "p")
    head, *rows = cells(compare([plain, compressed]))
    assert [row[head.index("gradients")] for row in rows] == ["plain", "powersgd:4"]
    assert "gradients" not in cells(compare([plain]))[0]


def test_markdown_is_a_table_of_equal_widths() -> None:
    rows = compare([timed("a|b", "single", 1, 256, 0.742), timed("four", "dp", 4, 512, 0.378)])
    table, note = markdown(rows).split("\n\n")
    assert len({len(line.replace("\\|", "  ")) for line in table.splitlines()}) == 1
    assert "a\\|b" in table
    assert note.startswith("~ baseline with a different global batch")


def test_settings_that_differ_are_listed_unless_the_labels_have_them() -> None:
    rows = compare([timed("batch_size=64", "single", 1, 64, 0.742), timed("batch_size=128", "ddp", 4, 128, 0.378)])
    named: list[dict[str, ArgValue]] = [{"batch_size": "64"}, {"batch_size": "128"}]
    assert "settings" not in markdown(rows, settings=named)
    more: list[dict[str, ArgValue]] = [{**named[0], "amp": True}, {**named[1], "amp": "default"}]
    assert markdown(rows, settings=more).split("\n\n")[-1].splitlines() == [
        "settings that differ, in the order of the lines:",
        "  batch_size: 64, 128",
        "  amp: true, default",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_the_columns_that_fit_and_names_the_others(width: int) -> None:
    runs = [
        timed("batch_size=64", "single", 1, 64, 0.742, accuracy=97.1, best=98.2, seconds=61.2),
        timed("batch_size=128", "ddp", 4, 512, 0.378, accuracy=96.4, best=96.4, seconds=30.5),
    ]
    table, *notes = markdown(compare(runs), width).split("\n\n")
    head, *rest = table.splitlines()
    assert {len(line) for line in rest} == {len(head)}
    assert len(head) <= width
    assert all(f" {name} " in head for name in ("run", "images/s", "accuracy %", "speed-up"))
    assert [row.split()[1] for row in rest[1:]] == ["batch_size=64", "batch_size=128"]
    assert all(len(line) <= width for note in notes for line in note.splitlines())
    hidden = notes[0].replace("\n", " ").removeprefix("omitted columns: ").split(", ")
    assert {name.strip() for name in head.strip("|").split("|")} | set(hidden) == set(cells([])[0])
    assert "not shown" not in markdown(compare(runs))
