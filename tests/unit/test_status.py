"""The table of `launcher status` at typical widths of terminals."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from launcher.cli.status import render, render_sweep
from launcher.records.measured import TrainingProgress
from launcher.run.status import GpuUtilization, NodeStatus, RunStatus, Utilization, stopped_ranks

LINE = "Epoch: [12][1200/1502] Loss 0.1234 (0.2345) Acc@1 98.44 (97.31) Acc@5 100.00 (99.90) images/s 1910.5 data 12%"
USE = Utilization((GpuUtilization("GPU-1", 97, 14540, 16384),), 21 << 30, 64 << 30)


def node(rank: int, **changes: object) -> NodeStatus:
    known = NodeStatus(
        f"gpu-{rank}", "running", None, f"gpu-{rank}", rank, (rank, rank), age=3731.0, container=f"c{rank}", last=LINE
    )
    return replace(known, **changes)  # type: ignore[arg-type]


STEPS = TrainingProgress(
    {"kind": "step", "time": 100.0, "step": 1000},
    {"kind": "step", "time": 200.0, "step": 2000, "steps": 15018, "epoch": 2, "epochs": 6, "images_per_s": 910.4}
    | {"loss": 0.31415926, "data_wait": 0.12},
)
CPU = RunStatus("digits-20260131-120000-00aa", "running", STEPS, (node(0), node(1)), None)
FULL = replace(CPU, nodes=tuple(node(rank, gpus=("GPU-1",), use=USE, restarts=1) for rank in range(2)))


def shown(seen: RunStatus, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, highlight=False).print(render(seen, width))
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("seen", [CPU, FULL], ids=["without GPUs", "with GPUs"])
def test_state_comes_first_and_the_last_line_is_shortened(seen: RunStatus, width: int) -> None:
    run, progress, head, *rows = shown(seen, width)
    assert run == "digits-20260131-120000-00aa  running"
    assert progress == "epoch 2/6  step 2000/15018  910 images/s  ETA 21:41  loss 0.3142  data wait 12%"
    assert head.split()[:5] == ["state", "node", "ranks", "restarts", "age"]
    for rank, row in enumerate(rows):
        assert row.split()[:5] == ["running", f"gpu-{rank}", str(rank), str(seen.nodes[rank].restarts), "1:02:11"]
        assert len(row) <= width
        if seen is FULL:
            assert "1: 97 %, 14.2/16 GiB  21.0/64 GiB" in row
        if seen is CPU or width > 80:
            assert row.endswith("…")
            assert "Epoch: [" in row


def test_a_slow_rank_is_shown() -> None:
    text = "rank 1 on gpu-1 is slow: its work takes 1.31x the median, mostly its data wait"
    slow = TrainingProgress(STEPS.first, {**STEPS.last, "slow": text})
    assert shown(replace(CPU, progress=slow), 80)[2] == text


@pytest.mark.parametrize("value", [7, None, ["x"], "", "\x1b[2J\n", "x" * 9999])
def test_slow_reported_by_another_program(value: object) -> None:
    text = TrainingProgress(STEPS.first, {**STEPS.last, "slow": value}).slow
    assert not text or (text.isprintable() and len(text) <= 200)


@pytest.mark.parametrize("width", [80, 120])
def test_a_last_line_that_fits_is_shown_in_full(width: int) -> None:
    one = replace(CPU, nodes=(node(0, last="loss is nan"),), progress=None)
    _, head, row = shown(one, width)
    assert head.split() == ["state", "node", "ranks", "restarts", "age", "last", "line"]
    assert row == "running  gpu-0  0      0         1:02:11  loss is nan"


def test_columns_that_do_not_fit_are_dropped_from_the_right() -> None:
    head = next(line for line in shown(FULL, 65) if line.startswith("state"))
    assert head.split() == ["state", "node", "ranks", "restarts", "age", "GPUs"]
    long = replace(FULL, nodes=(node(0, node="ada@a-rather-long-name.example.org:22"),))
    assert all(len(row) <= 40 for row in shown(long, 40))


@pytest.mark.parametrize("width", [80, 120])
def test_exited_and_unreachable_nodes_show_the_reason(width: int) -> None:
    nodes = (
        node(0, state="exited", exit_code=137, oom_killed=True, restarts=1, restarted=("exit code 1 after 8 s",)),
        NodeStatus("gpu-1", "unreachable", "node gpu-1: does not answer"),
    )
    text = "\n".join(shown(replace(CPU, state="failed", nodes=nodes), width))
    assert "exited       gpu-0  0      1         137 OOM  1:02:11" in text
    assert "unreachable  gpu-1" in text
    assert "gpu-0: restart 1 after exit code 1 after 8 s" in text


@pytest.mark.parametrize("known", [True, False], ids=["recorded", "not recorded"])
def test_of_a_thousand_nodes_the_failed_one_is_shown(known: bool) -> None:
    """All have failed, as each has lost a peer, and most of them in their own way."""
    nodes = [
        node(rank, state="exited", exit_code=1 + rank % 250, age=100.0 + rank % 7, last="") for rank in range(1000)
    ]
    nodes[777] = node(777, state="exited", exit_code=1, age=99.0, last="")
    nodes[:500] = [node(rank, state="exited", exit_code=1, age=100.0, last="") for rank in range(500)]
    result = {"failure": {"node": "gpu-777"}} if known else None
    if not known:
        nodes[500:] = [replace(each, exit_code=1) for each in nodes[500:]]
    seen = RunStatus(CPU.run, "failed", None, tuple(nodes), result)
    rows = shown(seen, 80)
    assert len(rows) < 210
    assert any(" gpu-777 " in row for row in rows)


def test_the_time_of_an_ended_run_is_no_age() -> None:
    head = shown(replace(CPU, state="done", progress=None), 80)[1]
    assert head.split()[:5] == ["state", "node", "ranks", "restarts", "time"]


def test_control_characters_of_a_node_are_not_printed() -> None:
    assert "\x1b" not in "".join(shown(replace(CPU, nodes=(node(0, last="a\x1b[2Jb\x07"),)), 80))


def test_json_contains_the_data_of_the_table() -> None:
    seen = json.loads(json.dumps(FULL.to_dict()))
    assert (seen["progress"]["step"], round(seen["progress"]["eta"])) == (2000, 1302)
    assert seen["nodes"][1]["use"]["gpus"][0]["busy"] == 97
    keys = {"run", "state", "progress", "nodes", "result", "world", "started_by", "stopped_by", "gradients"}
    assert keys | {"variant", "ended_by", "not_started"} == set(seen)


def test_the_way_of_the_gradients_is_one_line() -> None:
    way = "gradients: RoCE on mlx5_0, mlx5_1, GPUDirect"
    assert way in [line.strip() for line in shown(replace(FULL, gradients=way), 80)]


def test_a_gpu_without_memory_of_its_own_shows_the_machines() -> None:
    """nvidia-smi of a GB10: `GPU-1, 96, [N/A], [N/A]`."""
    use = Utilization((GpuUtilization("GPU-1", 96, None, None),), 61 << 30, 122 << 30)
    rows = shown(replace(CPU, nodes=(node(0, gpus=("GPU-1",), use=use),)), 120)
    assert "1: 96 %, 61/122 GiB shared" in rows[-1]


def test_a_rank_that_has_a_terminal_is_not_offered_another() -> None:
    waits = b"start 1\nwaits 0 7 5 a.py:1, breakpoint()\nwaits 1 8 5 a.py:2, breakpoint()\n"
    text = waits + b"taken 1 8 9 a.py:2, breakpoint()\n"
    stopped = node(0, debug=stopped_ranks("gpu-0", text))
    said = [
        f"rank 0 on gpu-0 waits in a.py:1, breakpoint(): launcher debug {CPU.run}",
        "rank 1 on gpu-0 has the terminal of a `launcher debug` since 00:00:09 UTC; stopped in a.py:2, breakpoint()",
    ]
    assert shown(replace(CPU, nodes=(stopped,)), 120)[1:3] == said
    file = io.StringIO()
    Console(file=file, width=160, highlight=False).print(
        render_sweep([replace(CPU, nodes=(stopped,), variant="a")], 160)
    )
    assert f"a: {said[0]}\na: {said[1]}\n" in file.getvalue()
    [rows] = [row["debug"] for row in replace(CPU, nodes=(stopped,)).to_dict()["nodes"]]
    assert [(row["rank"], row["waits"]) for row in rows] == [(0, True), (1, False)]


def test_a_sweep_is_one_table_that_fits() -> None:
    """Also with variants on several nodes, and some that have no run yet."""
    sweep = [replace(CPU, run=f"night-20261128-20000{i}-000{i}", variant=f"lr=0.{i}") for i in range(4)]
    sweep[2] = replace(sweep[2], state="failed", nodes=(node(0, exit_code=0), node(1, exit_code=1, last="boom")))
    cause = {"node": "gpu-1", "what": "exited with code 1: boom"}
    sweep[2] = replace(sweep[2], result={"state": "failed", "failure": cause})
    sweep[3] = replace(sweep[3], nodes=(node(0, restarted=("exited with code 1",)),), stopped_by="me@here")
    file = io.StringIO()
    waiting = RunStatus("", "not started", None, (), None, variant="lr=0.4")
    Console(file=file, width=80, highlight=False).print(render_sweep([*sweep, waiting], 80))
    head, *rows = [line.rstrip() for line in file.getvalue().splitlines()]
    assert head.split()[:6] == ["variant", "state", "run", "nodes", "exit", "step"]
    assert [row.split()[0] for row in rows[:5]] == [f"lr=0.{i}" for i in range(5)]
    assert rows[0].split()[1:] == ["running", sweep[0].run, "gpu-0,", "gpu-1", "2000/15018"]
    assert rows[2].split()[1:6] == ["failed", sweep[2].run, "gpu-0,", "gpu-1", "1"]
    assert rows[4] == "lr=0.4   not started"
    assert rows[5:] == [
        "lr=0.2: failed: gpu-1: exited with code 1: boom",
        "lr=0.3: stopped by me@here",
        "lr=0.3: gpu-0: restart 1 after exited with code 1",
    ]
    assert all(len(row) <= 80 for row in (head, *rows))
