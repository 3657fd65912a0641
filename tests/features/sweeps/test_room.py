"""Pools: their form in the job file, and the machines of the next variant."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.api.jobs import load, plan
from launcher.errors import JobInvalid
from launcher.features.sweeps.pool import Placement, Pool, no_room, room
from launcher.job.loader import parse_job
from launcher.job.models import Job
from launcher.job.overrides import expand_sweep, on_nodes
from launcher.model.facts import Gpu
from launcher.node.facts import parse
from launcher.planning.offline import _node
from tests.nvidia import MISMATCH, Machine, cards

HEAD = "name: job\nimage: {ref: img}\nrun: {module: train}\n"


def job(text: str, *sets: str, nodes: list[str] | None = None) -> Job:
    return parse_job(HEAD + text, sets=sets, nodes=nodes)


def test_a_pool_has_machines_and_their_number_per_variant() -> None:
    found = job("nodes: {pool: [a, b, c, d], each: 2}\nsweep: [{lr: 1}, {lr: 2}]\nlost_after: 1m\n")
    assert ([node.name for node in found.nodes], found.each, found.lost_after) == (["a", "b", "c", "d"], 2, 60)
    assert [[node.name for node in one.nodes] for one in expand_sweep(found)] == [["a", "b"]] * 2
    assert job("nodes: {pool: [a, b]}\nsweep: [{lr: 1}]\n").each == 1
    placed = on_nodes(expand_sweep(found)[1], found.nodes[2:], 29507)
    assert ([node.name for node in placed.nodes], placed.port, placed.each) == (["c", "d"], 29507, None)


def test_machines_and_number_can_be_overridden() -> None:
    text = "nodes: {pool: [a, {host: b, gpus: 2}], each: 1}\nsweep: [{lr: 1}]\n"
    found = job(text, "nodes.each=2", nodes=["b", "e", "f"])
    assert ([node.host for node in found.nodes], found.nodes[0].gpus, found.each) == (["b", "e", "f"], 2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: {pool: [a, b]}\n", "4: nodes: a pool requires a sweep"),
        ("nodes: {pool: [a, b], each: 3}\nsweep: [{lr: 1}]\n", "4: each: the pool has only 2 nodes"),
        ("nodes: {pool: [a], each: 0}\nsweep: [{lr: 1}]\n", "4: each: expected a number of nodes from 1"),
        ("nodes: {pool: [a], of: 1}\nsweep: [{lr: 1}]\n", "4: nodes.of: unknown key; expected one of pool, each"),
        ("nodes:\n  pool:\n    - a\n    - {hots: b}\nsweep: [{lr: 1}]\n", "7: nodes.1.hots: unknown key"),
        ("nodes: {pool: [a, a]}\nsweep: [{lr: 1}]\n", "4: nodes.1: a is already listed as entry 0"),
        ("nodes: {pool: [a, b]}\nsweep: [{lr: 1}]\nmin_nodes: 1\n", "remove min_nodes and spares"),
        ("nodes: [a]\nlost_after: 1m\n", "5: lost_after: requires min_nodes"),
        ("nodes: [a]\nsweep: {grid: {lr: 1}}\n", "5: sweep.grid.lr: expected a list of values, not 1"),
        ("nodes: [a]\nsweep: {grid: {}}\n", "5: sweep.grid: expected a mapping of options"),
        ("nodes: [a]\nsweep: {grid: {a: [{b: 1}]}}\n", "5: sweep"),
        ("nodes: [a]\nsweep:\n  grid:\n    lr: [1, 0.1,\n      0.1]\n", "8: sweep.grid.lr.2: 0.1 is listed twice"),
        ("nodes: [a]\nsweep:\n- {lr: 1}\n- {lr: '1'}\n", "7: sweep.1: lr=1 is already listed as entry 0: remove one"),
        ("nodes: [a]\nsweep: {grid: {a: [true, 'true']}}\n", "5: sweep.1: a=true is already listed"),
        ("nodes: {pool: [a]}\nsweep: {grid: {lr: []}}\n", "job.yaml:5: sweep.grid.lr: an empty list; expected at"),
    ],
)
def test_mistakes_in_a_pool_or_a_grid_are_reported(text: str, message: str) -> None:
    with pytest.raises(JobInvalid) as refused:
        job(text)
    assert message in str(refused.value)


def test_a_grid_is_every_combination() -> None:
    found = job("nodes: [a]\nsweep: {grid: {lr: [0.10, 0.4], batch_size: [128, 256], amp: [true]}}\n")
    assert [tuple(variant.values()) for variant in found.sweep] == [
        (lr, size, True) for lr in ("0.10", "0.4") for size in ("128", "256")
    ]


def test_a_plan_is_that_of_one_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {"name": "job", "image": {"ref": "img"}, "run": {"command": ["true"]}, "sweep": [{"lr": 1}]}
    made = plan({**keys, "nodes": {"pool": ["a", "b", "c"], "each": 2}}, offline=True)
    assert [node.node for node in made.nodes] == ["a", "b"]
    assert load({**keys, "nodes": {"pool": ["a"]}}).each == 1


@given(
    rooms=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 3), min_size=1),
    each=st.integers(1, 3),
    steps=st.lists(st.integers(-1, 5), max_size=40),
    away=st.sets(st.sampled_from("abcdef")),
)
def test_machines_never_get_more_variants_than_fit(
    rooms: dict[str, int], each: int, steps: list[int], away: set[str]
) -> None:
    """A step takes (-1) or releases the placement with that index."""
    pool, taken = Pool(rooms, each, 29500), list[Placement]()
    for step in steps:
        if step >= 0:
            if step < len(taken):
                pool.release(taken.pop(step))
            continue
        load = {node: sum(node in placement.nodes for placement in taken) for node in rooms}
        free = [node for node in rooms if load[node] < rooms[node] and node not in away]
        placement = pool.take(away)
        assert (placement is not None) == (len(free) >= each)
        if placement is not None:
            assert set(placement.nodes) <= set(free)
            assert len(set(placement.nodes)) == each
            assert max(load[node] for node in placement.nodes) <= min(
                (load[node] for node in free if node not in placement.nodes), default=10
            )
            assert placement.port not in {other.port for other in taken}
            taken.append(placement)


def test_a_port_that_was_in_use_is_not_retried_immediately() -> None:
    pool = Pool({"a": 1}, 1, 29500)
    ports = []
    for _ in range(3):
        placement = pool.take()
        assert placement is not None
        ports.append(placement.port)
        pool.release(placement)
    assert ports == [29500, 29501, 29502]


def test_a_port_on_which_another_program_listens_is_skipped() -> None:
    placement = Pool({"a": 1}, 1, 29500, {29500, 29501}).take()
    assert placement is not None
    assert placement.port == 29502


def test_a_variant_waits_if_no_port_is_left() -> None:
    pool = Pool({"a": 2}, 1, 65535)
    first = pool.take()
    assert first is not None
    assert pool.take() is None
    pool.release(first)
    assert pool.take() == first


def test_room_depends_on_gpus_if_a_number_is_requested() -> None:
    without = _node(job("nodes: [a]\ngpus: none\n"), 0)
    eight = dataclasses.replace(without, gpus=tuple(Gpu(i, f"GPU-{i}", "", 0, "") for i in range(8)))
    wanted = [("2", 4), ("3", 2), ("none", 1), ("all", 1), ("[0, 1]", 1)]
    for gpus, expected in wanted:
        found = job(f"nodes: {{pool: [a]}}\nsweep: [{{lr: 1}}]\ngpus: {gpus}\n")
        assert room(found, found.nodes[0], eight) == expected
    two = job("nodes: {pool: [a]}\nsweep: [{lr: 1}]\ngpus: 2\n")
    assert room(two, two.nodes[0], without) == 0


def test_a_machine_without_usable_gpus_is_excluded_with_the_reason() -> None:
    seen = parse(Machine(cards(2), MISMATCH).output().encode()).node
    two = job("nodes: {pool: [a, b]}\nsweep: [{lr: 1}]\ngpus: 2\n")
    broken = dataclasses.replace(_node(two, 0), gpus=seen.gpus, nvidia=seen.nvidia)
    assert room(two, two.nodes[0], broken) == 0
    error = no_room(two, two.nodes[0], broken)
    assert "Driver/library version mismatch" in error.what
    assert "reboot the node" in error.next_step
    every = job("nodes: {pool: [a, b]}\nsweep: [{lr: 1}]\ngpus: all\n")
    without = dataclasses.replace(_node(every, 0), gpus=())
    assert room(every, every.nodes[0], without, others=True) == 0  # it would train on CPUs
    assert "it has no GPU, but other nodes of the job do" in no_room(every, every.nodes[0], without).what
    assert room(every, every.nodes[0], without) == 1
    assert room(every, every.nodes[0], broken, others=True) == 1  # the start reports it; retried
