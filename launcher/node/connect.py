"""From names of hosts to engines that answer: all nodes at once, every failure reported.

What a runtime does not need is not loaded: plain processes need neither paramiko nor docker.
"""

from __future__ import annotations

import getpass
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from launcher.errors import LauncherError, NodesFailed, UsageError
from launcher.job.scalars import ANY
from launcher.model.facts import NodeFacts
from launcher.model.limits import DEFAULT_LIMITS, AnswerLimits, settings_file
from launcher.node.engine import Engine
from launcher.node.machine import LocalMachine, Machine
from launcher.node.parallel import in_background, run_all, run_all_settled
from launcher.node.ssh.config import CONNECT_TIMEOUT, Resolver

if TYPE_CHECKING:
    from launcher.job.settings import Cluster
    from launcher.node.docker.engine import DockerEngine
    from launcher.node.ssh.connection import SshPool

T = TypeVar("T")
LOCAL = "local"
CLUSTER = "slurm:"  # of a host: the rest is the name of a cluster in the settings file; one engine for all its nodes
_LOADING = threading.Lock()


class Fleet:
    """The nodes of a run by rank, connected. Closes all connections at its end.

    `failed`: why a node is not among `engines`, by its name; always empty unless connect() was to allow failures.
    """

    def __init__(self, engines: Sequence[Engine], failed: Mapping[str, LauncherError], pool: SshPool | None) -> None:
        self.engines = tuple(engines)
        self.failed = dict(failed)
        self._pool = pool

    def each(self, do: Callable[[Engine], T]) -> list[T]:
        """`do` on every node at once, results by rank. Raises NodesFailed with every node's error."""
        return run_all([partial(do, engine) for engine in self.engines])

    def facts(self) -> list[NodeFacts]:
        """Raises NodesFailed."""
        return self.each(lambda engine: engine.facts())

    def close(self) -> None:
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
) -> Fleet:
    """Engines for these (node name, host), by rank. host: `local`, an ssh alias, user@host:port or `slurm:CLUSTER`.

    runtime: docker | process; None where it is not known: then `local` gives this machine's processes and, where it
    has one that answers, its container engine too, and every other host its container engine.
    allow_failures: nodes that fail are in `Fleet.failed`. ping: make sure that each engine answers; a caller that
    asks all of them something at once, as `up` does for their facts, gets the same errors then. timeout: seconds to
    connect, where the ssh config has no ConnectTimeout.
    Raises NodesFailed with all that failed: NodeUnreachable, HostKeyUnknown, HostKeyChanged,
    AuthFailed, EngineUnavailable, EngineForbidden, UsageError.
    """
    limits = _answer_limits()
    if any(host == ANY for _, host in hosts):
        what = "says how many nodes of a cluster, not which machines"
        raise UsageError("nodes", what, "name the cluster: up --on CLUSTER; or the machines: nodes: [a, b]")
    clusters = {host: _cluster(host) for _, host in hosts if host.startswith(CLUSTER)}
    logins = [clusters[host].login if host in clusters else host for _, host in hosts]
    remote = [login for login in logins if login != LOCAL]
    pool = _make_pool(remote, str(ssh_config) if ssh_config else None, timeout) if remote else None
    opened = [
        partial(_open_cluster, host, clusters[host], pool, limits)
        if host in clusters
        else partial(_open, node, host, runtime, pool, limits, ping)
        for node, host in hosts
    ]
    try:
        outcomes = run_all_settled(opened)
    except BaseException:
        if pool:
            pool.close()
        raise
    failed = {
        node: outcome for (node, _), outcome in zip(hosts, outcomes, strict=True) if isinstance(outcome, LauncherError)
    }
    engines = [engine for outcome in outcomes if not isinstance(outcome, LauncherError) for engine in outcome]
    fleet = Fleet(engines, failed, pool)
    if failed and not allow_failures:
        fleet.close()
        raise NodesFailed(list(failed.values()), of=len(hosts))
    return fleet


@contextmanager
def caller_engine() -> Iterator[DockerEngine | None]:
    """The container engine of this machine, None where none answers us."""
    engine = _local_docker(LOCAL, _answer_limits())
    try:
        yield engine if _answers(engine) else None
    finally:
        engine.close()


def _answer_limits() -> AnswerLimits:
    """The user's own. Most users have no settings file: then nothing is loaded to read it."""
    if not settings_file(os.environ).exists():
        return DEFAULT_LIMITS
    from launcher.job.settings import read_settings

    limits = read_settings(os.environ).limits
    return AnswerLimits(limits.answer, limits.wait)


def _local_docker(node: str, limits: AnswerLimits) -> DockerEngine:
    """The engine of DOCKER_HOST or of the current docker context, else the usual socket."""
    _load_docker()
    from launcher.node.docker.channel import dial_local
    from launcher.node.docker.engine import DockerEngine

    return DockerEngine(node, LOCAL, LocalMachine(node, getpass.getuser(), limits), partial(dial_local, node))


def _make_pool(hosts: Sequence[str], ssh_config: str | None, timeout: float) -> SshPool:
    """OpenSSH resolves the hosts while Python loads paramiko."""
    resolver = Resolver(ssh_config)
    for host in hosts:
        resolver.begin(host)
    from launcher.node.ssh.connection import SshPool

    in_background(_load_docker)  # while the nodes shake hands
    return SshPool(ssh_config, timeout, resolver)


def _load_docker() -> None:
    """In one thread at a time: docker-py's own modules import one another in circles, and a second thread would find
    one of them half loaded. To be called before any import of node/docker here."""
    with _LOADING:
        import launcher.node.docker.engine  # noqa: F401


def _open(
    node: str, host: str, runtime: str | None, pool: SshPool | None, limits: AnswerLimits, ping: bool
) -> list[Engine]:
    if host == LOCAL and runtime != "docker":
        from launcher.node.process.engine import ProcessEngine

        processes: Engine = ProcessEngine(node, limits)
        containers = None if runtime == "process" else _local_docker(node, limits)
        return [processes, containers] if containers and _answers(containers) else [processes]
    if pool is None or host == LOCAL:
        engine = _local_docker(node, limits)
    else:
        from launcher.node.docker import DIAL_STDIO
        from launcher.node.ssh.machine import SshMachine

        machine = SshMachine(node, host, pool, limits)
        machine.begin(DIAL_STDIO)
        _load_docker()  # after that: it takes a while
        from launcher.node.docker.channel import dial_over_ssh
        from launcher.node.docker.engine import DockerEngine

        dial, ssh = partial(dial_over_ssh, machine.command), (machine.host, machine.ssh_config)
        engine = DockerEngine(node, host, machine, dial, ssh)
    if ping:
        engine.open()
    return [engine]


def _cluster(host: str) -> Cluster:
    from launcher.job.settings import read_settings

    return read_settings(os.environ).cluster(host.removeprefix(CLUSTER))


def _open_cluster(host: str, cluster: Cluster, pool: SshPool | None, limits: AnswerLimits) -> list[Engine]:
    from launcher.node.slurm.engine import SlurmEngine

    if cluster.login == LOCAL or pool is None:
        machine: Machine = LocalMachine(host, getpass.getuser(), limits)
    else:
        from launcher.node.ssh.machine import SshMachine

        machine = SshMachine(host, cluster.login, pool, limits)
    engine = SlurmEngine(host, cluster, machine)
    engine.open()
    return [engine]


def _answers(engine: DockerEngine) -> bool:
    try:
        engine.open()
    except LauncherError:  # there is none
        return False
    return True
