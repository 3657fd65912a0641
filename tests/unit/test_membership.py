"""Whether the ranks of a run trained together, from what flight_recorder.py noted on each node. Pure."""

from __future__ import annotations

import pytest

from launcher.records.store import NodeOfRun
from launcher.run.membership import apart, curve_writers, parse, together

NODES = [NodeOfRun(name, rank, name, f"c{rank}", "/o", range(2 * rank, 2 * rank + 2)) for rank, name in enumerate("ab")]
ALONE = "no rank joined a process group: each of the 4 ranks worked alone"
WATCHED = {"a": b"watched 0 50\nwatched 1 50\n", "b": b"watched 2 50\nwatched 3 50\n"}


def noted(**more: bytes) -> dict[str, bytes]:
    return {name: text + more.get(name, b"") for name, text in WATCHED.items()}


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (noted(), ALONE),
        (noted(a=b"group 0 4 51\ngroup 1 4 51\n", b=b"group 2 4 51\ngroup 3 4 51\n"), ""),
        (noted(a=b"group 0 4 51\n"), ""),  # the other ranks may have been killed at their end
        (
            noted(a=b"group 0 2 51\ngroup 1 2 51\n", b=b"group 2 2 51\ngroup 3 2 51\n"),
            "no process group had all 4 ranks, the largest had 2: they trained separately",
        ),
        (
            noted(a=b"group 0 1 51\n", b=b"group 2 1 51\n"),
            "no process group had all 4 ranks, the largest had 1: they trained separately",
        ),
        (noted(b=b"inner 2 8 51\n"), ""),  # the processes that the ranks started
        (noted(b=b"inner 2 0 51\n"), ""),  # another library
        ({"a": WATCHED["a"]}, ""),  # nothing is known of b
        ({"a": WATCHED["a"], "b": b"watched 2 50\n"}, ""),  # rank 3 never imported torch, or an older one
        ({"a": b"", "b": b""}, ""),
        (noted(a=b"group 0 4 9\n"), ALONE),  # in an earlier attempt
        (noted(a=b"group 0 4\ngroup x 4 51\n 'group 0 4 51'\n"), ALONE),  # what a program may write there
    ],
)
def test_ranks_that_did_not_train_together_are_told(texts: dict[str, bytes], says: str) -> None:
    assert apart(NODES, {name: parse(text, 50.0) for name, text in texts.items()}) == says


def test_one_rank_is_never_alone() -> None:
    assert apart([NodeOfRun("a", 0, "a", "c", "/o", range(1))], {"a": parse(b"watched 0 50\n")}) == ""


@pytest.mark.parametrize(
    ("texts", "least", "known"),
    [
        (noted(), 0, False),
        (noted(a=b"group 0 4 51\n"), 0, False),  # b's ranks may still start
        (noted(a=b"group 0 4 51\n", b=b"group 3 4 52\n"), 0, True),
        (noted(a=b"group 0 2 51\n", b=b"group 3 2 52\n"), 0, False),  # each node by itself
        (noted(a=b"group 0 4 51\n"), 1, True),  # the other one is a spare
    ],
)
def test_the_nodes_are_connected_once_their_ranks_are_in_a_larger_group(
    texts: dict[str, bytes], least: int, known: bool
) -> None:
    assert together(NODES, {name: parse(text) for name, text in texts.items()}, least) is known


@pytest.mark.parametrize(
    ("names", "writers"),
    [
        (["100.gpu-a.41.0", "101.gpu-a.41.1"], 1),  # one process, two files
        (["100.gpu-a.41.0", "101.gpu-a.42.0"], 2),
        (["100.gpu-a.41.0", "101.gpu-b.41.0.suffix"], 2),
        (["99.gpu-a.41.0", "101.gpu-a.42.0"], 1),  # of an earlier attempt
        (["0.launcher", "x.gpu-a.41.0", "100.gpu-a"], 0),
    ],
)
def test_processes_that_write_curves_are_told_by_the_names_of_their_files(names: list[str], writers: int) -> None:
    assert curve_writers((f"events.out.tfevents.{name}" for name in names), 100.0) == writers
