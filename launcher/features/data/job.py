"""The key `data` of a job: copy the data sets to its nodes before the run is created, and check the copies."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from launcher.errors import DataFailed, LauncherError
from launcher.features.data.distribution import DataNode, distribute, has_source
from launcher.features.data.download import Variables
from launcher.features.data.locations import Copy, copies, parse_source, root_of
from launcher.job.files import read_secrets
from launcher.job.models import Job
from launcher.job.settings import read_settings
from launcher.model.container import DataSet, Mount
from launcher.model.facts import NodeFacts
from launcher.model.progress import Log, OnProgress
from launcher.model.sizes import counted
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.parallel import run_all_catching
from launcher.planning.checks import Check, Level

MANY = 100_000  # number of files above which the file system is slower than the network


def bring_data(
    job: Job, fleet: Fleet, facts: Sequence[NodeFacts], log: Log, on_progress: OnProgress, here: Path
) -> list[NodeFacts]:
    """Copy the data to the nodes; return their facts with the folders of the copies. The job's image is on every node.

    Raises NodesFailed with every node that did not receive the data, UsageError if a local source is missing.
    """
    every = zip(fleet.engines, facts, job.machines, strict=True)
    nodes = [DataNode(engine, node, node.image, entry.address) for engine, node, entry in every]
    ready = list(facts)
    for data in job.data:
        source = replace(parse_source(data.source, here), name=data.name)
        secrets = read_secrets(job, here, os.environ) if source.url else {}
        variables = Variables(job.env, secrets)
        try:
            distributed = distribute(source, nodes, fleet.ssh_config, log, on_progress, variables=variables)
        except KeyboardInterrupt as stop:
            names = ",".join(entry.host for entry in job.machines)
            remains = f"nothing was started; what has come of data {data.name} stays, and the next up goes on with it"
            remove = f"to remove it: launcher data rm {shlex.quote(source.label)} --nodes {names}"
            raise stop from stop.__cause__ or DataFailed("", remains, remove)
        if said := distributed.said():
            log(f"data {data.name}: {said}")
        ready = [
            replace(node, data=(*node.data, Mount(distributed.paths[engine.node], data.at, read_only=True)))
            for engine, node in zip(fleet.engines, ready, strict=True)
        ]
    return ready


def check_data(job: Job, engines: Sequence[Engine]) -> Iterator[Check]:
    """Check by the manifests whether all nodes have the same copy of the job's data. Creates nothing on the nodes."""
    settings = read_settings(os.environ)
    steps = [partial(root_of, engine, settings, make=False) for engine in engines]
    for engine, root in zip(engines, run_all_catching(steps), strict=True):
        if isinstance(root, LauncherError):
            yield Check(engine.node, "data", Level.FAIL, root.what, root.next_step)
    listed = run_all_catching([partial(_copies, engine) for engine in engines])
    seen = [[] if isinstance(each, LauncherError) else each for each in listed]
    for data in job.data:
        yield from check_data_set(data, engines, seen)


def _copies(engine: Engine) -> list[Copy]:
    return copies(engine, root_of(engine, read_settings(os.environ), copies=False, make=False))


def check_data_set(data: DataSet, engines: Sequence[Engine], seen: Sequence[Sequence[Copy]]) -> Iterator[Check]:
    """Check one data set. seen: the copies on each node, in the order of the engines."""
    source = parse_source(data.source, Path.cwd())
    found = {
        engine.node: max((copy for copy in each if copy.whole and copy.source == source.label), key=_age, default=None)
        for engine, each in zip(engines, seen, strict=True)
        if not has_source(source, engine)
    }
    lacking = [node for node, copy in found.items() if copy is None]
    names = {copy.name for copy in found.values() if copy}
    if lacking or len(names) > 1:
        what = f"{data.name} is not on {', '.join(lacking)} yet" if lacking else f"{data.name} differs between nodes"
        yield Check("all", "data", Level.WARN, what, "launcher up copies it")
    elif names:
        copy = next(copy for copy in found.values() if copy)
        yield Check("all", "data", Level.OK, f"{data.name}: the same {counted(copy.files, 'file')} on every node")
    if any(copy and copy.files > MANY for copy in found.values()):
        what = f"{data.name} has more than {MANY:,} files; one large file is copied and read faster"
        fix = "pack it: python -m launcher.trainer pack SOURCE FILE; or use tar shards"
        yield Check("all", "data", Level.WARN, what, fix)


def _age(copy: Copy) -> int:
    return copy.used
