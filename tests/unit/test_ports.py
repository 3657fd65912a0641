"""The rendezvous port: given by the job, else the first of a range that no run has locked and no program listens on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.errors import InUse, NodesFailed
from launcher.job.dump import dump_job
from launcher.job.loader import parse_job
from launcher.job.models import PORTS, Job
from launcher.job.overrides import of_one_run
from launcher.model.facts import NodeFacts, PortClaim
from launcher.planning import ports
from launcher.planning.checks import Level, another_port
from launcher.planning.offline import offline
from tests.unit.test_plan import job, node

RUN = "first-20260101-000000-abcd"


def process_job(nodes: int, **keys: Any) -> Job:
    keys = {"name": "j", "runtime": "process", "nodes": ["local"] * nodes, "run": {"command": ["true"]}, **keys}
    return Job.model_validate(keys)


def locked(facts: NodeFacts, *claimed: int) -> NodeFacts:
    return replace(facts, port_claims=tuple(PortClaim(port, RUN, "ada@pc", ("gpu-0",)) for port in claimed))


@pytest.mark.parametrize(
    ("listening", "claimed", "port"),
    [
        ((22,), (), 29500),
        ((29500,), (), 29501),
        ((), (29500,), 29501),  # a run that has just started: nothing listens yet
        ((29500, 29502), (29501,), 29503),
        (tuple(range(29500, 29563)), (), 29563),
    ],
)
def test_the_first_free_port_of_the_first_node(listening: tuple[int, ...], claimed: tuple[int, ...], port: int) -> None:
    facts = [locked(node(0, listening=listening), *claimed), node(1, listening=(29500, 29501))]
    assert ports.choose(job(2), facts) == port


def test_all_ports_in_use() -> None:
    with pytest.raises(NodesFailed) as caught:
        ports.choose(job(1), [node(0, listening=tuple(PORTS))])
    assert "rendezvous ports 29500 to 29563 are all in use" in str(caught.value)
    assert all(isinstance(error, InUse) for error in caught.value.errors)  # --wait waits


def test_a_port_of_the_job_is_used_or_refused() -> None:
    given = job(2, port=29500)
    assert ports.choose(given, [node(0), node(1, listening=(29500,))]) == 29500
    with pytest.raises(NodesFailed) as caught:
        ports.choose(given, [locked(node(0), 29500), node(1)])
    assert f"gpu-0: rendezvous port 29500 is in use by run {RUN} of ada@pc" in str(caught.value)
    assert "--set port=29501; or stop that run: launcher down" in str(caught.value)


def test_with_min_nodes_the_port_is_free_on_every_node() -> None:
    facts = [node(0), locked(node(1), 29500), node(2, listening=(29501,))]
    assert ports.choose(job(3, min_nodes=2), facts) == 29502


def test_on_one_machine_each_node_has_its_own_port() -> None:
    same = [replace(each, listening=(29502, 29504)) for each in (node(0), node(1), node(2))]
    assert ports.choose(process_job(3, min_nodes=2), same) == 29505
    assert ports.choose(process_job(3), same) == 29500


def test_a_port_that_is_not_given_stays_so_in_the_record() -> None:
    text = "name: j\nruntime: process\nnodes: [local]\nrun: {command: [a]}\n"
    for each in (parse_job(text), parse_job(text + "port:\n"), parse_job(text + "port: 29600\n", sets=["port="])):
        assert (each.port, tuple(each.ports)) == (29500, tuple(PORTS))
        assert tuple(parse_job(dump_job(each)).ports) == tuple(PORTS)
    given = parse_job(text + "port: 29500\n")
    assert tuple(given.ports) == tuple(parse_job(dump_job(given)).ports) == (29500,)
    pool = parse_job("name: j\nimage: {ref: i}\nnodes: {pool: [a, b]}\nsweep: [{x: 1}]\nrun: {module: m}\n")
    assert tuple(of_one_run(pool).ports) == tuple(PORTS)


def test_a_plan_without_nodes_has_the_first_port() -> None:
    assert offline(job(2), "c").rendezvous.port == 29500
    assert offline(job(2, port=29600), "c").rendezvous.port == 29600


def test_doctor_names_the_port_that_a_run_would_use() -> None:
    found = ports.check(job(2), [node(0), node(1)])
    assert (found.level, found.what) == (Level.OK, "29500 is free for the rendezvous")
    found = ports.check(job(2), [locked(node(0), 29500), node(1)])
    assert found.level is Level.OK
    assert found.what == f"29501 is free for the rendezvous; rendezvous port 29500 is in use by run {RUN} of ada@pc"
    assert ports.check(job(2, port=29500), [locked(node(0), 29500), node(1)]).level is Level.FAIL


def test_the_port_that_is_advised_exists() -> None:
    assert another_port(29500).endswith("port=29501")
    assert another_port(65535).endswith("port=65534")
