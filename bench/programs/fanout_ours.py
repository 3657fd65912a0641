"""`python -m bench.programs.fanout_ours SSH_CONFIG COUNT`: facts, start and stop of a run, as `up` and `down` do them.

Prints a JSON object: seconds of each, processor seconds and the most memory in MiB of this process and its children.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

from bench.programs import early  # noqa: F401 - first of all
from bench.programs.cost import cost
from launcher.job.models import Job
from launcher.model.container import ContainerSpec
from launcher.node.connect import connect
from launcher.plan.offline import offline
from launcher.run.start import start
from launcher.run.stop import stop

IMAGE = "sha256:" + "1" * 64


def main() -> None:
    config, count = sys.argv[1], int(sys.argv[2])
    hosts = [f"n{place}" for place in range(count)]
    job = Job.model_validate(
        {"name": "fanout", "image": {"ref": "any"}, "nodes": hosts, "gpus": "none", "run": {"command": ["true"]}}
    )
    began = time.monotonic()
    with connect([(host, host) for host in hosts], "docker", config, ping=False) as fleet:
        facts = fleet.facts()
        looked = time.monotonic()
        assert len(facts) == count
        plan = offline(job, "none")
        plan = dataclasses.replace(
            plan, image_id=IMAGE, nodes=tuple(dataclasses.replace(n, container=_bare(n.container)) for n in plan.nodes)
        )
        start(plan, fleet, EMPTY, {}, lambda *_, **__: None)
        started = time.monotonic()
        removed = stop(fleet, plan.run)
        stopped = time.monotonic()
    assert [len(node.containers) for node in removed] == [1] * count
    seconds = {"facts": looked - began, "start": started - looked, "stop": stopped - started}
    print(json.dumps({**seconds, **cost()}))


def _bare(spec: ContainerSpec) -> ContainerSpec:
    return dataclasses.replace(spec, image=IMAGE)


def _empty() -> bytes:
    import tempfile
    from pathlib import Path

    from launcher.records.snapshot import snapshot

    with tempfile.TemporaryDirectory() as folder:
        return snapshot(Path(folder)).archive


EMPTY = _empty()

if __name__ == "__main__":
    main()
