"""Every command on records of runs whose files have values of other types: a message, never an unexpected error."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from launcher.cli import terminal
from launcher.cli.main import app
from launcher.errors import LauncherError
from launcher.job.dump import dump_job
from launcher.job.loader import parse_job
from launcher.planning.offline import offline
from launcher.records.paths import RunPaths
from launcher.records.store import Record
from launcher.run.result import NodeResult, Outcome

ID = "x-20260101-000000-aaaa"
OTHER = "y-20260101-000000-bbbb"
JOB = "name: x\nruntime: process\nnodes: [local, local]\nrun: {script: a.py, args: {lr: 0.1}}\n"
RESULT: dict[str, Any] = {
    "run": ID,
    "state": "failed",
    "failure": {"node": "local-0", "rank": 0, "exit_code": 1, "what": "failed", "cure": "", "words": "x"},
    "nodes": [
        {"node": f"local-{rank}", "rank": rank, "exit_code": 1, "oom_killed": False, "restarts": 1}
        | {"restarted": ["why"], "started": 1.0, "finished": 2.0, "victim": False, "lost": None}
        for rank in range(2)
    ],
    "last": {"kind": "epoch", "val": {"top1": 50.0}},
    "stopped_by": None,
    "gradients": "gradients: RoCE on mlx5_0, GPUDirect",
    "apart": "no rank joined a process group: each of the 2 ranks worked alone",
    "resume": "launcher up x --resume RUN",
    "ended_by": None,
    "exit_code": 1,
}
EVENTS: list[dict[str, Any]] = [
    {"time": 1.0, "event": "started"},
    {"time": 1.0, "event": "group", "group": "x-20260101-000000-cccc", "variant": "lr=0.1"},
    {"time": 1.0, "event": "job", "file": "job.yaml"},
    {"time": 1.0, "event": "resumes", "earlier": OTHER},
    {"time": 1.0, "event": "down", "failed": []},
]
METRICS: list[dict[str, Any]] = [
    {"kind": "start", "time": 1.0, "world": 2, "devices": 2, "global_batch": 64, "arch": "r", "parallel": "ddp"},
    {"kind": "step", "time": 2.0, "step": 10, "steps": 20, "epoch": 1, "epochs": 2, "images_per_s": 9.0, "loss": 1.0},
    {"kind": "step", "time": 3.0, "step": 20, "steps": 20, "epoch": 1, "epochs": 2, "images_per_s": 9.0, "loss": 1.0}
    | {"mfu": 0.5, "slow": "rank 1", "data_wait": 0.1},
    {"kind": "epoch", "epoch": 1, "val": {"top1": 50.0}, "train": {"top1": 60.0}, "memory_mb": 9.0},
    {"kind": "end", "top1": 50.0, "seconds": 3.0},
]
LEFT_OUT = {"folder": ".", "left_out": {"data.bin": ".gitignore:1"}}
VALUES: list[Any] = [
    *(None, True, 0, -1, 1.5, 2**70, 1e300, float("nan"), float("inf")),
    *("", "x", "done", "\x1b[31m\n", "\ud800", "../../x", "9" * 30),
    *([], [1], ["x"], [[]], [{}], {}, {"a": 1}, {"\n": {"b": [None]}}),
]
COMMANDS = [
    *(["runs"], ["runs", "--json"], ["status", ID], ["status", ID, "--json"], ["logs", ID, "--no-follow"]),
    ["fetch", ID],
    *(["down", ID], ["clean", "--yes"], ["down", "--all"], ["logs", "--no-follow"], ["exec", ID, "--", "true"]),
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two runs whose nodes have nothing of them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for run in (ID, OTHER):
        job = parse_job(JOB.replace("name: x", f"name: {run[0]}"), "job.yaml")
        plan = offline(job, "code")
        shown = plan.to_json().replace(plan.run, run).replace("/home/user", str(tmp_path))
        root = tmp_path / "runs" / run
        (root / "logs").mkdir(parents=True)
        (root / "plan.json").write_text(shown)
        (root / "job.yaml").write_text(dump_job(job))
        (root / "result.json").write_text(json.dumps({**RESULT, "run": run}))
        (root / "events.jsonl").write_text(lines(EVENTS))
        (root / "metrics.jsonl").write_text(lines(METRICS))
        (root / "left_out.json").write_text(json.dumps(LEFT_OUT))
        (root / "logs" / "local-0.log").write_text("hello\n")
    return tmp_path


def lines(each: list[Any]) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in each)


def call(*argv: str) -> tuple[int, str]:
    """Run a command in this process. Return its exit code and what it printed; raises an unexpected error."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = app(list(argv), standalone_mode=False)
        except LauncherError as error:
            terminal.show_error(str(error))
            code = error.exit_code
        except (SystemExit, typer.Exit) as end:
            code = end.exit_code if isinstance(end, typer.Exit) else end.code
    return int(code or 0), out.getvalue()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in a document."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places(each, (*path, key))


def changed(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    found = copy.deepcopy(document)
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return found


def fuzzed(rand: random.Random, root: Path) -> None:
    """Change one or two values in the files of a record."""
    for _ in range(rand.choice((1, 1, 2))):
        file = rand.choice([root / name for name in ("plan.json", "result.json", "events.jsonl", "metrics.jsonl")])
        many = file.suffix == ".jsonl"
        document = (
            [json.loads(line) for line in file.read_text().splitlines()] if many else json.loads(file.read_text())
        )
        place = rand.choice([place for place in places(document) if place or not many])
        document = changed(document, place, copy.deepcopy(rand.choice(VALUES)))
        file.write_text(lines(document) if many else json.dumps(document))


def fuzz(project: Path, rounds: int, seed: int, commands: list[list[str]]) -> int:
    """Run `rounds` commands, each on records changed anew; return how many were run."""
    rand, root = random.Random(seed), project / "runs" / ID
    kept = {file: file.read_bytes() for file in root.iterdir() if file.is_file()}
    for number in range(rounds):
        for file, data in kept.items():
            file.write_bytes(data)
        fuzzed(rand, root)
        argv = rand.choice(commands)
        try:
            call(*argv)
        except Exception as error:
            texts = {f.name: f.read_text() for f in kept if f.exists() and f.read_bytes() != kept[f]}
            raise AssertionError(f"round {number}: {argv}: {error!r}\n{texts}") from error
    return rounds


def test_commands_on_any_record_end_with_a_message(project: Path) -> None:
    assert fuzz(project, 60, 1, COMMANDS) == 60


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_commands_on_any_record_end_with_a_message(project: Path) -> None:
    assert fuzz(project, 2030, 2, COMMANDS) == 2030


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((("failure",), "text"), (("failure", "what"), 3), (("nodes",), 3), (("nodes", 0), "x"), (("last",), [1])),
        *((("nodes", 0, "restarted"), 7), (("nodes", 1, "restarts"), "x"), (("exit_code",), "x"), (("resume",), {})),
    ],
)
def test_a_result_with_a_value_of_another_type_is_used_without_it_and_named(
    project: Path, place: tuple[Any, ...], value: Any
) -> None:
    (project / "runs" / ID / "result.json").write_text(json.dumps(changed(RESULT, place, value)))
    for argv in (["runs"], ["status", ID], ["fetch", ID]):
        code, printed = call(*argv)
        assert code == 0
        assert ID in printed
        assert f"runs/{ID}/result.json has values of another type, which are ignored: {place[0]}" in printed


@pytest.mark.parametrize(
    ("file", "text"), [("result.json", "[1]"), ("result.json", "{}"), ("plan.json", '{"nodes": 3}')]
)
def test_a_file_that_is_not_valid_hides_no_other_run(project: Path, file: str, text: str) -> None:
    (project / "runs" / ID / file).write_text(text)
    code, printed = call("runs", "--all")
    assert code == 0
    assert OTHER in printed
    assert f"warning: runs/{ID}/{file} is not valid" in printed


def test_what_the_launcher_writes_is_read_whole(project: Path) -> None:
    record = Record(RunPaths(project / "runs" / ID))
    assert record.result() == RESULT
    assert not [*record.ignored()]
    outcome = Outcome.from_dict(ID, RESULT)
    assert outcome.to_dict() == RESULT
    assert outcome.failure
    assert record.container(1) == json.loads(record.paths.plan.read_text())["nodes"][1]["container"]
    assert record.container(7) == {}


def test_every_part_of_a_result_is_read_back() -> None:
    changes = {"stopped_by": "bob@desk", "ended_by": "budget", "state": "stopped", "exit_code": 5}
    known = RESULT | changes
    assert all(known.values()), "a value that is as if it were not there tests nothing"
    assert Outcome.from_dict(ID, known).to_dict() == known


def test_a_result_whose_node_was_lost_is_read_whole(project: Path) -> None:
    """Nothing is known of it but that: result.json has null for the rest."""
    record, lost = Record(RunPaths(project / "runs" / ID)), NodeResult("local-1", 1, lost="lost its container")
    known = Outcome.from_dict(ID, RESULT)
    record.finish(replace(known, nodes=(known.nodes[0], lost)).to_dict())
    assert not [*record.ignored()]
    assert Outcome.from_dict(ID, record.result() or {}).nodes[1] == lost
    code, printed = call("status", ID)
    assert code == 0, printed
    assert "None" not in printed


def test_the_id_of_a_group_selects_its_runs(project: Path) -> None:
    group = EVENTS[1]["group"]
    code, printed = call("status", group)
    assert code == 0
    assert f"lr=0.1   failed  {OTHER}" in printed
    assert ID not in printed, "a run of the same variant is later"
    assert [seen["run"] for seen in json.loads(call("status", group, "--json")[1])] == [OTHER]
    code, printed = call("down", group)
    assert code == 0
    assert f"down {ID}" in printed
    assert f"down {OTHER}" in printed
