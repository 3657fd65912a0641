"""Comparisons: the published ratios from their raw numbers, tables from records, groups."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import RunUnknown
from launcher.records.compare import amdahl, cells, compare, markdown
from launcher.records.groups import labels, select
from launcher.records.measured import Measured, measure, steady_rate
from launcher.records.paths import RunPaths
from launcher.records.store import Record

IDS = [f"sweep-20261121-12000{i}-000{i}" for i in range(4)]
NODE = {"node": "a", "host": "a", "rank": 0, "first_rank": 0, "processes": 1}


def timed(run: str, method: str, devices: int, batch: int, seconds_per_batch: float, **more: Any) -> Measured:
    return Measured(run, run, method, devices, batch, batch / seconds_per_batch, **more)


def lines(rate: float, world: int, batch: int, start: float = 0.0) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl: one slow interval, then three at `rate`."""
    head = {"kind": "start", "time": start, "world": world, "global_batch": batch, "arch": "x", "step": 0, "config": {}}
    steps = [
        {
            "kind": "step",
            "time": start + i,
            "step": 10 * i,
            "images_per_s": rate / (9 if i == 1 else 1),
            "loss": 3 - i / 9,
        }
        for i in range(1, 5)
    ]
    epoch = {"kind": "epoch", "time": start + 5, "epoch": 1, "train": {"top1": 61.5}, "val": {"top1": 60.25}}
    epoch |= {"memory_mb": 82.772}
    return [head, *steps, epoch, {"kind": "end", "time": start + 5, "top1": 60.25, "seconds": 5.0}]


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


def test_the_rate_excludes_the_first_interval_of_each_start() -> None:
    once = lines(100.0, 2, 32)
    assert steady_rate(once) == pytest.approx(100)
    assert steady_rate(once[:2]) == pytest.approx(100 / 9)  # the only interval


def test_a_resumed_run_counts_as_one_run() -> None:
    first, second = lines(100.0, 2, 32)[:4], lines(100.0, 2, 32, start=1000.0)
    run = measure([*first, *second], "r", "r")
    assert run.images_per_s == pytest.approx(100)
    assert [time for time, _ in run.losses] == [1, 2, 3, 4, 5, 6, 7]
    assert (run.method, run.devices, run.batch, run.accuracy, run.train_accuracy) == ("ddp", 2, 32, 60.25, 61.5)


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


def test_a_run_without_a_step_is_refused() -> None:
    with pytest.raises(RunUnknown, match="has no training step"):
        measure(lines(1.0, 1, 1)[:1], "r", "r")


def test_markdown_is_a_table_of_equal_widths() -> None:
    rows = compare([timed("a|b", "single", 1, 256, 0.742), timed("four", "dp", 4, 512, 0.378)])
    table, note = markdown(rows).split("\n\n")
    assert len({len(line.replace("\\|", "  ")) for line in table.splitlines()}) == 1
    assert "a\\|b" in table
    assert note.startswith("~ baseline with a different global batch")


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


def test_runs_of_one_job_are_labelled_by_their_differences(tmp_path: Path) -> None:
    def chosen(*texts: str) -> list[tuple[Record, str | None]]:
        found = []
        for index, text in enumerate(texts):
            name = text.split("\n")[0].removeprefix("name: ")
            folder = tmp_path / f"{name}-20261121-12000{index}-{len(list(tmp_path.iterdir())):04x}"
            folder.mkdir()
            (folder / "job.yaml").write_text(text)
            found.append((Record(RunPaths(folder)), None))
        return found

    def job(nodes: str = "a", name: str = "quick", **args: object) -> str:
        run = json.dumps({"module": "train", "args": {"data": "d", **args}})
        return f"name: {name}\nimage: {{ref: i}}\nnodes: [{nodes}]\nrun: {run}\n"

    assert labels(chosen(job(batch_size=64), job(batch_size=128))) == ["batch_size=64", "batch_size=128"]
    assert labels(chosen(job(), job(**{"batch-size": 8}))) == ["batch_size=default", "batch_size=8"]
    assert labels(chosen(job(), job("a, b"))) == ["nodes=1", "nodes=2"]
    assert labels(chosen(job("a"), job("b"))) == ["hosts=a", "hosts=b"]
    assert labels(chosen(job(), job())) == ["quick 2026-11-21 12:00:00", "quick 2026-11-21 12:00:01"]
    assert labels(chosen(job(lr=1), job(lr=1), job(lr=2))) == [
        *("lr=1 2026-11-21 12:00:00", "lr=1 2026-11-21 12:00:01", "lr=2")
    ]
    assert labels(chosen(job(lr=1), job(lr=2), job(name="other"))) == ["quick lr=1", "quick lr=2", "other"]
    assert labels(chosen(job(data="/data/" + "x" * 90), job())) == ["data=…" + "x" * 23, "data=d"]
    assert labels(chosen("name: quick\nbroken: [", "name: quick\n")) == [
        *("quick 2026-11-21 12:00:00", "quick 2026-11-21 12:00:01")
    ]


def record(runs: Path, run: str, group: str | None, variant: str = "") -> None:
    (runs / run).mkdir()
    container = {"name": "c", "output_dir": f"/home/u/.launcher/{run}"}
    (runs / run / "plan.json").write_text(json.dumps({"nodes": [{**NODE, "container": container}]}))
    event = {"time": 0, "event": "group", "group": group, "variant": variant} if group else {"time": 0, "event": "x"}
    (runs / run / "events.jsonl").write_text(json.dumps(event) + "\n")


def test_groups(tmp_path: Path) -> None:
    """Two sweeps of a job and a run of another job: a name selects the latest sweep, an ID that run or group."""
    first, second = "sweep-20261121-115900-aaaa", "sweep-20261121-120001-bbbb"
    record(tmp_path, IDS[0], first, "b=1")
    record(tmp_path, IDS[1], second, "b=1")
    record(tmp_path, IDS[2], second, "b=2")
    record(tmp_path, "alone-20261121-130000-cccc", None)

    def names(*wanted: str) -> list[tuple[str, str | None]]:
        return [(found.run, variant) for found, variant in select(wanted, tmp_path)]

    assert names("sweep") == [(IDS[1], "b=1"), (IDS[2], "b=2")]
    assert names(first) == [(IDS[0], "b=1")]
    assert names(IDS[2]) == [(IDS[2], "b=2")]
    assert names("alone", "sweep", IDS[1]) == [("alone-20261121-130000-cccc", None), (IDS[1], "b=1"), (IDS[2], "b=2")]
    with pytest.raises(RunUnknown, match="no such run"):
        names("unknown")
