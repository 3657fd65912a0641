"""Which files of an earlier run each node of a new one gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launcher.node.files import Files
from launcher.node.machine import LocalMachine
from launcher.node.process.engine import ProcessEngine
from launcher.node.trees import Entry, NodeClock
from launcher.records.store import NodeOfRun, Record
from launcher.run.begin.inherit import Heir, Share, shares, without_inherited
from launcher.run.saved import Holder, Listing, outputs

HERE = Files(LocalMachine("this machine", ""))


def holder(name: str, rank: int | None, fetched: bool = False, **files: float) -> Holder:
    """files: the time of each; `last_pt` stands for last.pt."""
    entries = {(path := name_.replace("_", ".")): Entry(path, 10, time) for name_, time in files.items()}
    ranks = frozenset() if rank is None else frozenset([rank])
    return Holder(name, "local" if fetched else name, ranks, HERE, f"/{name}", f"/{name}/checkpoints", entries, fetched)


def decide(holders: list[Holder], *nodes: str, elastic: bool = False) -> list[dict[str, str]]:
    """For each new node, the name of the node from which each file comes."""
    heirs = [Heir(node, node, frozenset([rank]), f"/new/{node}") for rank, node in enumerate(nodes)]
    found = shares(holders, heirs, elastic=elastic)
    return [{path: source.name for path, (source, _) in share.files.items()} for share in found]


def share(holders: list[Holder], node: str, rank: int) -> Share:
    return shares(holders, [Heir(node, node, frozenset([rank]), "/new")], elastic=False)[0]


def test_what_rank_0_wrote_is_on_every_node() -> None:
    a = holder("a", 0, last_pt=100)
    assert decide([a, holder("b", 1)], "a", "b", "c") == [{"last.pt": "a"}] * 3


def test_the_newest_set_wins_by_name_and_shards_of_a_rank_are_kept() -> None:
    a, b = holder("a", 0, last_pt=104, best_pt=101), holder("b", 1, last_pt=103, best_pt=103, rank1_pt=103)
    on_a, on_b = decide([a, b], "a", "b")
    assert on_a == {"last.pt": "a", "best.pt": "a"}
    assert on_b == {"last.pt": "a", "best.pt": "a", "rank1.pt": "b"}
    assert share([a, b], "b", 1).replaced == ["last.pt", "best.pt"]
    assert decide([holder("a", 0, last_pt=103), holder("b", 1, last_pt=104)], "a", "b") == [{"last.pt": "b"}] * 2


def test_a_shard_that_was_written_last_does_not_hide_what_rank_0_wrote() -> None:
    a, b = holder("a", 0, last_pt=104, rank0_pt=104), holder("b", 1, last_pt=103, rank1_pt=130)
    for files in decide([a, b], "a", "b"):
        assert files == {"last.pt": "a", "rank0.pt": "a", "rank1.pt": "b"}


def test_a_checkpoint_with_a_new_name_that_only_one_node_has_is_on_every_node() -> None:
    a, b = holder("a", 0, e3_pt=103, e4_pt=104), holder("b", 1, e4_pt=104, e5_pt=105)
    assert all(files["e5.pt"] == "b" for files in decide([a, b], "a", "b"))


def test_a_log_that_was_written_last_decides_nothing() -> None:
    a, b = holder("a", 0, last_pt=104, train_log=104), holder("b", 1, last_pt=103, train_log=200)
    assert all(files == {"last.pt": "a", "train.log": "a"} for files in decide([a, b], "a", "b"))


def test_shards_of_nodes_that_are_neither_first_nor_last_stay_where_they_are() -> None:
    nodes = [holder(str(n), n, **{f"rank{n}_pt": 100 + n}) for n in range(4)]
    found = decide(nodes, "0", "1", "2", "3")
    assert [sorted(files) for files in found] == [
        ["rank0.pt", "rank3.pt"],
        ["rank0.pt", "rank1.pt", "rank3.pt"],
        ["rank0.pt", "rank2.pt", "rank3.pt"],
        ["rank0.pt", "rank3.pt"],
    ]


def test_a_new_machine_gets_the_shards_of_its_ranks() -> None:
    nodes = [holder("a", 0, last_pt=105), holder("b", 1, rank1_pt=100), holder("c", 2, rank2_pt=100)]
    assert decide(nodes, "a", "d", "c")[1] == {"last.pt": "a", "rank1.pt": "b"}
    assert decide(nodes, "a", "c", "b")[1] == {"last.pt": "a", "rank1.pt": "b", "rank2.pt": "c"}


def test_fetched_files_stand_in_for_nodes_that_are_gone() -> None:
    fetched = holder("this machine", 1, fetched=True, last_pt=105, rank1_pt=100)
    found = decide([holder("a", 0, last_pt=105), fetched], "a", "d")
    assert found == [{"last.pt": "a"}, {"last.pt": "a", "rank1.pt": "this machine"}]
    assert decide([fetched], "c", "d") == [{"last.pt": "this machine", "rank1.pt": "this machine"}] * 2


def test_what_the_run_itself_had_inherited_does_not_hide_what_it_wrote() -> None:
    """Both wrote a shard, the second one last; only the first wrote the checkpoint. The run began at 100."""
    a = replace(holder("a", 0, last_pt=104, shard=104, old_pt=90), began=100)
    b = replace(holder("b", 1, last_pt=90, shard=105, old_pt=91), began=100)
    assert [files["last.pt"] for files in decide([a, b], "a", "b")] == ["b", "b"]
    known = without_inherited([a, b])
    assert [files["last.pt"] for files in decide(known, "a", "b")] == ["a", "a"]
    assert [(files["shard"], files["old.pt"]) for files in decide(known, "a", "b")] == [("b", "b")] * 2


def test_curves_stay_where_they_are() -> None:
    a = holder("a", 0, last_pt=104, events_tfevents_1=105)
    assert decide([a], "a", "b") == [{"last.pt": "a", "events.tfevents.1": "a"}, {"last.pt": "a"}]


def test_a_copy_that_a_node_has_already_is_not_sent_to_it() -> None:
    a, b = holder("a", 0, last_pt=104), holder("b", 1, last_pt=104)
    assert decide([a, b], "a", "b", "c") == [{"last.pt": "a"}, {"last.pt": "b"}, {"last.pt": "a"}]


def test_with_min_nodes_every_node_keeps_its_own_and_the_first_gets_the_newest() -> None:
    a, b, c = holder("a", 0, last_pt=100), holder("b", 1, last_pt=104), holder("c", 2, last_pt=150)
    assert decide([a, b], "a", "b", "d", elastic=True) == [{"last.pt": "a"}, {"last.pt": "b"}, {}]
    assert decide([a, b, c], "a", "b", elastic=True) == [{"last.pt": "c"}, {"last.pt": "b"}]


def test_nothing_is_written_through_a_link_of_another_node() -> None:
    a, b = holder("a", 0, last_pt=100), holder("b", 1)
    a.entries["step"] = Entry("step", 1, 100, ".")
    b.entries["step/up"] = Entry("step/up", 4, 100, "../x")
    assert decide([a, b], "a", "b") == [{"last.pt": "a", "step": "a"}] * 2


def test_without_files_nobody_gets_any() -> None:
    assert decide([holder("a", 0)], "a", "b") == [{}, {}]
    only_logs = share([holder("a", 0, train_log=100)], "b", 1)
    assert only_logs.newest is None


def test_a_file_was_not_written_after_now_whatever_its_time_is() -> None:
    """Logs say nothing of a checkpoint, and so nothing of a clock that was wrong."""
    late = replace(holder("a", 0, last_pt=5000, train_log=5000, old_pt=900), clock=NodeClock(read=1000.0))
    assert late.written(late.entries["last.pt"]) == 1000
    assert late.written(late.entries["old.pt"]) == 900
    assert late.of_the_future == ["last.pt"]


def test_hidden_checkpoints_and_generations_are_not_what_a_run_left(tmp_path: Path) -> None:
    run = "job-20260101-000000-aaaa"
    node = NodeOfRun("a", "local", 0, f"launcher-{run}-0", f"/h/.launcher/{run}", range(1))
    record = Record.rebuild(run, "process", [node], tmp_path)
    paths = ("checkpoints/last.pt", "checkpoints/.of-the-launcher", "generations/0001-0/best.pt", "made.csv")
    files = [Entry(path, 10, 100) for path in paths]
    [found, _] = outputs([Listing(ProcessEngine("a"), node.output, files, NodeClock())], record)
    assert [*found.entries] == ["checkpoints/last.pt", "made.csv"]
