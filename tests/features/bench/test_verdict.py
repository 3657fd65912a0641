"""Detection of slow components: the rounds of a benchmark and the evaluation of its measurements."""

from __future__ import annotations

import io
import itertools
import json

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launcher.features.bench.health import links, outliers
from launcher.features.bench.health.measures import MARK, Measure, NodeReport, read
from launcher.features.bench.health.problem import HealthProblem
from launcher.features.bench.health.rounds import MOST_ROUNDS, minutes_needed, rounds, timetable
from launcher.features.bench.health.verdict import Finding, Network, judge
from launcher.features.bench.run import BenchResult
from launcher.features.bench.table import WIDTH, table

A100 = "NVIDIA A100-SXM4-80GB"
NODES = tuple("abcdefgh")
NETWORK = Network(dict.fromkeys(NODES, "eth0"))


def reports_of(*measures: Measure) -> list[NodeReport]:
    nodes = dict.fromkeys(measure.node for measure in measures)
    return [NodeReport(node, tuple(m for m in measures if m.node == node), (), (), "end", ()) for node in nodes]


def gpu(node: str, index: int, value: float, of: str = "NVIDIA H100 80GB HBM3") -> Measure:
    return Measure(node, "matmul", f"GPU {index}", value, "TFLOP/s", of, precision="bf16")


def processor(node: str, value: float) -> Measure:
    return Measure(node, "matmul", "processor", value, "GFLOP/s", "8 threads")


def pairs(nodes: str, speed: dict[tuple[str, str], float], again: float = 0.0) -> list[Measure]:
    """All pairs at 10 Gb/s except these."""
    return [
        Measure(
            one, "bandwidth", "", speed.get((one, other), 10.0), "Gb/s", to=other, again=again * ((one, other) in speed)
        )
        for one, other in itertools.permutations(nodes, 2)
    ]


def sending(node: str, nodes: str, value: float) -> dict[tuple[str, str], float]:
    return {(node, other): value for other in nodes if other != node}


def receiving(node: str, nodes: str, value: float) -> dict[tuple[str, str], float]:
    return {(other, node): value for other in nodes if other != node}


def verdict(measures: list[Measure], *problems: HealthProblem) -> list[Finding]:
    return judge(reports_of(*measures), problems, NETWORK, {})


@given(st.integers(1, 40))
def test_rounds_are_disjoint_and_pairs_are_unique(nodes: int) -> None:
    found = rounds(nodes)
    for pairs_of_round in found:
        ranks = [rank for pair in pairs_of_round for rank in pair]
        assert len(ranks) == len(set(ranks))
        assert all(0 <= low < high < nodes for low, high in pairs_of_round)
    every = [pair for pairs_of_round in found for pair in pairs_of_round]
    assert len(every) == len(set(every))
    if nodes <= MOST_ROUNDS + 1:
        assert len(found) == nodes - 1 + nodes % 2 if nodes > 1 else not every
        assert len(every) == nodes * (nodes - 1) // 2
    else:
        assert len(found) == MOST_ROUNDS
        seen = [sum(rank in pair for pair in every) for rank in range(nodes)]
        assert min(seen) >= MOST_ROUNDS - 1


@given(st.floats(0, 3600), st.integers(0, MOST_ROUNDS), st.booleans(), st.booleans())
def test_the_timetable_respects_the_duration_if_it_is_sufficient(
    seconds: float, turns: int, gpus: bool, reads: bool
) -> None:
    enough = 60 * minutes_needed(turns, gpus=gpus, reads=reads)
    assert timetable(enough, turns, gpus=gpus, reads=reads).total(turns) <= enough * 1.0001
    found = timetable(seconds, turns, gpus=gpus, reads=reads)
    least = timetable(0, turns, gpus=gpus, reads=reads).total(turns)
    assert found.total(turns) <= max(seconds, max(seconds / 4, 20) + least - 20) + 1e-6
    assert found.join == max(20, seconds / 4), "for the start of the containers and the import of torch"
    assert found.local > 0
    assert (found.pair > 0) == (found.together > 0) == (turns > 0)
    assert (found.read > 0) == reads


def test_a_slow_gpu_is_reported_with_its_cause_and_fix() -> None:
    measures = [gpu(node, index, 301.0 + index, A100) for node in "abc" for index in range(4)]
    measures[-1] = gpu("c", 3, 212.0, A100)
    problem = HealthProblem("c", "GPU 3", "throttled, software thermal slowdown", "check its cooling")
    elsewhere = HealthProblem("a", "GPU 1", "PCIe 8x of 16x", "reseat it")
    found = verdict(measures, problem, elsewhere)
    assert [each.line for each in found] == [
        "c GPU 3: 212 TFLOP/s, others 302 (0.70): throttled, software thermal slowdown; check its cooling",
        "a GPU 1: PCIe 8x of 16x; reseat it",
    ]


@given(
    st.integers(3, 8),
    st.integers(0, 7),
    st.lists(st.floats(0.97, 1.03), min_size=8, max_size=8),
    st.floats(0.1, 0.5),
)
def test_only_the_slow_processor_is_reported(nodes: int, index: int, noise: list[float], share: float) -> None:
    names, slow = NODES[:nodes], NODES[index % nodes]
    measures = [processor(node, 100 * noise[i] * (share if node == slow else 1)) for i, node in enumerate(names)]
    assert [each.nodes for each in verdict(measures)] == [(slow,)]
    assert verdict([processor(node, 100 * noise[i]) for i, node in enumerate(names)]) == []


@given(st.integers(2, 8), st.data())
def test_values_within_the_factor_are_not_reported(nodes: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.floats(1, 1.29), min_size=nodes, max_size=nodes))
    assert outliers.slow(dict(enumerate(values))) == []
    assert verdict([processor(node, value) for node, value in zip(NODES, values, strict=False)]) == []


def test_widely_scattered_values_are_not_reported() -> None:
    assert outliers.slow(dict(enumerate([60.0, 100.0, 140.0, 180.0]))) == []


def test_of_two_nodes_neither_is_blamed_unless_one_reaches_its_peak() -> None:
    (found,) = verdict([processor("a", 100.0), processor("b", 50.0)])
    assert found.nodes == ("b", "a")
    assert "50.0 GFLOP/s on b, 100 on a (0.50)" in found.line
    assert "not enough to identify" in found.line
    assert not BenchResult(("a", "b"), findings=(found,)).faulty
    (cause,) = verdict(
        [processor("a", 100.0), processor("b", 50.0)], HealthProblem("b", "processor", "throttled", "cool it")
    )
    assert BenchResult(("a", "b"), findings=(cause,)).faulty
    assert cause.line.endswith("(0.50): throttled; cool it")
    (direction,) = verdict(pairs("ab", {("a", "b"): 1.0}))
    assert (direction.nodes, direction.undecided) == (("a", "b"), True)
    (blamed,) = verdict([gpu("a", 0, 700.0), gpu("b", 0, 300.0)])
    assert blamed.nodes == ("b",)
    assert "data sheet 989" in blamed.line
    assert verdict([processor("a", 100.0), processor("b", 80.0)]) == []


def test_a_uniformly_slow_cluster_is_compared_with_the_data_sheet() -> None:
    (found,) = verdict([gpu(node, 0, 300.0) for node in "abcd"])
    assert found.nodes == ("all",)
    assert "0.30" in found.line
    assert verdict([gpu(node, 0, 300.0, "A card of tomorrow") for node in "abcd"]) == []


@given(st.integers(3, 8), st.integers(0, 7), st.floats(0.5, 5.0), st.sampled_from(["sends", "receives"]))
def test_a_node_with_only_slow_pairs_is_blamed_with_the_direction(
    nodes: int, index: int, value: float, way: str
) -> None:
    names = "".join(NODES[:nodes])
    slow = names[index % nodes]
    speeds = (sending if way == "sends" else receiving)(slow, names, value)
    (found,) = verdict(pairs(names, speeds))
    assert (found.nodes, found.kinds, found.part) == ((slow,), (way,), "link eth0")


@given(st.integers(3, 8), st.integers(0, 7), st.floats(0.5, 5.0))
def test_a_link_that_is_slow_in_both_directions_is_attributed_to_one_node(nodes: int, index: int, value: float) -> None:
    names = "".join(NODES[:nodes])
    slow = names[index % nodes]
    found = verdict(pairs(names, sending(slow, names, value) | receiving(slow, names, value)))
    assert {each.nodes for each in found} == {(slow,)}
    assert {kind for each in found for kind in each.kinds} == {"sends", "receives"}


def test_one_slow_pair_is_attributed_to_the_pair() -> None:
    (found,) = verdict(pairs("abcdef", {("b", "e"): 3.0}))
    assert found.nodes == ("b", "e")
    assert found.line.startswith("b -> e link: 3.00 Gb/s, other pairs 10.0 (0.30)")
    (found,) = verdict(pairs("ab", {("b", "a"): 3.0}))
    assert found.line.startswith("b -> a link: 3.00 Gb/s, other direction 10.0 (0.30)")


def test_two_slow_nodes_are_two_findings() -> None:
    speeds = sending("b", "abcdefgh", 4.0) | receiving("g", "abcdefgh", 3.0)
    assert {(each.nodes, each.kinds) for each in verdict(pairs("abcdefgh", speeds))} == {
        (("b",), ("sends",)),
        (("g",), ("receives",)),
    }


def test_packet_loss_is_the_cause_of_a_slow_link() -> None:
    (found,) = verdict(pairs("abcd", receiving("c", "abcd", 2.0), again=0.08))
    assert found.nodes == ("c",)
    assert "packet loss, 8 % of the TCP segments were retransmitted" in found.line


def test_packet_loss_is_reported_even_if_the_link_is_hardly_slower() -> None:
    (found,) = verdict(pairs("abcd", receiving("c", "abcd", 8.0), again=0.05))
    assert found.line.startswith("c link eth0: receives 8.00 Gb/s, others 10.0 (0.80): packet loss, 5 %")
    (found,) = verdict(pairs("ab", {("b", "a"): 8.0}, again=0.05))
    assert found.nodes == ("b", "a")
    (found,) = verdict(pairs("abcd", dict.fromkeys(itertools.permutations("abcd", 2), 9.0), again=0.05))
    assert found.nodes == ("all",)
    assert verdict(pairs("abcd", receiving("c", "abcd", 9.0), again=0.01)) == []


def test_a_link_problem_reported_by_the_machine_is_the_cause() -> None:
    problem = HealthProblem("c", "link eth0", "its speed is 1 Gb/s, that of the others 10", "check the cable")
    found = verdict(pairs("abcd", sending("c", "abcd", 1.0) | receiving("c", "abcd", 1.0)), problem)
    assert all("its speed is 1 Gb/s" in each.line for each in found)
    assert len(found) == 2


def test_two_nodes_on_a_link_far_below_its_negotiated_speed() -> None:
    network = Network({"a": "eth0", "b": "eth0"}, {"a": 10.0, "b": 10.0})
    (found,) = judge(reports_of(*pairs("ab", {("a", "b"): 0.9, ("b", "a"): 0.95})), (), network, {})
    assert found.nodes == ("all",)
    assert "negotiated 10.0" in found.line


def test_a_slow_processor_explains_the_slow_link_of_its_node() -> None:
    measures = [processor(node, 40.0 if node == "b" else 100.0) for node in "abcd"]
    found = verdict([*measures, *pairs("abcd", sending("b", "abcd", 4.0))])
    assert [(each.nodes, each.part) for each in found] == [(("b",), "processor")]


def test_a_slow_answer_of_one_node() -> None:
    delays = dict.fromkeys(itertools.combinations("abcd", 2), 40.0)
    slow = {pair: 900.0 if "d" in pair else 40.0 for pair in delays}
    assert links.slow_links({}, delays) == []
    assert [(each.nodes, each.way) for each in links.slow_links({}, slow)] == [(("d",), links.ANSWERS)]


def test_a_lost_node_is_reported_and_the_others_are_evaluated() -> None:
    measures = pairs("abcd", sending("b", "abcd", 2.0))
    reports = [*reports_of(*measures), NodeReport("a", (), (("", "d", "connection closed"),), (), "end", ())]
    found = judge(reports, (), NETWORK, {"d": "in the phase pairs: no answer"})
    assert [each.nodes for each in found] == [("d",), ("b",)]
    assert "lost: in the phase pairs" in found[0].line


def test_nodes_that_cannot_reach_a_lost_first_node_are_not_blamed() -> None:
    alone = [NodeReport(node, (), (("meeting", "", "did not reach the first node"),), (), "end", ()) for node in "bc"]
    reports = [NodeReport("a", (), (), (), "", ()), *alone]
    (found,) = judge(reports, (), NETWORK, {"a": "before it started: no answer"})
    assert found.nodes == ("a",)
    assert [each.nodes for each in judge(reports, (), NETWORK, {})] == [("b",), ("c",)]


def test_failed_pairs_are_reported_once() -> None:
    closed = "[pair.cc:561] Connection closed by peer [10.0.0.2]:4242"
    whole = reports_of(*pairs("abc", {}))
    failing = [
        NodeReport("a", (), (("", "b", closed),), (), "end", ()),
        NodeReport("b", (), (("", "a", closed),), (), "end", ()),
    ]
    (found,) = judge([*whole, *failing], (), NETWORK, {})
    assert found.line.startswith("a -> b link: failed: the connection was closed; ")
    cut = [NodeReport(node, (), (("", "d", closed), ("all-reduce", "", closed)), (), "end", ()) for node in "abc"]
    (found,) = judge([*whole, *cut], (), NETWORK, {})
    assert found.line.startswith("d link: measurements with all other nodes failed: the connection was closed; ")


def test_the_table_has_80_columns_and_marks_outliers() -> None:
    nodes = [f"a-machine-with-a-long-name-{node}" for node in "abcd"]
    measures = [
        Measure(node, kind, "GPU 0", 30.0 if (node, kind) == (nodes[2], "copy") else 123.4, "GB/s", "X")
        for node in nodes
        for kind in ("matmul", "copy", "to GPU", "from GPU", "peer", "read")
    ]
    measures += [Measure(one, "bandwidth", "", 10, "Gb/s", to=to) for one, to in itertools.permutations(nodes, 2)]
    measures += [Measure(one, "latency", "", 48, "us", to=to) for one, to in itertools.combinations(nodes, 2)]
    console = Console(width=WIDTH, file=io.StringIO())
    console.print(table(nodes, measures, verdict(measures)))
    found = console.file.getvalue().splitlines()
    assert all(len(line) <= WIDTH for line in found)
    assert [line.count("!") for line in found] == [0, 0, 0, 0, 1, 0]
    assert "30.0!" in found[4]


@given(
    st.text()
    | st.recursive(st.none() | st.integers() | st.text(), lambda x: st.dictionaries(st.text(), x)).map(
        lambda value: MARK + json.dumps(value)
    )
)
def test_any_log_can_be_parsed(line: str) -> None:
    read("a", ["a", "b"], line, {})


def test_a_truncated_log_is_parsed() -> None:
    lines = [
        {"kind": "begun", "ranks": [0, 1]},
        {"kind": "matmul", "part": "GPU 0", "uuid": "ABC", "of": "X", "value": 3.0, "unit": "TFLOP/s"},
        {"kind": "bandwidth", "to": 1, "value": 9.0, "unit": "Gb/s", "again": 0.5},
        {"kind": "bandwidth", "to": 7, "value": 9.0, "unit": "Gb/s"},
        {"kind": "phase", "name": "pairs"},
    ]
    log = "\n".join(["a warning of torch", *(MARK + json.dumps(line) for line in lines), MARK + '{"kind": "e'])
    found = read("a", ["a", "b"], log, {"abc": "GPU 5"})
    assert [(m.part, m.to, m.again) for m in found.measures] == [("GPU 5", "", 0.0), ("", "b", 0.5)]
    assert (found.phase, found.together) == ("pairs", ("a", "b"))


def test_copies_that_hang_are_named_once_with_their_fix_and_not_the_pairs_that_waited() -> None:
    hung = NodeReport("a", (), (("GPU 0", "", "copies to GPU 1 hang"),), (), "end", ())
    others = [NodeReport(node, (), (("", "a", "timed out"),), (), "end", ()) for node in "bc"]
    (found,) = judge([hung, *others], [], NETWORK, {})
    assert found.line.startswith("a GPU 0: copies to GPU 1 hang; train without such copies: env: {NCCL_P2P_DISABLE: 1}")
    assert not found.undecided
