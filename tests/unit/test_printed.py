"""Which files the selected output of a run is in: of which nodes and ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.errors import NodesFailed, NodeUnreachable, UsageError
from launcher.node.connect import Fleet
from launcher.node.process.engine import ProcessEngine
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, Record
from launcher.run.locate import Attached
from launcher.run.printed import find_output, node_of_rank
from launcher.run.selection import Selection

AWAY = NodeUnreachable("node a", "does not answer")
NAMES = ("a", "b", "c")
RUN = "job-20260101-000000-aaaa"


def output(folder: Path, name: str) -> str:
    return f"{folder}/{name}/.launcher/{RUN}"


def attached(folder: Path, *, workers: int = 2, min_nodes: int = 0, names: tuple[str, ...] = NAMES) -> Attached:
    """Return a run with these nodes, each with so many workers; their output is below the folder."""
    nodes = tuple(
        NodeOfRun(name, f"host-{name}", rank, f"launcher-{RUN}-{rank}", output(folder, name), ranks)
        for rank, name in enumerate(names)
        for ranks in [range(workers * rank, workers * (rank + 1))]
    )
    record = Record.rebuild(RUN, "process", nodes, folder / "runs", min_nodes=min_nodes)
    engines = {name: ProcessEngine(name) for name in names}
    return Attached(record, nodes, engines, Fleet([*engines.values()], {}, None))


def without(run: Attached, name: str) -> Attached:
    """The same if this node does not answer."""
    return replace(run, nodes=tuple(node for node in run.nodes if node.name != name), unreachable={name: AWAY})


def in_generation(run: Attached, folder: Path, number: int, *members: str) -> Attached:
    """The same, after these nodes have begun a generation."""
    for name in members:
        attempts = Path(NodePaths(output(folder, name), name).attempts)
        attempts.parent.mkdir(parents=True, exist_ok=True)
        with attempts.open("a") as file:
            file.write(f"generation {number} 7 {','.join(members)} rank 0 is on {members[0]}\n")
    return run


def shown(run: Attached, chosen: Selection) -> list[tuple[str, str]]:
    """The nodes, and the paths in their output folders."""
    parts = find_output(run, chosen).now
    return [(part.node.name, str(Path(part.path).relative_to(part.node.output))) for part in parts]


def test_by_default_the_first_nodes_output_is_shown_or_that_of_a_node_or_of_all(tmp_path: Path) -> None:
    run = attached(tmp_path)
    logs = [(name, f"logs/{name}.log") for name in NAMES]
    assert shown(run, Selection()) == logs[:1]
    assert shown(run, Selection(all_nodes=True)) == logs
    assert shown(run, Selection(node="b")) == shown(run, Selection(node="host-b")) == [logs[1]]
    with pytest.raises(UsageError, match="d: the run's nodes are a, b, c"):
        shown(run, Selection(node="d"))


def test_a_rank_is_on_the_node_that_has_it(tmp_path: Path) -> None:
    run = attached(tmp_path)
    assert [node_of_rank(run, rank).name for rank in range(6)] == ["a", "a", "b", "b", "c", "c"]
    assert shown(run, Selection(rank=3)) == [("b", "logs/rank-3.log")]


@pytest.mark.parametrize(
    ("workers", "names", "has"), [(2, NAMES, "ranks 0 to 5"), (2, ("a",), "ranks 0 to 1"), (1, ("a",), "only rank 0")]
)
def test_a_rank_that_no_node_has(workers: int, names: tuple[str, ...], has: str, tmp_path: Path) -> None:
    run, rank = attached(tmp_path, workers=workers, names=names), workers * len(names)
    for missing in (rank, -1):
        with pytest.raises(UsageError, match=f"--rank: {missing}: the run has {has}\n  -> `launcher status` lists"):
            node_of_rank(run, missing)


def test_an_unreachable_node_may_have_what_is_not_found(tmp_path: Path) -> None:
    run = without(attached(tmp_path), "a")
    assert node_of_rank(run, 2).name == "b"
    assert [name for name, _ in shown(run, Selection(all_nodes=True))] == ["b", "c"]
    assert shown(run, Selection(node="c")) == [("c", "logs/c.log")]
    for chosen in (Selection(), Selection(rank=0), Selection(rank=6)):
        with pytest.raises(NodesFailed, match="node a: does not answer"):
            shown(run, chosen)
    with pytest.raises(NodeUnreachable):
        shown(run, Selection(node="a"))
    assert shown(without(attached(tmp_path), "c"), Selection()) == [("a", "logs/a.log")]


def test_before_the_first_generation_ranks_are_where_they_were_planned(tmp_path: Path) -> None:
    run = attached(tmp_path, min_nodes=2)
    assert node_of_rank(run, 5).name == "c"
    with pytest.raises(UsageError, match="6: the run has ranks 0 to 5\n"):
        node_of_rank(run, 6)


def test_in_a_job_with_min_nodes_ranks_are_where_the_newest_generation_has_them(tmp_path: Path) -> None:
    run = in_generation(attached(tmp_path, min_nodes=1), tmp_path, 1, "a", "b", "c")
    in_generation(run, tmp_path, 2, "c", "b")
    assert [node_of_rank(run, rank).name for rank in range(4)] == ["c", "c", "b", "b"]
    assert shown(run, Selection(rank=3)) == [("b", "generations/0002-1/rank-3.log")]
    assert shown(run, Selection()) == [("c", "logs/c.log")]
    for missing in (4, 6):
        with pytest.raises(UsageError, match=f"--rank: {missing}: the run has ranks 0 to 3 now\n"):
            node_of_rank(run, missing)
    assert shown(run, Selection(rank=0)) == [("c", "generations/0002-0/rank-0.log")]
    assert shown(run, Selection(node="b")) == [("b", "logs/b.log")]
    assert len(shown(run, Selection(all_nodes=True))) == 3
    with pytest.raises(NodeUnreachable):
        node_of_rank(without(run, "b"), 2)


def test_the_output_of_rank_0_is_that_of_all_nodes_that_had_it(tmp_path: Path) -> None:
    run = in_generation(attached(tmp_path, min_nodes=1), tmp_path, 1, "a", "b", "c")
    in_generation(run, tmp_path, 2, "c", "b")
    parts = find_output(run, Selection())
    assert [(part.node.name, part.offset, part.moves) for part in parts.now] == [("c", 7, True)]
    assert [(part.node.name, part.start, part.stop) for part in parts.earlier] == [("a", 0, None)]
    away = find_output(without(run, "c"), Selection())  # it was the last one that had rank 0
    assert [(part.node.name, part.moves) for part in away.now] == [("a", True)]
    assert [part.node.name for part in away.earlier] == ["a", "c"]
    log = Path(NodePaths(str(run.record.paths.root), "a").log)
    log.write_text("known\n")
    assert find_output(without(run, "c"), Selection()).now[0].offset == log.stat().st_size  # it is shown as earlier


def test_output_of_a_command_is_not_known_by_rank(tmp_path: Path) -> None:
    run = attached(tmp_path)
    run.record.paths.job.write_text("name: job\nruntime: process\nnodes: [local]\nrun: {command: [echo]}\n")
    with pytest.raises(UsageError, match=r"--rank: 1: run\.command starts its own processes"):
        find_output(run, Selection(rank=1))
    assert len(shown(run, Selection(all_nodes=True))) == 3


def test_a_job_without_min_nodes_has_no_generations(tmp_path: Path) -> None:
    run = in_generation(attached(tmp_path), tmp_path, 1, "c", "b")
    assert node_of_rank(run, 0).name == "a"
    assert shown(run, Selection()) == [("a", "logs/a.log")]


@pytest.mark.parametrize("workers", [1, 0])  # 0: a label may say so
def test_a_node_has_at_least_one_rank(workers: int, tmp_path: Path) -> None:
    run = in_generation(attached(tmp_path, workers=workers, min_nodes=1), tmp_path, 3, "b")
    assert node_of_rank(run, 0).name == "b"
    with pytest.raises(UsageError, match="1: the run has only rank 0 now"):
        node_of_rank(run, 1)
