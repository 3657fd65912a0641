"""The report of what the ranks of a hung run wait for, and flight recorder dumps in the format of torch's analyser."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from launcher.hangs import container_scripts
from launcher.hangs.report import describe

NODES = {0: "gpu-a", 1: "gpu-b", 2: "gpu-c"}
REPORT = runpy.run_path(str(Path(container_scripts.__file__).with_name("flight_report.py")))


def collective(name: str, number: int, size: int, **more: Any) -> dict[str, Any]:
    found = {
        "group": "default_pg",
        "number": number,
        "collective": name,
        "sizes": [[size]],
    }
    return {**found, "ranks": [0, 1, 2], "missing": [], "other": {}, **more}


def report(**more: Any) -> dict[str, Any]:
    return {"problems": [], "waiting": [], "silent": [], "stands": {}, "error": "", **more}


def test_a_missing_rank_is_reported_with_its_position() -> None:
    problem = collective("all_reduce", 5, 10, missing=[1])
    assert describe(report(problems=[problem], stands={"1": "a.py:3 in load"}), NODES) == [
        "the others wait for rank 1 on gpu-b at all_reduce number 5, sizes [10]; rank 1 is at a.py:3 in load"
    ]


@pytest.mark.parametrize(("odd", "even"), [([1], [0, 2]), ([0], [1, 2])])
def test_the_smallest_group_comes_first(odd: list[int], even: list[int]) -> None:
    mine, others = (collective("broadcast", 5, 1), collective("all_reduce", 5, 10))
    first, second = (mine, others) if 0 in odd else (others, mine)
    problem = {**first, "other": {str(rank): second for rank in (even if 0 in odd else odd)}}
    ranks = ", ".join(f"rank {rank} on {NODES[rank]}" for rank in even)
    assert describe(report(problems=[problem]), NODES) == [
        f"rank {odd[0]} on {NODES[odd[0]]} called broadcast number 5, sizes [1], {ranks} called all_reduce number 5, "
        "sizes [10]"
    ]


def test_ranks_without_a_dump_are_reported() -> None:
    last = collective("barrier", 9, 1, group="tp", sizes=[], ranks=[0, 1])
    assert describe(report(waiting=[last], silent=[2]), NODES) == [
        "rank 0 on gpu-a, rank 1 on gpu-b called barrier number 9 of the group tp, sizes none",
        "rank 2 on gpu-c left no flight recorder dump",
    ]


@pytest.mark.parametrize(
    "broken", [{}, {"problems": 3}, report(problems=[{}]), report(waiting=[[1]]), report(silent=["x"])]
)
def test_an_invalid_report_causes_no_error(broken: dict[str, Any]) -> None:
    assert describe(broken, NODES) == ["its flight recorder report could not be parsed"]


def entry(record: int, number: int, name: str = "all_reduce", **more: Any) -> dict[str, Any]:
    sizes = {"input_sizes": [[4]], "output_sizes": [[4]], "output_dtypes": ["Float"]}
    fields = {"record_id": record, "collective_seq_id": number, "process_group": ("0", "default_pg"), "is_p2p": False}
    return {**fields, "profiling_name": f"gloo:{name}", **sizes, **more}


def dump(rank: int, *entries: dict[str, Any]) -> dict[str, Any]:
    return {"rank": rank, "entries": [*entries], "pg_config": {"0": {"desc": "default_pg", "ranks": "[0, 1, 2]"}}}


def test_entries_dropped_from_a_full_buffer_are_not_reported_as_missing() -> None:
    sent = entry(8, 5, "send", is_p2p=True)
    dumps = {
        "gloo_0": dump(0, entry(7, 5), sent, entry(9, 6)),
        "gloo_1": dump(1, entry(3, 4), entry(4, 5), entry(5, 6)),
    }
    assert REPORT["prepare"](dumps, gloo=True) == [2]
    for one in dumps.values():
        assert [(e["record_id"], e["collective_seq_id"]) for e in one["entries"]] == [(0, 5), (1, 6)]
        assert one["pg_config"]["0"]["ranks"] == "[0, 1]"


def test_the_tensors_of_gloos_all_gather_are_merged_for_the_analyser() -> None:
    pieces = {"output_sizes": [[4], [4], [4]], "output_dtypes": ["Float"] * 3}
    dumps = {"gloo_0": dump(0, entry(0, 1, "all_gather", **pieces))}
    REPORT["prepare"](dumps, gloo=True)
    found = dumps["gloo_0"]["entries"][0]
    assert (found["output_sizes"], found["output_dtypes"]) == ([[3, 4]], ["Float"])


def test_the_position_of_a_rank_is_in_its_own_code() -> None:
    stack = """Thread 0x01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Thread 0x02 (most recent call first):
  File "/opt/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 5 in get
  File "/workspace/code/train.py", line 7 in read_batch
  File "/workspace/code/train.py", line 30 in <module>
"""
    assert REPORT["position"](stack) == "train.py:7 in read_batch"
    assert REPORT["position"]("") == ""
