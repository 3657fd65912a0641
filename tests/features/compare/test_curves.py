"""The curves of runs, whoever wrote them, as tables, pages and pictures; the best of them and its checkpoint."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.compat.proto import event_pb2, summary_pb2  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from launcher.event_files import Point
from launcher.features.compare.curves import checkpoint_of, curves, files_of
from launcher.model.plan import KnownSweep, Membership
from launcher.planning.offline import offline
from launcher.records import sweeps
from launcher.records.paths import RunPaths
from launcher.records.store import Record
from tests.unit.test_record_fuzz import call, parse_job

JOB = "name: night\nruntime: process\nnodes: [local]\ngpus: none\nrun: {command: ['true']}\n"
GROUP = "night-20261128-200000-bbbb"


def board(file: Path, tag: str, values: dict[int, float], time: float = 100.0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        writer = RecordWriter(out)
        for step, value in values.items():
            summary = summary_pb2.Summary(value=[{"tag": tag, "simple_value": value}])
            event = event_pb2.Event(wall_time=time + step, step=step, summary=summary)
            writer.write(event.SerializeToString())


def read(root: Path) -> dict[str, list[tuple[int, float]]]:
    found = curves(RunPaths(root), files_of(root))
    return {tag: [(point.step, round(point.value, 4)) for point in curve.points] for tag, curve in found.items()}


def test_a_restart_continues_a_curve_and_replaces_its_steps(tmp_path: Path) -> None:
    names = ("Nov28_08-25-06_host/events.out.tfevents.1", "Nov28_09-00-00_host/events.out.tfevents.2")
    board(tmp_path / "tensorboard" / names[0], "loss", {1: 4.0, 2: 3.0, 3: 2.5})
    board(tmp_path / "tensorboard" / names[1], "loss", {2: 2.0, 4: 1.0})
    assert read(tmp_path) == {"loss": [(1, 4.0), (2, 2.0), (3, 2.5), (4, 1.0)]}


def test_folders_tell_curves_of_one_name_apart(tmp_path: Path) -> None:
    board(tmp_path / "tensorboard" / "train" / "events.out.tfevents.1", "epoch_loss", {1: 4.0})
    board(tmp_path / "tensorboard" / "validation" / "events.out.tfevents.1", "epoch_loss", {1: 5.0})
    assert read(tmp_path) == {"train/epoch_loss": [(1, 4.0)], "validation/epoch_loss": [(1, 5.0)]}


def test_documented_metrics(tmp_path: Path) -> None:
    """Also with words and nan, and validation after an epoch, as the trainer writes it."""
    lines = [
        {"kind": "start", "world": 1},
        *({"kind": "step", "time": 1.0, "step": step, "steps": 9, "loss": 3 - step, "slow": "x"} for step in (1, 2)),
        {"kind": "epoch", "epoch": 1, "val": {"top1": 60.0}},
        {"step": 3, "loss": float("nan"), "done": True},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 4, "lo')
    assert repr(read(tmp_path)) == "{'loss': [(1, 2.0), (2, 1.0), (3, nan)], 'val/top1': [(2, 60.0)]}"


def test_lightnings_csv(tmp_path: Path) -> None:
    folder = tmp_path / "workdir" / "local" / "lightning_logs" / "version_0"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("epoch,step,train_loss,val_acc\n0,9,1.5,\n0,9,,0.5\n1,19,1.0,\n1,19,,0.75\n")
    assert read(tmp_path) == {"train_loss": [(9, 1.5), (19, 1.0)], "val_acc": [(9, 0.5), (19, 0.75)]}


def test_the_state_of_transformers_trainer(tmp_path: Path) -> None:
    log: list[dict[str, Any]] = [{"epoch": 0.5, "loss": 2.0, "step": 10}, {"epoch": 1.0, "eval_loss": 1.5, "step": 20}]
    for name, lines in (("checkpoint-10", log[:1]), ("checkpoint-20", log)):
        (tmp_path / "out" / name).mkdir(parents=True)
        state = {"global_step": 20, "log_history": lines}
        (tmp_path / "out" / name / "trainer_state.json").write_text(json.dumps(state))
    assert read(tmp_path) == {"loss": [(10, 2.0)], "eval_loss": [(20, 1.5)]}


@pytest.mark.parametrize(
    "text", ["", "\0\n", "[1]", '{"log_history": 3}', '{"log_history": [1, {"step": "x"}]}', "a,b\n1"]
)
def test_files_of_another_form_have_no_curves(tmp_path: Path, text: str) -> None:
    for name in ("metrics.jsonl", "metrics.csv", "trainer_state.json"):
        (tmp_path / name).write_text(text)
    board(tmp_path / "tensorboard" / "events.out.tfevents.1", "x", {})
    read(tmp_path)


@pytest.mark.parametrize(
    ("names", "expected", "why"),
    [
        (["checkpoints/step-0010.pt", "checkpoints/step-0020.pt"], "checkpoints/step-0020.pt", "has step 20"),
        (
            ["out/checkpoint-20/model.safetensors", "out/checkpoint-30/model.safetensors"],
            "out/checkpoint-20/",
            "has step",
        ),
        (["logs/20.pt.log", "checkpoints/best.pt", "model-00020-of-00020.ckpt"], "checkpoints/best.pt", "12 s after"),
        (["train.py"], "", ""),
    ],
)
def test_the_checkpoint_of_a_point(tmp_path: Path, names: list[str], expected: str, why: str) -> None:
    for index, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (1012 if name.endswith("best.pt") else 2000 + index,) * 2)
    found, how = checkpoint_of(Point("acc", 20, 1000.0, 1.0), tmp_path, files_of(tmp_path))
    assert expected in str(found) if expected else found is None, (found, how)
    assert why in how


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep of a program that writes only TensorBoard's files: three variants, of which one failed before any."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COLUMNS", raising=False)
    for index, rate in enumerate(("0.1", "0.2", "9")):
        run = f"night-20261128-20000{index}-000{index}"
        plan, record = offline(parse_job(JOB, "job.yaml"), "code"), Record(RunPaths(tmp_path / "runs" / run), [])
        record.paths.root.mkdir(parents=True)
        record.paths.plan.write_text(plan.to_json().replace(plan.run, run).replace("/home/user", str(tmp_path)))
        record.join(Membership(GROUP, f"lr={rate}"))
        record.event("started")
        failure = {"node": "local", "rank": 0, "exit_code": 1, "what": "exited with code 1: loss is nan"}
        failed = {"state": "failed", "exit_code": 1, "failure": failure}
        record.finish(failed if rate == "9" else {"state": "done", "exit_code": 0})
        values = {step: float(rate) * (20 - abs(step - 15)) for step in range(1, 21)}
        for tag in ("acc/val", "lr", "x", "y", "z") if rate != "9" else ():
            board(record.paths.tensorboard / f"events.out.tfevents.{tag[0]}", tag, values, time=1000.0)
    return tmp_path


def test_a_program_that_writes_only_tensorboard(night: Path) -> None:
    del night
    code, printed = call("compare")
    assert code == 0
    head, _, *rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in head.strip("|").split("|")] == ["run", "state", "acc/val", "lr", "x", "y"]
    assert [row.split()[1] for row in rows] == ["lr=0.1", "lr=0.2", "lr=9"]
    assert "failed, no curves" in rows[2]
    assert "lr=9 failed: local: exited with code 1: loss is nan: launcher logs night-20261128-200002-0002" in printed
    assert "other tags (--tag): z" in printed
    assert "no metrics" not in printed
    assert call("compare", "night", "--tag", "z")[1].splitlines()[0].split() == [
        "|",
        "run",
        "|",
        "state",
        "|",
        "z",
        "|",
    ]


def test_the_best_run_is_first_and_its_checkpoint_named(night: Path) -> None:
    rows = [row for row in call("compare", "night", "--by", "acc/val")[1].splitlines() if row.startswith("| lr")]
    assert [row.split()[1] for row in rows] == ["lr=0.2", "lr=0.1", "lr=9"]
    assert "launcher fetch night --best acc/val" in call("compare", "night", "--by", "acc/val")[1]
    saved = night / "runs" / "night-20261128-200001-0001" / "checkpoints" / "step-15.pt"
    saved.parent.mkdir()
    saved.write_text("x")
    printed = call("compare", "night", "--by", "acc/val")[1]
    assert "best: lr=0.2, acc/val 4 at step 15\n" in printed
    assert "its checkpoint: runs/night-20261128-200001-0001/checkpoints/step-15.pt, which has step 15" in printed
    first, *_ = json.loads(call("compare", "night", "--by", "acc/val", "--json")[1])
    assert (first["label"], first["by"]["step"], first["by"]["checkpoint"]) == (
        "lr=0.2",
        15,
        str(saved.relative_to(night)),
    )
    lowest = call("compare", "night", "--by", "acc/val", "--min")[1]
    assert "best: lr=0.1, acc/val 0.6 at step 1\n" in lowest
    code, printed = call("fetch", "night", "--best", "acc")
    assert (code, "--best acc: no run has this tag" in printed) == (2, True)
    code, printed = call("compare", "night", "--by", "acc")
    assert code == 2
    assert "no run has this tag" in printed
    assert "acc/val" in printed


def test_runs_with_the_same_best_value_are_named(night: Path) -> None:
    other = night / "runs" / "night-20261128-200000-0000"
    board(other / "tensorboard" / "events.out.tfevents.zz", "acc/val", {21: 4.0}, time=2000.0)
    says = "best: lr=0.1, acc/val 4 at step 21; with the same value: lr=0.2\n"
    assert says in call("compare", "night", "--by", "acc/val")[1]
    assert "same value" not in call("compare", "night", "--by", "acc/val", "--min")[1]


def test_a_run_that_did_not_end_well_may_be_the_best_and_its_line_says_so(night: Path) -> None:
    for index, state in enumerate(("stopped", "failed")):
        record = Record(RunPaths(night / "runs" / f"night-20261128-20000{index}-000{index}"))
        record.finish({"state": state, "exit_code": 1})
        board(record.paths.tensorboard / "events.out.tfevents.zz", "acc/val", {21: 4.0}, time=2000.0)
    says = "best: lr=0.1 (stopped), acc/val 4 at step 21; with the same value: lr=0.2 (failed)\n"
    assert says in call("compare", "night", "--by", "acc/val")[1]


def test_a_resumed_variant_has_one_curve_and_says_how_long_all_its_runs_took(night: Path) -> None:
    """Its best value is that of its first run, whose steps from 12 on were repeated."""
    first, again = (f"night-20261128-20000{index}-000{index}" for index in (1, 3))
    record = Record(RunPaths(night / "runs" / again), [])
    shutil.copytree(night / "runs" / first, record.paths.root, ignore=lambda *_: ["tensorboard", "events.jsonl"])
    record.paths.plan.write_text(record.paths.plan.read_text().replace(first, again))
    record.join(Membership(GROUP, "lr=0.2"))
    record.event("started")
    record.event("resumes", earlier=first)
    for index, run in enumerate((first, again), 1):
        node = {"node": "local", "rank": 0, "started": 100.0, "finished": 100.0 + 14 * index}
        Record(RunPaths(night / "runs" / run)).finish({"state": "done", "exit_code": 0, "nodes": [node]})
    board(record.paths.tensorboard / "events.out.tfevents.1", "acc/val", {12: 2.0, 30: 2.0}, time=2000.0)
    (night / "runs" / first / "checkpoints").mkdir()
    (night / "runs" / first / "checkpoints" / "last.pt").write_text("x")
    printed = call("compare", "night", "--by", "acc/val")[1]
    assert f"best: lr=0.2, acc/val 3.2 at step 11, in {first}, from which it was resumed\n" in printed
    assert f"its checkpoint: runs/{first}/checkpoints/last.pt" in printed
    assert "resumed: lr=0.2 (2 runs, 0:42 in all)\n" in printed
    found, *_ = json.loads(call("compare", "night", "--by", "acc/val", "--json")[1])
    assert (found["run"], found["earlier"], found["by"]["run"]) == (again, [first], first)
    assert (found["seconds"], found["seconds_in_all"]) == (28.0, 42.0)
    assert found["scalars"]["acc/val"]["last"] == {"step": 30, "value": 2.0}
    assert found["scalars"]["acc/val"]["min"]["step"] == 1


def test_the_command_for_the_best_works_as_it_is_printed(night: Path) -> None:
    """With a tag that the runs have; without one of a validation there is none."""
    command = "launcher compare night --by acc/val"
    assert f"for the best by this tag: {command}\n" in call("compare", "night")[1]
    assert call(*command.split()[1:])[0] == 0
    for file in (night / "runs").rglob("events.out.tfevents.a"):
        file.unlink()
    assert "for the best" not in call("compare", "night")[1]


def test_a_missing_folder_for_a_page_is_a_mistake_of_the_caller(night: Path) -> None:
    del night
    for option, name in (("--html", "no/page.html"), ("--plot", "no/page.svg")):
        code, printed = call("compare", "night", option, name)
        assert (code, "-> run: mkdir -p no\n" in printed) == (2, True), printed


def test_the_table_has_the_variants_that_were_not_started(night: Path) -> None:
    record = Record(RunPaths(night / "runs" / "night-20261128-200000-0000"))
    sweep = KnownSweep(("lr=9", "lr=0.1", "lr=0.5", "lr=0.2"))
    sweeps.keep(Membership(GROUP, "lr=0.1", sweep), record.mask, night / "runs")
    last = [row for row in call("compare", "night")[1].splitlines() if row.startswith("|")][-1]
    assert [cell.strip() for cell in last.split("|")][1:3] == ["lr=0.5", "not started"]
    assert "lr=0.5" not in call("compare", record.run)[1]
    assert len(json.loads(call("compare", record.run, "--json")[1])) == 1


@pytest.mark.parametrize("words", [["--min"], ["--tag", "acc"]])
def test_what_would_have_no_effect_is_refused(night: Path, words: list[str]) -> None:
    del night
    assert call("compare", "night", *words)[0] == 2


def test_a_state_in_a_table_names_the_budget(night: Path) -> None:
    record = Record(RunPaths(night / "runs" / "night-20261128-200000-0000"))
    record.finish({"state": "done", "exit_code": 0, "ended_by": "budget"})
    _, _, first, second, _ = call("compare", "night")[1].splitlines()[:5]
    assert [row.split("|")[2].strip() for row in (first, second)] == ["done by budget", "done"]
    assert json.loads(call("compare", "night", "--json")[1])[0]["state"] == "done"


def test_the_folder_of_a_run_is_walked_once(night: Path) -> None:
    deep = night / "runs" / "night-20261128-200000-0000" / "checkpoints" / "deep"
    deep.mkdir(parents=True)
    (deep / "last.pt").write_text("x")
    seen, watching = list[str](), [True]
    sys.addaudithook(
        lambda event, args: seen.append(str(args[0])) if watching and event in ("os.scandir", "os.listdir") else None
    )
    call("compare", "night", "--json", "--by", "acc/val")
    watching.clear()
    assert seen.count(str(deep)) == 1


def test_the_ledger_has_every_variant_in_the_order_of_the_sweep(night: Path) -> None:
    """Also one that has no run; with the keys that docs/compare.md names."""
    record = Record(RunPaths(night / "runs" / "night-20261128-200000-0000"))
    sweep = KnownSweep(("lr=9", "lr=0.1", "lr=0.5", "lr=0.2"))
    sweeps.keep(Membership(GROUP, "lr=0.1", sweep), record.mask, night / "runs")
    ledger = json.loads(call("compare", "night", "--json")[1])
    assert [(each["variant"], each["state"]) for each in ledger] == [
        *(("lr=9", "failed"), ("lr=0.1", "done"), ("lr=0.2", "done"), ("lr=0.5", "not started"))
    ]
    page = (Path(__file__).parents[3] / "docs/compare.md").read_text().partition("`--json` prints")[2]
    rows = [line.split("|")[1] for line in page.partition("`settings` has")[0].splitlines() if line.startswith("|")]
    documented = {key.strip() for row in rows[2:] for key in row.split(",")}
    for each in ledger:
        assert documented == each.keys() - {"settings"}
        assert (each["schema"], each["group"]) == (1, GROUP)
    failed, first, *_ = ledger
    assert failed["failure"]["what"] == "exited with code 1: loss is nan"
    assert (failed["exit_code"], failed["scalars"], first["failure"]) == (1, {}, None)
    scalar = first["scalars"]["acc/val"]
    assert {name: point["step"] for name, point in scalar.items()} == {"last": 20, "max": 15, "min": 1}
    assert scalar["max"]["value"] == pytest.approx(2.0)
    by = json.loads(call("compare", "night", "--by", "acc/val", "--json")[1])
    assert [each["variant"] for each in by] == ["lr=0.2", "lr=0.1", "lr=9", "lr=0.5"]


def test_curves_side_by_side(night: Path) -> None:
    code, printed = call("compare", "--by", "acc/val", "--html", "page.html", "--plot", "curves.svg")
    assert code == 0, printed
    page = (night / "page.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert [[one["label"], len(one["curves"].get("acc/val", []))] for one in data] == [
        ["lr=0.2", 20],
        ["lr=0.1", 20],
        ["lr=9", 0],
    ]
    assert "acc/val" in (night / "curves.svg").read_text()


def test_runs_without_curves_are_told_where_theirs_may_be(night: Path) -> None:
    for file in (night / "runs").rglob("*tfevents*"):
        file.unlink()
    code, printed = call("compare", "night")
    assert code == 0
    assert "done, no curves" in printed
    assert "launcher fetch night --checkpoints" in printed


def test_runs_whose_end_is_not_recorded_are_asked_for_and_not_ignored_silently(night: Path) -> None:
    """Their launcher was killed: one has no curves here, one has some; the containers of both are gone."""
    for index in (0, 2):
        (night / "runs" / f"night-20261128-20000{index}-000{index}" / "result.json").unlink()
    printed = call("compare", "night", "--by", "acc/val", "--min")[1]
    assert "best: lr=0.1 (removed), acc/val 0.6 at step 1\n" in printed
    assert "not compared, as this curve of them is not here: lr=9\n" in printed
    assert "as fetched last: lr=0.1 (removed), lr=9 (removed)\nto fetch them: launcher fetch night\n" in printed
    names = [f"night-20261128-20000{index}" for index in range(3)]
    printed = call("compare", *names, "--by", "acc/val")[1]
    assert f"to fetch them: launcher fetch {names[0]} && launcher fetch {names[2]}\n" in printed
    ledger = json.loads(call("compare", "night", "--json")[1])
    assert [row["state"] for row in ledger] == ["removed", "done", "removed"]
    assert [row["collected"] for row in ledger] == [False, True, False]
    for file in (night / "runs").rglob("*tfevents*"):
        file.unlink()
    assert (
        "2 of them may not be here yet: launcher fetch night-20261128-200000-0000 && "
        "launcher fetch night-20261128-200002-0002\n" in call("compare", "--by", "acc/val")[1]
    )


def test_a_table_in_a_pipe_has_the_width_that_is_set(night: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(map(len, call("compare")[1].splitlines()[:5])) > 50
    monkeypatch.setenv("COLUMNS", "50")
    printed = call("compare")[1]
    assert max(map(len, printed.splitlines()[:5])) <= 50
    assert "other tags (--tag): x, y, z" in printed
    (night / "runs" / "night-20261128-200002-0002" / "result.json").unlink()
    failure = {"node": "local", "what": "exited with code 1: ValueError: the loss of this step is nan"}
    record = Record(RunPaths(night / "runs" / "night-20261128-200000-0000"))
    record.finish({"state": "failed", "exit_code": 1, "failure": failure})
    printed = call("compare", "night", "--by", "acc/val")[1]
    below = printed.partition("best: lr")[2].partition("the end of these")[0]
    assert "not compared, as this curve of them is not here:\n  lr=9\n" in below
    assert "\n    launcher logs night-20261128-200000-0000\n" in below
    assert max(map(len, below.splitlines())) <= 50


def test_long_names_leave_room_for_the_figures(night: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is there, and the ends of the names, in which variants differ; else they are listed."""
    middle = ("4", "5", "5")
    for index, value in enumerate(middle):
        file = RunPaths(night / "runs" / f"night-20261128-20000{index}-000{index}").events
        name = f"some-very-long-option-name=0.001 another-option={value} the-last-of-the-options=0.{index}"
        file.write_text(re.sub("lr=[0-9.]+", name, file.read_text()))
    monkeypatch.setenv("COLUMNS", "80")
    for words in (
        ["compare", "night"],
        ["compare", "night", "--by", "acc/val"],
        ["compare", "night", "--tag", "acc/val"],
    ):
        table = [line for line in call(*words)[1].splitlines() if line.startswith("|")]
        assert max(map(len, table)) <= 80
        assert "acc/val |" in table[0]
        assert sorted(re.findall(r"s=(0\.\d) \|", "".join(table))) == ["0.0", "0.1", "0.2"]
    assert "s=0.1" in call("status", "night")[1]
    for file in (night / "runs").glob("*/events.jsonl"):
        file.write_text(re.sub(r"s=0\.\d", "s=0.0", file.read_text()))
    listed = "in the order of the lines:\n  some-very-long-option-name=0.001 another-option=4"
    assert listed in call("compare", "night")[1]


def test_columns_keep_their_order_while_runs_write(night: Path) -> None:
    """A tag that one run more has does not move before the others."""
    board(night / "runs" / "night-20261128-200002-0002" / "tensorboard" / "events.out.tfevents.1", "y", {1: 2.0})
    head = call("compare", "night")[1].splitlines()[0]
    assert [cell.strip() for cell in head.strip("|").split("|")][2:] == ["acc/val", "lr", "x", "y"]
