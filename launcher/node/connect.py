"""Connect to nodes in parallel, from host names to engines, and report every failure.

Modules that a runtime does not need are not imported: plain processes need neither paramiko nor docker-py.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from launcher import features
from launcher.errors import LauncherError, NodesFailed, NodeUnfit
from launcher.job.settings import Cluster, read_settings
from launcher.model.facts import NodeFacts
from launcher.model.host import cluster_name
from launcher.model.limits import AnswerLimits
from launcher.node.engine import Engine
from launcher.node.parallel import run_all, run_all_catching
from launcher.node.process.engine import ProcessEngine
from launcher.node.ssh.config import CONNECT_TIMEOUT, Resolver

if TYPE_CHECKING:
    from launcher.node.docker.engine import DockerEngine
    from launcher.node.ssh.connection import SshPool

T = TypeVar("T")
LOCAL = "local"
_LOADING = threading.Lock()


@dataclass(frozen=True)
class Access:
    """How a cluster is reached. timeout: seconds to connect. ask: its login machine may prompt for a password."""

    ssh_config: str | None
    limits: AnswerLimits
    timeout: float
    ask: bool


# Called with host (`slurm:CLUSTER`), settings and access, one cluster after another. What it returns connects the
# engine, together with those of other hosts. Both raise LauncherError.
ReachCluster: TypeAlias = Callable[[str, Cluster, Access], Callable[[], Engine]]


class Fleet:
    """The connected nodes of a run, by rank. Leaving its context closes all connections.

    `failed`: the errors of nodes that are not in `engines`, by node name; empty unless connect() allows failures.
    `no_engine`: why `local` has only its processes, if also its container engine was asked for.
    """

    ssh_config: str | None = None
    no_engine: LauncherError | None = None

    def __init__(self, engines: Sequence[Engine], failed: Mapping[str, LauncherError], pool: SshPool | None) -> None:
        self.engines = tuple(engines)
        self.failed = dict(failed)
        self._pool = pool
        self._closed = False

    def each(self, do: Callable[[Engine], T]) -> list[T]:
        """Call `do` for all nodes in parallel; return the results by rank. Raises NodesFailed with all errors."""
        return run_all([partial(do, engine) for engine in self.engines])

    def facts(self) -> list[NodeFacts]:
        """Return the facts of every node, by rank. Raises NodesFailed."""
        return self.each(lambda engine: engine.facts())

    def only(self, nodes: Sequence[str]) -> Fleet:
        """Return a fleet of these nodes. It shares the connections of this one, which alone closes them."""
        part = Fleet([engine for engine in self.engines if engine.node in nodes], {}, None)
        part.ssh_config = self.ssh_config
        return part

    def close(self) -> None:
        if self._closed:  # the runs of a job array share a fleet
            return
        self._closed = True
        for engine in self.engines:
            engine.close()
        if self._pool:
            self._pool.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(
    hosts: Sequence[tuple[str, str]],
    runtime: str | None = None,
    ssh_config: str | Path | None = None,
    *,
    allow_failures: bool = False,
    ping: bool = True,
    timeout: float = CONNECT_TIMEOUT,
    ask: bool = True,
) -> Fleet:
    """Return engines for these (node name, host) pairs, by rank.

    host: `local`, an ssh alias, user@host:port or `slurm:CLUSTER`.
    runtime: docker | process; None if unknown: `local` then gives this machine's processes and, if its container
    engine responds, that too; every other host gives its container engine.
    allow_failures: collect nodes that fail in `Fleet.failed`. ping: check that each engine responds; not needed by a
    caller that sends all of them a request anyway, as `up` does for their facts. timeout: seconds to connect, if the
    ssh config has no ConnectTimeout. ask: a cluster's login machine may prompt for a password.
    Raises NodesFailed with every failure: NodeUnreachable, HostKeyUnknown, HostKeyChanged,
    AuthFailed, EngineUnavailable, EngineForbidden, UsageError, NodeUnfit for `local` if this machine is not Linux.
    """
    limits = _answer_limits()
    names = {host: name for _, host in hosts if (name := cluster_name(host)) is not None}
    clusters = {host: read_settings(os.environ).cluster(name) for host, name in names.items()}
    config = str(ssh_config) if ssh_config else None
    access = Access(config, limits, timeout, ask)
    # Sequentially and before anything else: ssh may prompt for passwords.
    reached = {host: _reach(host, cluster, access) for host, cluster in clusters.items()}
    remote = [host for _, host in hosts if host != LOCAL and host not in clusters]
    pool = _make_pool(remote, config, timeout) if remote else None
    opened = [
        partial(_open_cluster, reached[host])
        if host in clusters
        else partial(_open, node, host, runtime, pool, limits, ping)
        for node, host in hosts
    ]
    try:
        outcomes = run_all_catching(opened)
    except BaseException:
        if pool:
            pool.close()
        raise
    failed = {
        node: outcome for (node, _), outcome in zip(hosts, outcomes, strict=True) if isinstance(outcome, LauncherError)
    }
    found = [each for outcome in outcomes if not isinstance(outcome, LauncherError) for each in outcome]
    engines = [each for each in found if not isinstance(each, LauncherError)]
    fleet = Fleet(engines, failed, pool)
    fleet.ssh_config = config
    fleet.no_engine = next((each for each in found if isinstance(each, LauncherError)), None)
    if failed and not allow_failures:
        fleet.close()
        raise NodesFailed(list(failed.values()), of=len(hosts))
    return fleet


@contextmanager
def caller_engine() -> Iterator[DockerEngine | None]:
    """Yield the container engine of this machine; None if it does not respond."""
    engine = _local_docker(LOCAL, _answer_limits())
    try:
        yield engine if _unanswered(engine) is None else None
    finally:
        engine.close()


def _answer_limits() -> AnswerLimits:
    limits = read_settings(os.environ).limits
    return AnswerLimits(limits.answer, limits.wait)


def _local_docker(node: str, limits: AnswerLimits) -> DockerEngine:
    _load_containers()
    from launcher.node.import_gate import local_engine

    return local_engine(node, LOCAL, limits)


def _make_pool(hosts: Sequence[str], ssh_config: str | None, timeout: float) -> SshPool:
    """Return a pool for these hosts. OpenSSH resolves them while Python loads paramiko."""
    resolver = Resolver(ssh_config)
    for host in hosts:
        resolver.begin(host)
    _load_containers()
    from launcher.node.ssh.connection import SshPool

    return SshPool(ssh_config, timeout, resolver)


def _load_containers() -> None:
    """Import docker-py in one thread at a time: its modules have import cycles, and a second thread could get one that
    is only partially initialized."""
    with _LOADING:
        import launcher.node.import_gate  # noqa: F401


def _open(
    node: str, host: str, runtime: str | None, pool: SshPool | None, limits: AnswerLimits, ping: bool
) -> list[Engine | LauncherError]:
    """Return the engines of a host, or of `local` the error of its container engine in its place."""
    if host == LOCAL and runtime is not None and sys.platform != "linux":
        system = "macOS" if sys.platform == "darwin" else sys.platform
        fix = "use machines that run Linux, for example nodes: [gpu-a, gpu-b]"
        raise NodeUnfit(node, f"nodes must run Linux, but this machine runs {system}", fix)
    if host == LOCAL and runtime != "docker":
        processes = ProcessEngine(node, limits)
        if runtime == "process":
            return [processes]
        containers = _local_docker(node, limits)
        return [processes, _unanswered(containers) or containers]
    if pool is None or host == LOCAL:
        engine = _local_docker(node, limits)
    else:
        from launcher.node.import_gate import remote_engine

        engine = remote_engine(node, host, pool, limits)
    if ping:
        engine.open()
    return [engine]


def _reach(host: str, cluster: Cluster, access: Access) -> Callable[[], Engine] | LauncherError:
    kinds = {kind: entry for feature in features.FEATURES.values() for kind, entry in feature.engines.items()}
    reach: ReachCluster = features.load(kinds[cluster.kind])
    try:
        return reach(host, cluster, access)
    except LauncherError as error:
        return error


def _open_cluster(opener: Callable[[], Engine] | LauncherError) -> list[Engine | LauncherError]:
    if isinstance(opener, LauncherError):
        raise opener
    return [opener()]


def _unanswered(engine: DockerEngine) -> LauncherError | None:
    """Return why a container engine does not answer; None if it does."""
    try:
        engine.open()
    except LauncherError as error:
        return error
    return None
