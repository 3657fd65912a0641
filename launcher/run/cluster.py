"""A kind of cluster: what a feature makes of a job for a cluster of the settings file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from launcher import features
from launcher.job.models import Job
from launcher.job.settings import Cluster
from launcher.model.plan import Plan, RunId
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.planning.checks import Check


@dataclass(frozen=True)
class Kind:
    """All of them raise JobInvalid with every key of the job that the cluster does not support.

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
