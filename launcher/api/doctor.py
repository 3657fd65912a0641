"""Check nodes before a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from launcher.errors import LauncherError
from launcher.job.files import check_files
from launcher.job.loader import load_job
from launcher.job.models import Job
from launcher.job.settings import read_settings
from launcher.model.facts import NodeFacts
from launcher.model.host import cluster_host
from launcher.node.connect import Fleet, connect
from launcher.node.ssh.config import chosen_config
from launcher.planning.checks import Check, Level
from launcher.records.exported import exported
from launcher.run.cluster import kind_of
from launcher.run.doctor import check_nodes

__all__ = ["Fleet", "NodeChecks", "examine", "job_to_check"]


@dataclass(frozen=True)
class NodeChecks:
    """Connected nodes, and their checks, as they are made; with each node's facts, if it has GPUs."""

    fleet: Fleet
    checks: Iterator[Check | NodeFacts]


def job_to_check(
    path: Path,
    set: Sequence[str],  # noqa: A002 - as --set
    nodes: Sequence[str] | None,
) -> tuple[Job, Sequence[Check]]:
    """Load a job file. What `up` would miss on this machine is a failed check, as the nodes are checked anyway."""
    job = load_job(path, list(set), nodes)
    try:
        with exported(job, Path.cwd()) as code:
            check_files(job, Path.cwd(), os.environ, code.folder if code else None)
    except LauncherError as error:
        problems = f"{error.where}: {error.what}".splitlines()
        fix = error.next_step or "correct it: `up` refuses the job until then"
        return job, [Check("this machine", "job", Level.FAIL, each, fix) for each in problems]
    return job, ()


@contextmanager
def examine(
    job: Job | None,
    nodes: Sequence[str] = (),
    *,
    cluster: str | None = None,
    ssh_config: str | PathLike[str] | None = None,
) -> Iterator[NodeChecks]:
    """Connect to the nodes of a job, or to these, or to a cluster, and check them. Raises UsageError, NodesFailed."""
    named = nodes if cluster is None else [cluster_host(cluster)]
    hosts = job.hosts() if job and cluster is None else [(host, host) for host in named]
    runtime = job.runtime if job else "docker"
    with connect(hosts, runtime, chosen_config(ssh_config), allow_failures=True) as fleet:
        if job is None or cluster is None:
            yield NodeChecks(fleet, check_nodes(job, fleet))
        else:
            settings = read_settings(os.environ).cluster(cluster)
            yield NodeChecks(fleet, kind_of(settings).check(job, settings, fleet))
