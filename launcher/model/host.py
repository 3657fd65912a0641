"""Hosts that are not ssh aliases: plans, records and labels refer to a cluster as `slurm:NAME`."""

from __future__ import annotations

_CLUSTER = "slurm:"


def cluster_host(name: str) -> str:
    """Return the host of all nodes of a run on this cluster. name: in the settings file."""
    return _CLUSTER + name


def cluster_name(host: str) -> str | None:
    """Return the name of the cluster that this host refers to; None if it is a machine."""
    return host.removeprefix(_CLUSTER) if host.startswith(_CLUSTER) else None
