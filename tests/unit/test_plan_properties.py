"""Properties of the plan: any job and any nodes give a consistent plan, or an error with its location."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import LauncherError, NodesFailed
from launcher.job.models import Job
from launcher.model.facts import Gpu, ImageFacts, Interface, Launch, NodeFacts, Probe, Reach, Route
from launcher.model.plan import Plan, plain
from launcher.planning import build
from launcher.planning.allotment import allot
from launcher.planning.offline import offline
from launcher.planning.rendezvous import candidates, choose
from launcher.records.paths import RunPaths
from launcher.records.store import Record
from tests.unit.test_job_properties import jobs
from tests.unit.test_plan import MODERN, TORCH_1_1, TORCH_1_8
from tests.unit.test_plan import node as a_node

RUN = "job-20260131-120000-00aa"
names = st.text(max_size=8)
addresses = st.one_of(
    st.sampled_from(["127.0.0.1/8", "172.17.0.1/16", "10.0.0.5/24", "10.0.0.6/24", "fe80::1/64", "169.254.0.1/16"]),
    st.ip_addresses(v=4).map(lambda ip: f"{ip}/24"),
)


@st.composite
def node_facts(draw: st.DrawFn, job: Job, rank: int) -> NodeFacts:
    """Possible facts of a job's node: more or less of everything, unusual names, no engine."""
    entry = job.nodes[rank]
    count = draw(st.integers(0, 4))
    return dataclasses.replace(
        a_node(rank),
        name=entry.name,
        host=entry.host,
        uid=draw(st.integers(0, 1 << 31)),
        cpus=draw(st.integers(0, 256)),
        memory=draw(st.integers(0, 1 << 50)),
        shm_size=draw(st.integers(-1, 1 << 40)),
        clock_offset=draw(st.floats(-1e9, 1e9)),
        interfaces=tuple(
            Interface(draw(st.sampled_from(["lo", "eth0", "docker0", "ib0", "a=b,c"])), (address,))
            for address in draw(st.lists(addresses, max_size=3))
        ),
        routes=tuple(Route("0.0.0.0/0", "eth0") for _ in range(draw(st.integers(0, 1)))),
        listening=tuple(draw(st.lists(st.sampled_from([22, job.port]), max_size=2))),
        gpus=tuple(Gpu(i, f"GPU-{rank}-{i}", draw(names), 1, draw(names)) for i in range(count)),
        infiniband=draw(st.booleans()),
        engine=draw(st.sampled_from([None, a_node(0).engine])),
        ulimits=draw(st.sampled_from([(), (("memlock", -1),)])),
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[Job, list[NodeFacts], list[Probe], ImageFacts]:
    job = Job.model_validate(draw(jobs()))
    facts = [draw(node_facts(job, rank)) for rank in range(len(job.nodes))]
    probes = [
        Probe(other.name, facts[0].name, ip, job.port, draw(st.sampled_from(Reach)))
        for other in facts[1:]
        for ip in candidates(facts, job.nodes[0].address)
    ]
    bare = [MODERN, TORCH_1_8, TORCH_1_1]
    return job, facts, probes, draw(st.sampled_from(bare))


def make(job: Job, facts: list[NodeFacts], probes: list[Probe], image: ImageFacts) -> Plan:
    meeting = choose(facts, probes, job.port, [entry.address for entry in job.nodes])
    prepared = build.Prepared(allot(job, facts), image, meeting)
    return build.build(job, RUN, prepared, code="c0de", owner="ada@laptop", created=1)


@given(situations())
@settings(max_examples=100, deadline=None)
def test_a_plan_is_consistent_or_an_error_names_the_cause(
    situation: tuple[Job, list[NodeFacts], list[Probe], ImageFacts],
) -> None:
    job, facts, probes, image = situation
    try:
        plan = make(*situation)
    except LauncherError as error:
        for each in error.errors if isinstance(error, NodesFailed) else (error,):
            located = any(name in each.where for name in [*(node.name for node in facts), "run.script", "image"])
            assert located, str(each)
            assert each.what
        return
    assert plan == make(job, facts, probes, image), "the same facts must give the same plan"
    assert [node.rank for node in plan.nodes] == list(range(len(job.nodes)))
    assert [node.node for node in plan.nodes] == [entry.name for entry in job.nodes]
    first = 0
    for planned, seen in zip(plan.nodes, facts, strict=True):
        assert planned.first_rank == first
        first += planned.processes
        assert planned.processes >= 1
        assert set(planned.container.gpus) <= {gpu.uuid for gpu in seen.gpus}
        assert len(set(planned.container.gpus)) == len(planned.container.gpus)
        assert all(isinstance(word, str) and "\0" not in word for word in planned.container.argv)
        assert planned.container.restarts == job.restarts
    assert len({node.container.name for node in plan.nodes}) == len(plan.nodes)
    assert image.launch is not Launch.NONE


@given(situations())
@settings(max_examples=40, deadline=None)
def test_a_recorded_plan_can_be_read(situation: tuple[Job, list[NodeFacts], list[Probe], ImageFacts]) -> None:
    try:
        plan = make(*situation)
    except LauncherError:
        return
    assert json.loads(plan.to_json()) == json.loads(json.dumps(plain(plan)))
    with tempfile.TemporaryDirectory() as folder:
        record = Record(RunPaths(Path(folder) / plan.run))
        record.write(plan, "", b"")
        nodes = record.nodes()
        assert record.runtime == plan.runtime
    for node, planned in zip(nodes, plan.nodes, strict=True):
        assert (node.name, node.host, node.rank) == (planned.node, planned.host, planned.rank)
        assert (node.container, node.output) == (planned.container.name, planned.container.output_dir)
        assert node.ranks == range(planned.first_rank, planned.first_rank + planned.processes)


@given(jobs())
@settings(max_examples=60, deadline=None)
def test_every_job_has_an_offline_plan_or_an_error(data: dict[str, Any]) -> None:
    with contextlib.suppress(LauncherError):
        assert "offline" in offline(Job.model_validate(data), "c0de").warnings[0]
