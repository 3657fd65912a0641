"""The secrets and names of a run: in its record and its job, in the ssh config, of the caller, and on its nodes."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError
from launcher.features.report.masking import Names, secret_values
from launcher.job.files import is_here, known_secrets
from launcher.job.models import Job
from launcher.job.scalars import LOCAL
from launcher.job.settings import read_settings
from launcher.model.checked import OUTPUT_ROOT
from launcher.model.facts import NodeFacts
from launcher.model.home import home, user_name
from launcher.model.host import cluster_name
from launcher.model.labels import OWNER
from launcher.model.plan import plain
from launcher.node.ssh.config import Resolver, parse_host
from launcher.planning.checks import Check
from launcher.records.masking import fsspec_values
from launcher.records.store import Record, read_json


def names_of(
    record: Record | None,
    job: Job | None,
    hosts: Sequence[str],
    seen: Sequence[Check | NodeFacts],
    ssh_config: Path | None,
) -> Names:
    """Return what must not be in a report. hosts: that were asked; seen: what doctor has found there."""
    nodes, plan = (record.nodes(), read_json(record.paths.plan) or {}) if record else ((), {})
    of_node = {node.name: {node.name} for node in nodes}
    others, users, keys = {socket.gethostname()}, {*_caller()}, set[str]()
    homes = {node.output.partition(f"/{OUTPUT_ROOT}/")[0] for node in nodes if cluster_name(node.host) is None}
    addresses = record.interfaces() if record else {}
    for node in nodes:
        of_node[node.name].add(addresses.get(node.rank, ("", ""))[1])
    machines = {node.name: node.host for node in nodes}
    more = [*hosts, *(record.other_hosts() if record else ())]
    machines |= {host: host for host in more if host not in machines.values()}
    others |= {cluster_name(host) or "" for host in machines.values()}
    resolver = Resolver(str(ssh_config) if ssh_config else None)
    logins = {name: login for name, host in machines.items() if (login := _login(host)) != LOCAL}
    answers = {name: resolver.begin(login) for name, login in logins.items()}
    for name, answer in answers.items():
        known = of_node.setdefault(name, set()) if cluster_name(machines[name]) is None else others
        with suppress(LauncherError, ValueError):
            written = parse_host(logins[name])
            known.add(written.host)
            users.add(written.user)
            target = answer()
            known.add(target.hostname)
            users.add(target.user)
            keys |= {*target.identity_files}
    for owner in _owners(plan):
        users.add(owner.rpartition("@")[0])
        others.add(owner.rpartition("@")[2])
    for each in seen:
        if isinstance(each, NodeFacts):
            users |= {each.user, *(process.user for gpu in each.gpus for process in gpu.processes)}
        elif each.name == "reachable" and (shown := re.match(r"(\S+)@([^\s,]+)", each.what)):
            users.add(shown[1])
            of_node.setdefault(each.node, set()).add(shown[2])
    return Names(
        secrets=[*_secrets(record, job), *secret_values(plan), *secret_values({**os.environ})],
        users=sorted(users - {""}),
        homes=sorted({*homes, str(home(os.environ))}),
        nodes=[sorted(each) for each in of_node.values()],
        hosts=sorted((others | {*_stores(job, plan)}) - {""}),
        keys=sorted(keys),
    )


def _login(host: str) -> str:
    """Return the machine that ssh connects to for this host."""
    with suppress(LauncherError):
        return host if (name := cluster_name(host)) is None else read_settings(os.environ).cluster(name).login
    return LOCAL


def _caller() -> Iterator[str]:
    yield from (os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER"))
    yield user_name()


def _owners(plan: dict[str, Any]) -> Iterator[str]:
    nodes = plan.get("nodes")
    for node in nodes if isinstance(nodes, list) else ():
        with suppress(LookupError, TypeError):
            yield str(node["container"]["labels"][OWNER])


def _secrets(record: Record | None, job: Job | None) -> Iterator[str]:
    if record is not None and job is not None:
        yield from known_secrets(job, record.paths.root.parent.parent, os.environ)[0]  # where `up` was called
        yield from secret_values(plain(job.model_dump()))
        yield from fsspec_values(job.env)
    yield from fsspec_values(os.environ)
    with suppress(LauncherError):
        yield read_settings(os.environ).notify.webhook


def _stores(job: Job | None, plan: dict[str, Any]) -> Iterator[str]:
    """Yield the machines of the image's registry and of the job's data."""
    registry, slash, _ = str(plan.get("image", "")).partition("/")
    if slash and {".", ":"} & {*registry}:
        yield registry.partition(":")[0]
    for data in job.data if job else ():
        if not is_here(data.source) and "://" not in data.source:
            yield data.source.partition(":")[0].rpartition("@")[2]
