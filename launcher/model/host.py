"""Hosts that are no ssh alias: in a plan, a record and a label a cluster is written `slurm:NAME`."""

from __future__ import annotations

_CLUSTER = "slurm:"


def cluster_host(name: str) -> str:
    """The host of every node of a run on this cluster of the settings file."""
    return _CLUSTER + name


def cluster_name(host: str) -> str | None:
    """Of the cluster that this host is; None where it is a machine."""
    return host.removeprefix(_CLUSTER) if host.startswith(_CLUSTER) else None
