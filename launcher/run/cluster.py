"""Where a run starts: the machines of its job, or a cluster of the settings file, of a kind that is a feature."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher import features
from launcher.job.models import Job
from launcher.job.settings import Cluster, read_settings
from launcher.model.host import cluster_host
from launcher.model.plan import Plan, RunId
from launcher.node.connect import Fleet, connect
from launcher.node.engine import Engine
from launcher.planning.checks import Check


@dataclass(frozen=True)
class Kind:
    """A kind of cluster: what a feature makes of a job.

    All of them raise JobInvalid with every key of the job that the cluster does not support.

    plan(job, cluster, engine, code, run, sweep): a run's plan. engine: the cluster's. code: digest of the code archive.
    sweep: the runs of its sweep, which start together. check(job, cluster, fleet): the checks of `doctor`.
    text(job, cluster): what `up` submits, and warnings. starts_together: several runs can be one request: the engine
    starts all of them with the last one.
    """

    plan: Callable[[Job, Cluster, Engine, str, RunId, Sequence[RunId]], Plan]
    check: Callable[[Job, Cluster, Fleet], Iterator[Check]]
    text: Callable[[Job, Cluster], tuple[str, Sequence[str]]]
    starts_together: bool


def kind_of(cluster: Cluster) -> Kind:
    kinds = {kind: entry for feature in features.FEATURES.values() for kind, entry in feature.clusters.items()}
    found: Kind = features.load(kinds[cluster.kind])
    return found


@dataclass(frozen=True)
class Destination:
    """Where a run starts: the machines of its job, or a cluster, which chooses the machines.

    hosts: (node name, host). together: the runs that the cluster starts with one request, when the last one starts.
    """

    hosts: Sequence[tuple[str, str]]
    runtime: str | None
    cluster: Cluster | None = None
    together: Sequence[RunId] = ()

    @property
    def bare(self) -> bool:
        """Whether the code is not sent into a container, whatever the job's runtime is."""
        return self.cluster is not None and self.cluster.container == "none"

    @property
    def may_ask(self) -> bool:
        """Whether to connect may need a password, before which nothing is printed."""
        return self.cluster is not None

    @property
    def starts_together(self) -> bool:
        """Whether several runs can be one request."""
        return self.cluster is not None and kind_of(self.cluster).starts_together

    def connect(self, ssh_config: Path | None) -> Fleet:
        """Raises NodesFailed."""
        return connect(self.hosts, self.runtime, ssh_config, ping=False)


def own_machines(job: Job) -> Destination:
    return Destination(job.hosts(), job.runtime)


def on_cluster(name: str) -> Destination:
    """Return a cluster of the settings file. Raises UsageError."""
    host = cluster_host(name)
    return Destination([(host, host)], None, read_settings(os.environ).cluster(name))
