"""The bed as tests use it: its nodes, running commands on them, and finding what was left over there."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.bed import cluster
from tests.bed.settings import SITE_PACKAGES_IN_NODE, TRAINER, VENV_IN_NODE, Settings
from tests.bed.shell import output, run
from tests.bed.sshfiles import SshFiles

LAUNCHER_LABEL = "launcher."
# The processes of an idle node; all others were left over by a test.
AT_REST = re.compile(
    r"/sbin/docker-init --|sleep infinity$|dockerd --|containerd --config|sshd: .*\[listener\]|.*<defunct>"
)
# A call of `docker` takes 25 ms of processor time, and few nodes have such networks or volumes.
_NETWORKS, _VOLUMES = "ls -d /sys/class/net/br-* >/dev/null 2>&1", "ls -d /var/lib/docker/volumes/*/ >/dev/null 2>&1"
# Lists everything on a node, one line `KIND ENTRY` each; `shell PID` is the script itself. One command, for speed.
_LIST = f"""
set -e
docker ps -a --format 'container {{{{.Names}}}} {{{{.State}}}} {{{{.Labels}}}}'
! {_NETWORKS} || docker network ls --filter type=custom --format 'network {{{{.Name}}}}'
! {_VOLUMES} || docker volume ls --format 'volume {{{{.Name}}}}'
find /dev/shm /tmp /var/tmp -mindepth 1 -printf 'file %p\\n' 2>/dev/null || true
for path in /root/.launcher/* /home/*/.launcher/*; do
    case $path in */cache) continue ;; esac # of an image, and stays as that does
    [ ! -e "$path" ] || echo "home $path"
done
echo "shell $$"
ps -eo pid=,ppid=,user=,args= | sed 's/^/process /'
"""
# A removal may fail if a container or process exits at the same time, so it is retried.
_SWEEP = f"""
set -e
timeout 60 sh -c 'while ids=$(docker ps -aq) && [ -n "$ids" ]; do docker rm -f -v $ids || sleep 0.2; done'
! {_NETWORKS} || docker network prune -f
! {_VOLUMES} || docker volume prune -f
pkill -u {TRAINER} || true
clear() {{ find /dev/shm /tmp /var/tmp -mindepth 1 -delete && rm -rf /root/.launcher /home/*/.launcher; }}
clear || {{ sleep 0.5; clear; }}
"""


@dataclass(frozen=True)
class Node:
    """One machine of the bed."""

    index: int  # from 1
    alias: str  # in the bed's ssh config; logs in as the user `trainer`
    address: str
    container: str  # on this machine's engine


@dataclass(frozen=True)
class Leftovers:
    """What was left over on a node; each entry is one line that a failed assertion can print."""

    containers: tuple[str, ...] = ()  # with a label that starts with `launcher.`, stopped ones too
    networks: tuple[str, ...] = ()  # user-defined
    volumes: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    shm: tuple[str, ...] = ()  # /dev/shm
    tmp: tuple[str, ...] = ()  # /tmp and /var/tmp
    home: tuple[str, ...] = ()  # ~/.launcher of every user; output folders may stay

    def lines(self, *, home: bool = True) -> list[str]:
        """All leftovers as `kind: entry`; without the output folders if `home` is false."""
        kinds = ["containers", "networks", "volumes", "processes", "shm", "tmp", *(["home"] if home else [])]
        return [f"{kind}: {entry}" for kind in kinds for entry in getattr(self, kind)]


@dataclass(frozen=True)
class Bed:
    """A bed that is up."""

    settings: Settings
    nodes: tuple[Node, ...]
    files: SshFiles = field(repr=False)

    @classmethod
    def attach(cls, settings: Settings) -> Bed:
        """The bed as it is now; raises BedUnavailable if it is down."""
        addresses = cluster.addresses_of(settings)
        nodes = [
            Node(index, f"node{index}", addresses.node(index), settings.container(index))
            for index in cluster.existing(settings)
        ]
        return cls(settings, tuple(nodes), SshFiles(settings.state))

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`, `launcher --ssh-config` and LAUNCHER_SSH_CONFIG."""
        return self.files.config

    @property
    def known_hosts(self) -> Path:
        """The nodes' real host keys."""
        return self.files.known_hosts

    @property
    def key(self) -> Path:
        """The client key that the nodes accept."""
        return self.files.key

    @property
    def wrong_key(self) -> Path:
        """A client key that they do not accept."""
        return self.files.wrong_key

    @property
    def blackhole(self) -> str:
        """An address that never answers."""
        return cluster.addresses_of(self.settings).blackhole

    def run(
        self, node: Node, *argv: str, check: bool = True, user: str = "root", timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the node without ssh: it works while the network or sshd is down. Raises CommandFailed."""
        return run(["docker", "exec", "-u", user, node.container, *argv], check=check, timeout=timeout)

    def sh(self, node: Node, script: str, *, user: str = "root", timeout: float = 120) -> str:
        """Runs a shell script on the node; returns its standard output. Raises CommandFailed."""
        return self.run(node, "sh", "-c", script, user=user, timeout=timeout).stdout

    def docker(self, node: Node, *argv: str, timeout: float = 120) -> str:
        """Runs `docker ARGV` on the node's engine; returns its output, stripped. Raises CommandFailed."""
        return self.run(node, "docker", *argv, timeout=timeout).stdout.strip()

    def ssh(self, alias: str, *argv: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs a command through OpenSSH with the bed's config. Raises CommandFailed."""
        options = ["-F", str(self.ssh_config), "-o", "BatchMode=yes", "-o", f"ConnectTimeout={int(timeout)}"]
        return run(["ssh", *options, alias, *argv], check=check, timeout=timeout + 5)

    def state(self, node: Node) -> str:
        """running, paused, exited, ..."""
        return output(["docker", "inspect", "-f", "{{.State.Status}}", node.container])

    def preload(self, node: Node, image: str) -> None:
        """Copies an image of this machine's engine to the node."""
        cluster.preload(self.settings, node.index, image)

    def wait_ready(self, node: Node, timeout: float = cluster.READY_TIMEOUT) -> None:
        """Waits until sshd and the engine answer. Raises CommandFailed."""
        cluster.wait_ready(self.settings, node.index, timeout)

    def torch_options(self) -> list[str]:
        """Options of `docker run` and `docker create` for a container with torch and the node's network."""
        mounted = ["-v", f"{VENV_IN_NODE}:{VENV_IN_NODE}:ro", "-e", f"PYTHONPATH={SITE_PACKAGES_IN_NODE}"]
        return ["--init", "--network", "host", "--ipc", "host", *mounted, "-e", "OMP_NUM_THREADS=1"]

    def leftovers(self, node: Node) -> Leftovers:
        """Everything on the node that an idle node does not have."""
        seen: dict[str, list[str]] = {}
        for line in self.sh(node, _LIST).splitlines():
            kind, _, entry = line.partition(" ")
            seen.setdefault(kind, []).append(entry)
        containers = [entry.split(" ", 2) for entry in seen.get("container", [])]
        files, [shell] = seen.get("file", []), seen["shell"]
        processes = [entry.split(None, 3) for entry in seen["process"]]
        return Leftovers(
            containers=tuple(
                f"{name} {state}"
                for name, state, labels in containers
                if any(label.startswith(LAUNCHER_LABEL) for label in labels.split(","))
            ),
            networks=tuple(seen.get("network", [])),
            volumes=tuple(seen.get("volume", [])),
            processes=tuple(
                f"{pid} {user} {argv}"
                for pid, parent, user, argv in processes
                if shell not in (pid, parent) and not AT_REST.match(argv)
            ),
            shm=tuple(path for path in files if path.startswith("/dev/shm/")),
            tmp=tuple(path for path in files if path.startswith(("/tmp/", "/var/tmp/"))),
            home=tuple(seen.get("home", [])),
        )

    def wait_clean(self, nodes: Sequence[Node] | None = None, timeout: float = 60, *, home: bool = False) -> list[str]:
        """Waits until nothing is left over on the nodes; returns what still is after `timeout` seconds.

        Lines have the form `alias: kind: entry`. An ssh session ends a moment after its client, hence the wait.
        """
        deadline = time.monotonic() + timeout
        chosen = nodes or self.nodes
        while True:
            with ThreadPoolExecutor(len(chosen)) as pool:
                found = [left.lines(home=home) for left in pool.map(self.leftovers, chosen)]
            lines = [f"{node.alias}: {line}" for node, left in zip(chosen, found, strict=True) for line in left]
            if not lines or time.monotonic() > deadline:
                return lines
            time.sleep(0.2)

    def sweep(self, *nodes: Node) -> None:
        """Removes all containers, volumes, files and processes of these nodes (all) that an idle node does not have."""
        chosen = nodes or self.nodes
        with ThreadPoolExecutor(len(chosen)) as pool:
            list(pool.map(lambda node: self.sh(node, _SWEEP), chosen))
