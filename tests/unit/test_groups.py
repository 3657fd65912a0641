"""Groups of runs: which are selected by a name, and how they are labelled."""

import json
from pathlib import Path

import pytest

from launcher.errors import RunUnknown
from launcher.model.plan import Membership, Revision
from launcher.records.groups import begun_by, labels, latest_of, select
from launcher.records.paths import RunPaths
from launcher.records.store import Record, resolve

IDS = [f"sweep-20261121-12000{i}-000{i}" for i in range(4)]
NODE = {"node": "a", "host": "a", "rank": 0, "first_rank": 0, "processes": 1}


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
    assert labels(chosen(job(data="/data/" + "x" * 90), job())) == ["data=/data/xxxxx…" + "x" * 12, "data=d"]
    assert labels(chosen(f"{job()}code: ../try-1\n", job())) == ["code=../try-1", "code=."]
    first, second = "1a2b3c4d" * 5, "5e6f7a8b" * 5
    of = chosen(f"{job()}revision: {first}\n", f"{job()}revision: {second}\n")
    of[0][0].of_revision(Revision(first, asked="main"))
    assert labels(of) == ["revision=1a2b3c4d (main)", "revision=5e6f7a8b"]
    assert labels(chosen("name: quick\nbroken: [", "name: quick\n")) == [
        *("quick 2026-11-21 12:00:00", "quick 2026-11-21 12:00:01")
    ]


@pytest.mark.parametrize(
    ("groups", "shown"),
    [
        (("eve-20261127-200000-aaaa", "night-20261128-200000-bbbb"), ("eve", "night")),
        (("night-20261127-200000-aaaa", "night-20261128-200000-bbbb"), ("11-27 20:00", "11-28 20:00")),
        (("night-20261128-200000-aaaa", "night-20261128-200001-bbbb"), ("aaaa", "bbbb")),
    ],
)
def test_variants_of_two_sweeps_are_labelled_by_their_sweeps(
    tmp_path: Path, groups: tuple[str, str], shown: tuple[str, str]
) -> None:
    chosen = []
    for index, (group, rate) in enumerate((group, rate) for group in groups for rate in ("0.1", "0.2")):
        record = Record(RunPaths(tmp_path / f"night-20261128-20000{index}-000{index}"))
        record.paths.root.mkdir()
        record.join(Membership(group, f"lr={rate}"))
        chosen.append((record, f"lr={rate}"))
    assert labels(chosen) == [f"{name} lr={rate}" for name in shown for rate in ("0.1", "0.2")]
    assert labels(chosen[:2]) == ["lr=0.1", "lr=0.2"]


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
    (tmp_path / ".sweeps").mkdir()
    (tmp_path / ".sweeps" / f"{second}.json").write_text('{"variants": ["b=3", "b=2", "b=1"]}')
    assert names("sweep") == [(IDS[2], "b=2"), (IDS[1], "b=1")]  # in the sweep's order, if that is recorded
    assert [*latest_of(second, tmp_path)] == ["b=2", "b=1"]
    with pytest.raises(RunUnknown, match="no such run"):
        names("unknown")


def test_a_beginning_that_means_a_sweep_and_anothers_run_is_refused() -> None:
    """A sweep and a variant of an earlier one that started within the same minute."""
    later, earlier = "night-20261128-200000-bbbb", "night-20261127-200000-aaaa"
    runs = [("night-20261128-200001-0001", Membership(later, "lr=1"))]
    assert begun_by("night-20261128-2000", runs) == later
    with pytest.raises(RunUnknown, match="matches 1 sweep and 1 run"):
        begun_by("night-20261128-2000", runs, exactly=True)
    with pytest.raises(RunUnknown, match="matches 1 sweep and 1 run"):
        begun_by("night-20261128-2000", [*runs, ("night-20261128-200005-0002", Membership(earlier, "lr=2"))])


def test_of_many_that_match_it_is_said_how_many_are_not_named() -> None:
    """Six runs of earlier sweeps begin as one sweep does."""
    later = Membership("night-20261128-200000-bbbb", "lr=1")
    earlier = [Membership(f"night-20261127-200000-000{index}", "lr=2") for index in range(6)]
    others = [(f"night-20261128-20010{index}-0000", own) for index, own in enumerate(earlier)]
    runs = [("night-20261128-200001-0001", later), *others]
    with pytest.raises(RunUnknown, match=r"matches 1 sweep and 7 runs: .*-200102-0000 and 3 more"):
        begun_by("night-20261128-200", runs, exactly=True)
    with pytest.raises(RunUnknown, match=r"matches 7 runs: night-20261128-200105-0000, .*-200101-0000 and 2 more"):
        resolve("night-20261128-200", [run for run, _ in runs], "runs/")
