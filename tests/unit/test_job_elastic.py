"""min_nodes, spares and lost_after: settings that allow two independent trainings are rejected."""

from __future__ import annotations

import pytest

from launcher.errors import JobInvalid
from launcher.job.dump import dump_job
from launcher.job.loader import parse_job
from launcher.job.models import Job
from launcher.planning.cluster import build

JOB = "name: a\nimage: {ref: x}\nrun: {module: train}\nnodes: [a, b, c]\n"


def job(more: str) -> Job:
    return parse_job(JOB + more)


def test_a_job_that_may_lose_nodes() -> None:
    found = job("min_nodes: 3\nspares: [d, {host: e, gpus: 2}]\nlost_after: 20s\n")
    assert [node.name for node in found.machines] == ["a", "b", "c", "d", "e"]
    assert (found.restarts, found.lost_after) == (10, 20)
    assert job("min_nodes: 2\nrestarts: 3\n").restarts == 3
    assert job("min_nodes: 2\nrestarts: 3\n").lost_after == 15
    assert (job("").restarts, job("").lost_after) == (0, None)
    assert parse_job(dump_job(found)) == found


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "min_nodes: 1\n",
            "could leave 1 on each side, and both would train; expected at least 2",
        ),
        ("min_nodes: 2\nspares: [d]\n", "with 3 nodes and 1 spare, a network partition could leave 2 on each side"),
        ("min_nodes: 4\n", "min_nodes: is 4, but there are only 3 nodes"),
        ("spares: [d]\n", ":5: spares: requires min_nodes"),
        ("lost_after: 20s\n", ":5: lost_after: requires min_nodes"),
        (
            "min_nodes: 2\nlost_after: 2s\n",
            ":6: lost_after: too short, as a busy machine may not respond",
        ),
        ("min_nodes: 2\nrestarts: 0\n", ":6: restarts: min_nodes needs restarts"),
        ("min_nodes: 2\nsweep: [{lr: 1}]\n", ":6: sweep: a sweep cannot continue on fewer nodes"),
        ("min_nodes: 3\nsecrets: [A]\nspares: [{host: d, env: {A: b}}]\n", ":7: spares.0.env.A: is also a secret"),
        ("min_nodes: 3\nspares: [a]\n", ":6: spares.0: a is already listed as entry 0"),
    ],
)
def test_what_is_refused(keys: str, message: str) -> None:
    with pytest.raises(JobInvalid, match=message):
        job(keys)


def test_two_machines_cannot_tolerate_a_loss() -> None:
    with pytest.raises(JobInvalid, match=r"two machines cannot tolerate a loss.*add a third one"):
        parse_job(JOB.replace("[a, b, c]", "[a, b]") + "min_nodes: 1\n")


@pytest.mark.parametrize("way", ["fsdp", "hsdp", "model", "pipeline", "dual_batch"])
def test_a_sharded_model_is_refused(way: str) -> None:
    for args, key in ((f"{{parallel: {way}}}", "parallel"), (f"[--parallel, {way}]", "1")):
        with pytest.raises(JobInvalid, match=f":3: run.args.{key}: with {way}, a lost node takes its part"):
            parse_job(JOB.replace("{module: train}", f"{{module: train, args: {args}}}") + "min_nodes: 2\n")


def test_clusters_refuse_min_nodes() -> None:
    with pytest.raises(JobInvalid, match=":5: min_nodes: is not supported on a cluster"):
        build(job("min_nodes: 2\ngpus: none\n"), "python3")
