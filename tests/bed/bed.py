"""The bed as tests use it: its nodes, running commands on them, and finding what was left over there."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bed import cluster
from tests.bed.settings import SITE_PACKAGES_IN_NODE, TRAINER, VENV_IN_NODE, Settings
from tests.bed.shell import CommandFailed, output, run
from tests.bed.sshfiles import SshFiles

LAUNCHER_LABEL = "launcher."
# The processes of an idle node; all others were left over by a test.
AT_REST = re.compile(
    r"/sbin/docker-init --|sleep infinity$|dockerd --|containerd --config|sshd: .*\[listener\]|ps -eo|.*<defunct>"
)


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

    containers: tuple[str, ...] = ()  # with a label that begins with `launcher.`, stopped ones too
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
        containers = [
            f"{item['Name'].lstrip('/')} {item['State']['Status']}"
            for item in self._inspect(node)
            if any(label.startswith(LAUNCHER_LABEL) for label in item["Config"]["Labels"] or {})
        ]
        networks = self.docker(node, "network", "ls", "--filter", "type=custom", "--format", "{{.Name}}").splitlines()
        volumes = self.docker(node, "volume", "ls", "-q").splitlines()
        script = (
            "find /dev/shm /tmp /var/tmp -mindepth 1; ls -d /root/.launcher/* /home/*/.launcher/* 2>/dev/null || true"
        )
        found = self.sh(node, script)
        paths = found.splitlines()
        return Leftovers(
            containers=tuple(containers),
            networks=tuple(networks),
            volumes=tuple(volumes),
            processes=tuple(self._processes(node)),
            shm=tuple(path for path in paths if path.startswith("/dev/shm/")),
            tmp=tuple(path for path in paths if path.startswith(("/tmp/", "/var/tmp/"))),
            home=tuple(path for path in paths if "/.launcher/" in path),
        )

    def wait_clean(self, nodes: Sequence[Node] | None = None, timeout: float = 5, *, home: bool = False) -> list[str]:
        """Waits until nothing is left over on the nodes; returns what still is after `timeout` seconds.

        Lines have the form `alias: kind: entry`. An ssh session ends a moment after its client, hence the wait.
        """
        deadline = time.monotonic() + timeout
        while True:
            lines = [
                f"{node.alias}: {line}"
                for node in nodes or self.nodes
                for line in self.leftovers(node).lines(home=home)
            ]
            if not lines or time.monotonic() > deadline:
                return lines
            time.sleep(0.2)

    def sweep(self, node: Node) -> None:
        """Removes all containers, volumes, files and processes that an idle node does not have."""
        script = [
            "docker ps -aq | xargs -r docker rm -f -v",
            "docker network prune -f",
            "docker volume prune -f",
            "find /dev/shm /tmp /var/tmp -mindepth 1 -delete",
            "rm -rf /root/.launcher /home/*/.launcher",
            f"pkill -u {TRAINER} || true",
        ]
        self.sh(node, "\n".join(["set -e", *script]))

    def _inspect(self, node: Node) -> list[Any]:
        for _ in range(3):  # a container may be removed between list and inspect
            ids = self.docker(node, "ps", "-aq", "--no-trunc").split()
            if not ids:
                return []
            done = self.run(node, "docker", "container", "inspect", *ids, check=False)
            if done.returncode == 0:
                return list(json.loads(done.stdout))
        raise CommandFailed(f"{node.alias}: containers come and go too fast to be listed: {done.stderr.strip()}")

    def _processes(self, node: Node) -> list[str]:
        listed = self.run(node, "ps", "-eo", "pid=,user=,args=").stdout.splitlines()
        fields = [line.split(None, 2) for line in listed]
        return [f"{pid} {user} {args}" for pid, user, args in fields if not AT_REST.match(args)]
