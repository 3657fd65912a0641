"""A Slurm of several nodes on this machine: munged, slurmctld and a slurmd per node, with its own folder and ports.

Debian's packages, no systemd, no cgroups; LAUNCHER_SLURM_SUITE takes Slurm from a newer suite. LAUNCHER_BED_NAME
separates beds; to start one manually: `python -m tests.slurm up|down`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bed.host import apt_lock
from tests.bed.settings import BedUnavailable
from tests.bed.shell import run
from tests.slurm import newer

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "openssh-server", "openssh-client")
NODES = 4
_BEDS, _PORTS = 500, 20  # number of names with separate ports, below the ephemeral ones
_FIRST_PORT = 18000
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "sshd")
_DAEMONS = ("slurmctld", "slurmd", "slurmstepd", "munged", "sshd")


@dataclass(frozen=True)
class SlurmBed:
    """A bed; `folder` is short, as it contains a Unix socket."""

    name: str
    suite: str = ""  # "": this machine's own

    @classmethod
    def from_environment(cls) -> SlurmBed:
        suite = os.environ.get("LAUNCHER_SLURM_SUITE", "")
        return cls(os.environ.get("LAUNCHER_BED_NAME", "launcher-bed"), suite)

    @property
    def folder(self) -> Path:
        return Path("/tmp", f"slurm-{self.name}")

    @property
    def shared(self) -> Path:
        """The folder that the nodes and the login machine share."""
        return self.folder / "shared"

    @property
    def config(self) -> Path:
        """The file for SLURM_CONF."""
        return self.folder / "slurm.conf"

    def up(self, nodes: int = NODES, *, may_install: bool = True) -> None:
        """Start it. Raises BedUnavailable if this machine cannot run it."""
        if os.geteuid():
            raise BedUnavailable("the Slurm bed needs root")
        install(PACKAGES, _PROGRAMS, allowed=may_install)
        if self.suite and not may_install:
            raise BedUnavailable(f"the Slurm of {self.suite} is unpacked with LAUNCHER_BED_REQUIRED only")
        self.down()
        for name in ("log", "state", "shared"):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        self.config.write_text(self._configuration(nodes))
        (self.folder / "oci.conf").write_text(self._runtime())
        if self.suite:
            (self.folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        kept = {"key-file": key, "socket": self._socket, "pid-file": self.folder / "munged.pid"}
        kept |= {"log-file": self.folder / "log/munged.log", "seed-file": self.folder / "munge.seed"}
        run(["munged", "--force", *(f"--{option}={path}" for option, path in kept.items())])
        self("slurmctld")
        for index in range(1, nodes + 1):
            self._start(f"n{index}")
        self._login()
        deadline = time.monotonic() + 60
        while len(self("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split()) < nodes:
            if time.monotonic() > deadline:
                raise BedUnavailable(f"Slurm did not come up; its logs are in {self.folder}/log")
            time.sleep(0.2)

    @property
    def ssh_config(self) -> Path:
        """An ssh config with the alias `login`: this machine, through the bed's sshd."""
        return self.folder / "ssh_config"

    def _login(self) -> None:
        for name in ("host_key", "key"):
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)])
        port = self._port + _PORTS - 1
        server = {"Port": port, "ListenAddress": "127.0.0.1", "HostKey": self.folder / "host_key", "UsePAM": "no"}
        server |= {"PidFile": self.folder / "sshd.pid", "AuthorizedKeysFile": self.folder / "key.pub"}
        server |= {"StrictModes": "no", "PermitRootLogin": "yes", "SetEnv": self.for_logins}
        (self.folder / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in server.items()))
        kind, key, *_ = (self.folder / "host_key.pub").read_text().split()
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
        client = {"HostName": "127.0.0.1", "Port": port, "User": "root", "IdentityFile": self.folder / "key"}
        client |= {"UserKnownHostsFile": self.folder / "known_hosts", "IdentitiesOnly": "yes"}
        self.ssh_config.write_text("Host login\n" + "".join(f"  {key} {value}\n" for key, value in client.items()))
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        run(["/usr/sbin/sshd", "-f", str(self.folder / "sshd_config")])

    def __call__(self, *argv: str, check: bool = True) -> str:
        """Run a command of Slurm; return its output."""
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, **self.variables}

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that a user of it needs."""
        path = {"PATH": f"{self._newer}/bin:{os.environ['PATH']}"} if self.suite else {}
        return {"SLURM_CONF": str(self.config), **path}

    @property
    def _newer(self) -> Path:
        return newer.unpacked(self.suite)

    @property
    def for_logins(self) -> str:
        """These variables for SetEnv of an sshd."""
        return " ".join(f"{name}={value}" for name, value in self.variables.items())

    @contextlib.contextmanager
    def blind(self, node: str) -> Iterator[None]:
        """Let a node have an empty folder in place of the shared one."""
        hide = 'mount -t tmpfs tmpfs "$1" && shift && exec "$@"'
        self._restart(node, "unshare", "--mount", "sh", "-c", hide, "sh", str(self.shared))
        try:
            yield
        finally:
            self._restart(node)

    def _restart(self, node: str, *within: str) -> None:
        pid = int((self.folder / f"slurmd.{node}.pid").read_text())
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 30
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, f"the slurmd of {node} does not end"
            time.sleep(0.05)
        self._start(node, *within)
        while self("sinfo", "-h", "-n", node, "-o", "%t").strip() != "idle":
            assert time.monotonic() < deadline, f"{node} does not come back"
            time.sleep(0.1)

    def _start(self, node: str, *within: str) -> None:
        steps = ["-d", str(self._newer / "bin/slurmstepd")] if self.suite else []
        self(*within, "slurmd", "-N", node, *steps)

    def jobs(self) -> list[str]:
        """The queue, as `id state name`."""
        return self("squeue", "-h", "-o", "%i %T %j").splitlines()

    def down(self) -> None:
        """Stop all its daemons, also those of a bed that ended half, and remove all its files."""
        if self.config.exists() and self._daemons("slurmctld") and self._daemons("munged"):
            with contextlib.suppress(subprocess.TimeoutExpired):  # a controller that hangs is killed below
                jobs = self("squeue", "-h", "-o", "%i", check=False).split()
                self("scancel", "--full", "--signal=KILL", *jobs, check=False)
                self("scancel", "-u", "root", check=False)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._daemons():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + 20
            while self._daemons() and time.monotonic() < deadline:
                time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _daemons(self, *names: str) -> list[int]:
        """Return the pids of its daemons: their environment or command line names its folder."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # exited
                if (process / "comm").read_text().strip() in (names or _DAEMONS):
                    text = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
                    if f"{self.folder}/".encode() in text:
                        found.append(int(process.name))
        return found

    @property
    def _port(self) -> int:
        return _FIRST_PORT + zlib.crc32(self.name.encode()) % _BEDS * _PORTS

    @property
    def _socket(self) -> Path:
        return self.folder / "munge.sock"

    def _configuration(self, nodes: int) -> str:
        host, here = socket.gethostname(), self.folder
        port = self._port
        lines = {
            "ClusterName": "bed",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={self._socket}",
            "SlurmctldPort": port,
            "SlurmctldPidFile": here / "slurmctld.pid",
            "SlurmdPidFile": here / "slurmd.%n.pid",
            "StateSaveLocation": here / "state",
            "SlurmdSpoolDir": here / "spool.%n",
            "SlurmctldLogFile": here / "log/slurmctld.log",
            "SlurmdLogFile": here / "log/slurmd.%n.log",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/affinity",  # a job can use only the processors that it requested
            "SelectType": "select/cons_tres",
            "ReturnToService": 0,  # a node that was set to down stays down
            "SlurmdParameters": "config_overrides",
            "MpiDefault": "none",
            "KillWait": 5,
            "SlurmdTimeout": 10,
            **({"PluginDir": self._newer / "plugins"} if self.suite else {}),
        }
        daemons = f"NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{port + 1}-{port + nodes}]"
        return "\n".join(
            [
                *(f"{key}={value}" for key, value in lines.items()),
                f"{daemons} CPUs=2 RealMemory=2000",
                f"PartitionName=all Nodes=n[1-{nodes}] Default=YES State=UP",
                "",
            ]
        )

    def _runtime(self) -> str:
        """Return the configuration for `srun --container`: runc, a dependency of Debian's docker.io."""
        runc, name = f"runc --root={self.folder}/runc", "%n.%u.%j.%s.%t"
        commands = {"Run": f"run {name} -b %b", "Query": f"state {name}", "Kill": f"kill -a {name}"}
        commands["Delete"] = f"delete --force {name}"
        return "".join(f'RunTime{key}="{runc} {command}"\n' for key, command in commands.items())


def install(packages: Sequence[str], programs: Sequence[str], *, allowed: bool) -> None:
    """Install Debian packages if one of their programs is missing. Raises BedUnavailable if that is not possible."""
    if all(map(shutil.which, programs)):
        return
    if not allowed or shutil.which("apt-get") is None:
        raise BedUnavailable(f"Debian's packages {' '.join(packages)} are missing; LAUNCHER_BED_REQUIRED installs them")
    with apt_lock():
        if not all(map(shutil.which, programs)):
            _install(packages)


def _install(packages: Sequence[str]) -> None:
    run(["apt-get", "update", "-q"])
    # The tests start daemons with their own configurations; policy-rc.d keeps packages from starting them.
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        run(
            ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-qy", "--no-install-recommends", *packages]
        )
    finally:
        if ours:
            policy.unlink()
