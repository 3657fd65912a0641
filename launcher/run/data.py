"""A job's data on its nodes, before anything of the run is created."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.filesize import decimal

from launcher.data.bring import Node, bring, is_home
from launcher.data.places import Copy, copies, parse_source, root_of
from launcher.errors import LauncherError
from launcher.job.models import Job
from launcher.job.settings import read_settings
from launcher.model.container import DataSet, Mount
from launcher.model.facts import NodeFacts
from launcher.model.progress import Log, OnProgress
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.parallel import run_all_settled
from launcher.planning.checks import Check, Level

MANY = 100_000  # files, above which a file system takes longer than the network


def bring_data(
    job: Job, fleet: Fleet, facts: Sequence[NodeFacts], log: Log, on_progress: OnProgress
) -> list[NodeFacts]:
    """Each node's facts with where it has the data. The job's image is on every node.

    Raises NodesFailed with every node that did not get it, UsageError for a source that is missing here.
    """
    every = zip(fleet.engines, facts, job.machines, strict=True)
    nodes = [Node(engine, node, node.image, entry.address) for engine, node, entry in every]
    ready = list(facts)
    for data in job.data:
        brought = bring(parse_source(data.source, Path.cwd()), nodes, fleet.ssh_config, log, on_progress)
        came = {node: size for node, size in brought.delivered.received.items() if size}
        if came:
            log(f"data {data.name}: {', '.join(f'{decimal(size)} came to {node}' for node, size in came.items())}")
        ready = [
            replace(node, data=(*node.data, Mount(brought.paths[engine.node], data.at, read_only=True)))
            for engine, node in zip(fleet.engines, ready, strict=True)
        ]
    return ready


def examine_data(job: Job, engines: Sequence[Engine]) -> Iterator[Check]:
    """Whether the nodes have the job's data already, the same everywhere, by its manifests; nothing is made there."""
    settings = read_settings(os.environ)
    steps = [partial(root_of, engine, settings, make=False) for engine in engines]
    for engine, root in zip(engines, run_all_settled(steps), strict=True):
        if isinstance(root, LauncherError):
            yield Check(engine.node, "data", Level.FAIL, root.what, root.next_step)
    looks = [partial(_look, engine) for engine in engines]
    seen = [[] if isinstance(each, LauncherError) else each for each in run_all_settled(looks)]
    for data in job.data:
        yield from examine_one(data, engines, seen)


def _look(engine: Engine) -> list[Copy]:
    return copies(engine, root_of(engine, read_settings(os.environ), copies=False, make=False))


def examine_one(data: DataSet, engines: Sequence[Engine], seen: Sequence[Sequence[Copy]]) -> Iterator[Check]:
    """One of them. seen: what each node has, in the order of the engines."""
    source = parse_source(data.source, Path.cwd())
    found = {
        engine.node: max((copy for copy in each if copy.whole and copy.source == source.label), key=_age, default=None)
        for engine, each in zip(engines, seen, strict=True)
        if not is_home(source, engine)
    }
    lacking = [node for node, copy in found.items() if copy is None]
    names = {copy.name for copy in found.values() if copy}
    if lacking or len(names) > 1:
        what = (
            f"{data.name} is not on {', '.join(lacking)} yet" if lacking else f"{data.name} is not the same everywhere"
        )
        yield Check("all", "data", Level.WARN, what, "launcher up brings it first; or before: launcher data push")
    elif names:
        copy = next(copy for copy in found.values() if copy)
        yield Check("all", "data", Level.OK, f"{data.name}: the same {copy.files:,} files on every node")
    if any(copy and copy.files > MANY for copy in found.values()):
        what = f"{data.name} has over {MANY:,} files; one large file is copied and read faster"
        yield Check("all", "data", Level.WARN, what, "python -m train pack SOURCE FILE, or tar shards")


def _age(copy: Copy) -> int:
    return copy.used
