"""The forecast of `launcher doctor --bench`: the formula, its edges, its texts, and the trainer's own model."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.forecast import TARGET, compare, limited
from bench.forecast import links as measured_links
from bench.forecast import step as measured_step
from launcher.features.bench import forecast, option
from launcher.features.bench.forecast import (
    TrainingStep,
    buckets,
    forecasts,
    gradient_bytes,
    least,
    lines,
    reduction,
    step,
)
from launcher.features.bench.health.measures import Measure
from launcher.features.bench.run import BenchResult
from tests.e2e.cli import Cli, bed_job
from tests.e2e.scene import Scene

NAMES = ("gpu-a", "gpu-b", "gpu-c", "gpu-d", "gpu-e")
RESNET50 = 102e6  # bytes of its gradients


def links(gigabits: float, *slow: tuple[str, str, float]) -> list[Measure]:
    speeds = dict.fromkeys(itertools.permutations(NAMES, 2), gigabits) | {(a, b): value for a, b, value in slow}
    return [Measure(a, "bandwidth", "", value, "Gb/s", to=b) for (a, b), value in speeds.items()]


def text(nodes: int, measures: list[Measure], work: TrainingStep) -> list[str]:
    return list(lines(forecasts(NAMES[:nodes], measures, work), work))


def test_an_all_reduce_sends_two_messages_for_each_other_worker() -> None:
    assert reduction(100e6, 2, 100e6, 0) == pytest.approx(1.0)  # half of the bytes, twice
    assert reduction(100e6, 4, 100e6, 0) == pytest.approx(1.5)
    assert reduction(100e6, 4, 100e6, 1e-3) == pytest.approx(1.5 + 6e-3)


def test_only_what_is_not_hidden_behind_the_backward_pass_makes_a_step_longer() -> None:
    assert step(0.3, 1, 4, 0.01) == pytest.approx(0.31)  # the last bucket is ready at the end
    assert step(0.3, 1, 4, 1.0) == pytest.approx(0.1 + 0.05 + 4.0)  # from the first bucket on, the link is busy
    assert step(0.3, 1, 1, 1.0) == pytest.approx(1.3)  # one bucket overlaps with nothing
    assert step(2.4, 8, 1, 1.0) == pytest.approx(3.4)


positive = st.floats(1e-4, 1e3)


@given(positive, st.integers(1, 64), st.integers(1, 64), positive, st.integers(2, 64))
def test_from_the_least_step_on_several_nodes_are_faster(
    alone: float, passes: int, count: int, bucket: float, nodes: int
) -> None:
    limit = least(nodes, passes, count, bucket)
    assert step(limit * 1.001, passes, count, bucket) < nodes * limit * 1.001
    assert step(limit * 0.999, passes, count, bucket) > nodes * limit * 0.999
    assert step(alone, passes, count, bucket) >= alone + bucket * 0.999  # never faster than the work itself


@given(st.floats(1, 1e12), positive, st.integers(2, 5), st.floats(1e-3, 1e3), st.integers(1, 8))
def test_accumulating_is_worth_it(size: float, alone: float, nodes: int, speed: float, workers: int) -> None:
    work = TrainingStep(size, alone, 1, workers)
    found = forecasts(NAMES[:nodes], links(speed), work)
    assert [each.nodes for each in found] == {2: [2], 3: [2, 3], 4: [2, 4], 5: [2, 4, 5]}[nodes]
    for each in found:
        assert each.speed is not None
        assert 0 < each.speed <= each.nodes
        for way in each.ways:
            if way.name.startswith("accumulate"):
                passes = int(way.name.split()[1])
                assert way.speed >= 0.8 * each.nodes
                count, bucket = buckets(work, each.nodes, speed * 1e9 / 8, 0)
                assert way.step == pytest.approx(step(passes * alone, passes, count, bucket))
                assert way.speed == pytest.approx(each.nodes * passes * alone / way.step)
    assert all(text(nodes, links(speed), work))


def test_a_fast_network_is_one_line() -> None:
    assert text(4, links(10), TrainingStep(RESNET50, 0.3)) == [
        "2 nodes: 1.9x of one; 4 nodes: 3.6x (102 MB of gradients, steps of 0.3 s on one node)"
    ]


def test_a_slow_link_is_named_with_what_helps() -> None:
    assert text(2, links(10, ("gpu-a", "gpu-b", 0.09)), TrainingStep(RESNET50, 0.3))[1:] == [
        "gpu-a to gpu-b 0.090 Gb/s: 102 MB of gradients need 9.1 s a step, the step itself 0.3 s: slower than one "
        "machine",
        "  plain             102 MB a step, which takes   9.2 s:  0.1x of one",
        "  bf16               51 MB a step, which takes   4.7 s:  0.1x of one",
        "  accumulate 128    102 MB a step, which takes    47 s:  1.6x of one",
        "-> accumulate 128 is the smallest change that brings 1.6x of one; a way of your own brings it with 843.8 kB "
        "a step; or a faster link",
    ]


SENT = {"bf16": (51e6, 0.02), "powersgd:1": (0.4e6, 0.05), "powersgd:2": (0.7e6, 0.06), "powersgd:4": (1.4e6, 0.07)}


def trained(seconds: float = 0.3, passes: int = 1) -> TrainingStep:
    """What two nodes measure of the trainer's model."""
    found = [Measure("gpu-a", "gradients", "", RESNET50, "B"), Measure("gpu-a", "passes", "", passes, "")]
    for node, factor in (("gpu-a", 0.5), ("gpu-b", 1.0)):  # the slowest counts
        found.append(Measure(node, "step", "", factor * seconds, "s"))
        for name, (size, took) in SENT.items():
            found += [
                Measure(node, "sent", "", size, "B", name),
                Measure(node, "compression", "", factor * took, "s", name),
            ]
    work = forecast.work_of(found, None, None, 1)
    assert work is not None
    return work


def test_each_way_of_the_trainer_is_a_row_and_the_smallest_change_is_named() -> None:
    rows = text(2, links(0.1), trained(1.0))[2:]
    assert [row.split(" a step")[0].rsplit(maxsplit=2)[0].strip() for row in rows[:-1]] == [
        *("plain", "bf16", "accumulate 32", "powersgd:1", "powersgd:2", "powersgd:4")
    ]
    assert rows[-1] == (
        "-> gradient_compression: powersgd:4 in run.args: the smallest change that brings 1.6x of one "
        "(what it changes: docs/slow-links.md), or a faster link"
    )


@pytest.mark.parametrize(
    ("gigabits", "advised"),
    [
        (0.01, "powersgd:2"),  # 0.56 s for 0.7 MB, but 1.1 s for 1.4 MB
        (0.3, "powersgd:4"),
        (1.1, "accumulate: 4"),  # a batch that is not much larger
        (1.7, "gradient_compression: bf16"),
    ],
)
def test_the_smallest_change_depends_on_the_link(gigabits: float, advised: str) -> None:
    assert advised in text(2, links(gigabits), trained(3.0 if gigabits < 0.1 else 0.5))[-1]


def test_what_the_job_does_already_is_forecast_and_not_advised() -> None:
    own = replace(trained(1.0), compression="powersgd:4")
    assert text(2, links(0.1), own) == [
        "2 nodes: 1.7x of one (102 MB of gradients, sent as powersgd:4, steps of 1 s on one node)"
    ]
    less = replace(own, compression="bf16")
    assert "sent as bf16" in text(2, links(0.1), less)[0]
    assert text(2, links(0.1), less)[-1].startswith("-> gradient_compression: powersgd:4 in run.args")


def test_where_no_way_is_worth_it_the_fastest_is_named() -> None:
    assert text(2, links(1e-5), trained(1.0))[-1] == (
        "-> none of these brings 1.6x of one (most: gradient_compression: powersgd:1 in run.args, <0.1x): a faster link"
    )


def test_accumulation_is_named_as_the_option_with_the_passes_that_the_job_has() -> None:
    (each,) = forecasts(NAMES[:2], links(0.9), trained(0.5, passes=3))
    (way,) = (way for way in each.ways if way.name.startswith("accumulate"))
    assert int(way.name.split()[1]) % 3 == 0
    assert way.option == f"accumulate: {way.name.split()[1]}"


def test_compression_waits_for_three_messages_of_each_bucket() -> None:
    latency = Measure("gpu-a", "latency", "", 1000.0, "us", to="gpu-b")
    (each,) = forecasts(NAMES[:2], [*links(1), latency], trained(1.0))
    (way,) = (way for way in each.ways if way.name == "powersgd:1")
    assert way.step == pytest.approx(1.0 + 0.05 + 3 * 4 * 2 * 1e-3 + 0.4e6 / (1e9 / 8))  # 102 MB are 4 buckets


def test_bytes_that_are_given_are_not_those_of_the_model_that_was_measured() -> None:
    sizes = [
        Measure("gpu-a", "sent", "", 4e5, "B", "powersgd:1"),
        Measure("gpu-a", "compression", "", 0.1, "s", "powersgd:1"),
    ]
    assert forecast.work_of(sizes, 1e6, 1.0, 1) == TrainingStep(1e6, 1.0)
    strange = [
        Measure("gpu-a", "sent", "", 4e5, "B", "powersgd:x"),
        Measure("gpu-a", "sent", "", 4e5, "B", "powersgd:2"),
    ]
    known = [Measure("gpu-a", "gradients", "", 1e6, "B"), *strange]
    assert forecast.work_of(known, None, 1.0, 1) == TrainingStep(1e6, 1.0)  # how long it takes is not known


def test_without_the_time_of_a_step_the_least_one_is_said() -> None:
    (line,) = text(2, links(0.09), TrainingStep(RESNET50))
    assert line.startswith("gpu-a to gpu-b 0.090 Gb/s: 102 MB of gradients need 9.1 s a step: 2 nodes are faster")
    assert line.endswith("than one if its steps take more than 6 s (--step SECONDS)")


def test_a_link_outside_the_ring_is_not_the_reason() -> None:
    (found,) = forecasts(NAMES[:2], links(10, ("gpu-a", "gpu-c", 0.01)), TrainingStep(RESNET50, 0.3))
    assert found.bandwidth == 10
    assert forecasts(NAMES[:2], [], TrainingStep(RESNET50, 0.3)) == ()
    assert forecasts(NAMES[:1], links(10), TrainingStep(RESNET50, 0.3)) == ()


def around(name: str, gigabits: float) -> list[tuple[str, str, float]]:
    return [(a, b, gigabits) for a, b in itertools.permutations(NAMES, 2) if name in (a, b)]


def test_a_node_without_which_the_others_are_faster_is_to_be_left_out() -> None:
    work = TrainingStep(RESNET50, 0.3)
    *_, last = text(4, links(10, *around("gpu-c", 0.5)), work)
    assert last == (
        "-> 3 nodes without gpu-c: 2.8x of one, more than with it: leave it out of `nodes` until the slow part is "
        "mended"
    )
    assert forecasts(NAMES[:4], links(10, *around("gpu-c", 0.5)), work)[-1].without == "gpu-c"
    for fine in (links(10), links(0.1), links(10, *around("gpu-c", 6))):  # none is slow, all are, it is worth it
        assert not any(each.without for each in forecasts(NAMES[:4], fine, work))
        assert not any("leave it out" in line for line in text(4, fine, work))
    two = text(2, links(10, *around("gpu-b", 0.01)), work)
    assert not any("leave it out" in line for line in two)


def test_a_node_that_computes_slowly_is_to_be_left_out_unless_the_time_of_a_step_was_given() -> None:
    steps = [Measure(name, "step", "", 1.0 if name == "gpu-b" else 0.3, "s") for name in NAMES[:4]]
    (*_, last) = forecasts(NAMES[:4], [*links(10), *steps], TrainingStep(RESNET50, 1.0))
    assert last.without == "gpu-b"
    assert last.speed == pytest.approx(9.0, abs=0.5)  # of the slow one, which is called one
    (*_, last) = forecasts(NAMES[:4], [*links(10), *steps], TrainingStep(RESNET50, 0.5))
    assert not last.without


def test_why_there_is_no_forecast() -> None:
    def said(*nodes: str, work: TrainingStep | None = None) -> list[str]:
        return list(option.forecast_lines(BenchResult(nodes, work=work)))

    assert said("gpu-a") == []
    assert said("gpu-a", work=TrainingStep(1e6)) == ["no forecast: it needs the link between two nodes"]
    assert said("gpu-a", "gpu-b", work=TrainingStep(1e6)) == ["no forecast: no link was measured"]
    (line,) = said("gpu-a", "gpu-b")
    assert line.startswith("no forecast: --gradients SIZE says")


def test_what_is_given_is_used_before_what_was_measured() -> None:
    trained = [Measure("gpu-a", "gradients", "", 4e6, "B"), Measure("gpu-a", "passes", "", 2, "")]
    trained += [Measure("gpu-a", "step", "", 0.2, "s"), Measure("gpu-b", "step", "", 0.4, "s")]
    assert forecast.work_of(trained, None, None, 8) == TrainingStep(4e6, 0.4, 2, 8)  # of the slowest node
    assert forecast.work_of(trained, 1e6, None, 8) == TrainingStep(1e6, 0.4, 2, 8)
    assert forecast.work_of(trained, None, 1.0, 8) == TrainingStep(4e6, 1.0, 1, 8)
    assert forecast.work_of([], None, 1.0, 8) is None


def test_what_cannot_be_is_no_measure() -> None:
    nothing = [Measure("gpu-a", kind, "", 0.0, "") for kind in ("gradients", "step", "passes")]
    assert forecast.work_of(nothing, None, None, 8) is None  # a model that is not trained
    assert forecast.work_of(nothing, 1e6, None, 8) == TrainingStep(1e6, None, 1, 8)
    work = TrainingStep(RESNET50, 0.3)
    assert forecasts(NAMES[:2], links(0), work) == ()
    assert forecasts(NAMES[:2], links(float("nan")), work) == ()
    lost = Measure("gpu-a", "latency", "", float("nan"), "us", to="gpu-b")
    assert text(2, [*links(10), lost], work) == text(2, links(10), work)


def test_a_link_that_was_not_measured_is_left_out() -> None:
    known = [each for each in links(10) if (each.node, each.to) in (("gpu-b", "gpu-c"), ("gpu-c", "gpu-a"))]
    (line,) = text(3, known, TrainingStep(RESNET50, 0.3))  # nothing is known of the first two nodes alone
    assert line.startswith("3 nodes: 2.8x of one (")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(1e-5, "0.01 ms"), (0.0994, "99 ms"), (0.0999, "0.1 s"), (9.96, "10 s"), (99.4, "99 s"), (99.9, "100 s")],
)
def test_times_have_two_digits(seconds: float, shown: str) -> None:
    assert forecast.seconds_text(seconds) == shown


def test_a_hopeless_link_is_not_nothing() -> None:
    slow = text(2, links(0.001), TrainingStep(1e12, 0.3))
    assert slow[0].startswith("2 nodes: <0.1x of one (1 TB of gradients")
    assert slow[1].endswith("slower than one machine")
    assert slow[-1] == "-> none of these brings 1.6x of one (most: bf16, <0.1x): a faster link"


@pytest.mark.parametrize(
    ("written", "size"), [("102M", 102e6), ("1.5 GB", 1.5e9), ("400k", 4e5), ("4096", 4096), ("1gb", 1e9)]
)
def test_sizes_of_gradients(written: str, size: float) -> None:
    assert gradient_bytes(written) == size


@pytest.mark.parametrize("written", ["", "M", "-1M", "0", "1e6", "nan", "102 MiB", "9" * 50])
def test_other_texts_are_no_sizes(written: str) -> None:
    with pytest.raises(ValueError, match="expected a size such as 102M"):
        gradient_bytes(written)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gradients", "102M"], "--gradients: needs --bench"),
        (["--step", "1"], "--step: needs --bench"),
        (["--minutes", "1"], "--minutes: needs --bench"),
        (["--bench", "--step", "inf"], "for '--step'"),
        (["--bench", "--gradients", "lots"], "--gradients: expected a size such as 102M or 1.5G, not lots"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_contacted(home_cli: Cli, options: list[str], said: str) -> None:
    local = {"runtime": "process", "nodes": ["local", "local"], "gpus": "none"}
    job = home_cli.job("forecast", **local, run={"command": ["true"]})
    assert said in " ".join(home_cli("doctor", job, *options, code=2).stderr.split())


@pytest.mark.ci
def test_the_trainers_own_model_is_measured_and_forecast(home_cli: Cli) -> None:
    local = {"runtime": "process", "nodes": ["local", "local"], "gpus": "none", "env": {"OMP_NUM_THREADS": "1"}}
    args = {"data": "synthetic", "arch": "smallcnn", "image_size": 32, "batch_size": 8, "accumulate": 2}
    job = home_cli.job("forecast", **local, run={"module": "train", "args": args})
    bench = json.loads(home_cli("doctor", job, "--bench", "--minutes", "0.1", "--json", code=None).stdout)["bench"]
    if bench["work"] is None:  # a busy machine, and that is said
        assert bench["lost"] or any("model was not measured: it took longer than" in note for note in bench["notes"])
        return
    assert bench["work"]["gradients"] > 4 * 64 * 1000  # its last layer alone
    assert (bench["work"]["passes"], bench["work"]["workers"]) == (2, 1)
    assert bench["work"]["alone"] is None or bench["work"]["alone"] > 0


@pytest.mark.slow
@pytest.mark.bed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scene", [2], indirect=True)
def test_the_forecast_is_right_where_the_link_is_the_limit(scene: Scene) -> None:
    """python -m bench.forecast compares more sizes and numbers of nodes."""
    names = [node.alias for node in scene.nodes]
    with limited(scene.bed, scene.nodes, 100.0):
        alone = measured_step(scene.cli, scene.nodes[:1], 8e6, 5)
        measures = measured_links(scene.cli, scene.nodes, 1.0)
        row = compare(scene.cli, scene.nodes, measures, TrainingStep(8e6, alone))
        assert abs(row.error) <= TARGET, row
        job = scene.cli.job("bench", **bed_job(nodes=names, run={"command": ["true"]}))
        options = ("--minutes", 1, "--gradients", "102M", "--step", 0.3)
        *_, line, _plain, _bf16, _accumulate, last = scene.cli(
            "doctor", job, "--bench", *options, code=None
        ).stdout.splitlines()
    assert line.startswith(("node1 to node2 0.0", "node2 to node1 0.0"))
    assert "102 MB of gradients need" in line
    assert line.endswith("the step itself 0.3 s: slower than one machine")
    assert last.startswith("-> accumulate ")
