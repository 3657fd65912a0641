"""Fault injection: each fault breaks one thing realistically.

The context managers heal at exit, even if the test fails. Everything bypasses the node's network and sshd (docker
exec), so that a broken node can still be repaired.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.bed.bed import Bed, Node
from tests.bed.host import docker, login_shells, newer_engine, podman, rootless
from tests.bed.settings import TRAIN_IMAGE, TRAINER
from tests.bed.shell import CommandFailed
from tests.nvidia import Machine

DATA_ROOT = "/var/lib/docker"
CONTAINERD_ROOT = f"{DATA_ROOT}/containerd-store"
NEWER_ENGINE = "/opt/newer-engine"
PAUSES = 5  # attempts


PODMAN_SOCKET = "/run/podman/podman.sock"
# runc: Debian's default, crun, refuses machines with both cgroup versions
_PODMAN = f"""
set -e
ldconfig
mkdir -p /run/podman
printf '[engine]\nruntime="runc"\ncgroup_manager="cgroupfs"\n' >/etc/containers/containers.conf
printf '[storage]\ndriver="overlay"\ngraphroot="{DATA_ROOT}/podman"\nrunroot="/run/podman/run"\n' \\
    >/etc/containers/storage.conf
podman system service -t 0 unix://{PODMAN_SOCKET} >/var/log/podman.log 2>&1 </dev/null &
timeout 30 sh -c 'until [ -S {PODMAN_SOCKET} ]; do sleep 0.1; done'
chgrp docker /run/podman {PODMAN_SOCKET}
chmod 770 /run/podman {PODMAN_SOCKET}
echo 'SetEnv DOCKER_HOST=unix://{PODMAN_SOCKET}' >/etc/ssh/sshd_config.d/podman.conf
kill -HUP "$(cat /run/sshd.pid)"
"""
_WITHOUT_PODMAN = f"""
rm -f /etc/ssh/sshd_config.d/podman.conf
kill -HUP "$(cat /run/sshd.pid)"
podman rm -af
podman rmi -af
pkill -x podman
rm -rf /run/podman /etc/containers {DATA_ROOT}/podman
"""


ROOTLESS_SOCKET = "/run/user/1001/docker.sock"
_ROOTLESS = f"""
set -e
ldconfig
chmod u+s /usr/bin/newuidmap /usr/bin/newgidmap
echo {TRAINER}:100000:65536 | tee /etc/subuid >/etc/subgid
[ -e /dev/net/tun ] || {{ mkdir -p /dev/net; mknod -m 666 /dev/net/tun c 10 200; }}
chmod 711 {DATA_ROOT}
install -d -o {TRAINER} -m 700 {DATA_ROOT}/rootless /run/user/1001
setpriv --reuid {TRAINER} --regid {TRAINER} --init-groups env HOME=/home/{TRAINER} XDG_RUNTIME_DIR=/run/user/1001 \\
    sh /usr/share/docker.io/contrib/dockerd-rootless.sh --data-root {DATA_ROOT}/rootless \\
    >/var/log/rootless.log 2>&1 </dev/null &
timeout 60 sh -c 'until DOCKER_HOST=unix://{ROOTLESS_SOCKET} docker version; do sleep 0.2; done' >/dev/null 2>&1
echo 'SetEnv DOCKER_HOST=unix://{ROOTLESS_SOCKET}' >/etc/ssh/sshd_config.d/rootless.conf
kill -HUP "$(cat /run/sshd.pid)"
"""
_WITHOUT_ROOTLESS = f"""
rm -f /etc/ssh/sshd_config.d/rootless.conf
kill -HUP "$(cat /run/sshd.pid)"
kill "$(cat /run/user/1001/docker.pid)"
pkill -x rootlesskit
timeout 20 sh -c 'while pgrep -x rootlesskit; do sleep 0.2; done'
chmod 710 {DATA_ROOT}
rm -rf {DATA_ROOT}/rootless /run/user/1001 /etc/subuid /etc/subgid
"""


@contextlib.contextmanager
def paused(node: Node) -> Iterator[None]:
    """A hung machine: all processes stop, including the containers'; connections stay open, unanswered."""
    for left in range(PAUSES, 0, -1):
        try:
            docker("pause", node.container)
            break
        except CommandFailed:  # on a busy machine the kernel does not freeze a group in time: "unable to freeze"
            if left == 1:
                raise
            time.sleep(1)
    try:
        yield
    finally:
        docker("unpause", node.container)


def power_off(node: Node) -> None:
    """Power loss: all processes exit immediately, memory and /dev/shm are lost, disks remain. `power_on` heals."""
    docker("kill", node.container)


def power_on(bed: Bed, node: Node) -> None:
    """Boots the node and waits until sshd and its engine answer; containers with a restart policy restart."""
    docker("start", node.container)
    bed.wait_ready(node)


@contextlib.contextmanager
def powered_off(bed: Bed, node: Node) -> Iterator[None]:
    power_off(node)
    try:
        yield
    finally:
        power_on(bed, node)


@contextlib.contextmanager
def partition(bed: Bed, one: Node, other: Node) -> Iterator[None]:
    """Packets between two nodes are dropped in both directions; both stay reachable from here."""
    _drop(bed, one, "-s", other.address)
    _drop(bed, one, "-d", other.address)
    try:
        yield
    finally:
        heal_network(bed, one)


@contextlib.contextmanager
def isolated(bed: Bed, node: Node) -> Iterator[None]:
    """All packets to and from the node are silently dropped, including those of this machine."""
    _drop(bed, node, "!", "-i", "lo")
    _drop(bed, node, "!", "-o", "lo")
    try:
        yield
    finally:
        heal_network(bed, node)


@contextlib.contextmanager
def blocked_port(bed: Bed, node: Node, port: int) -> Iterator[None]:
    """A firewall on the node drops packets to one TCP port."""
    _drop(bed, node, "-p", "tcp", "--dport", str(port))
    try:
        yield
    finally:
        heal_network(bed, node)


def drop_only(bed: Bed, node: Node, ways: Iterable[tuple[str, str]]) -> None:
    """Replaces the node's network faults: drops its packets, in or out, on these routes, (from, to)."""
    wanted = [
        ("-d", to) if start == node.address else ("-s", start) for start, to in ways if node.address in (start, to)
    ]
    rules = [f"iptables -A BED_FAULT {option} {address} -j DROP" for option, address in wanted]
    bed.sh(node, " && ".join(["iptables -F BED_FAULT", *rules]))


@contextlib.contextmanager
def packet_loss(bed: Bed, node: Node, fraction: float) -> Iterator[None]:
    """Every incoming packet of the node is lost with the given probability (0 to 1)."""
    _drop(bed, node, "!", "-i", "lo", "-m", "statistic", "--mode", "random", "--probability", str(fraction))
    try:
        yield
    finally:
        heal_network(bed, node)


def heal_network(bed: Bed, node: Node) -> None:
    """Removes all network faults of the node."""
    bed.run(node, "iptables", "-F", "BED_FAULT")


def listens(address: str) -> bool:
    """Whether its sshd, which may be exiting, still accepts connections."""
    try:
        socket.create_connection((address, 22), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@contextlib.contextmanager
def without_sshd(bed: Bed, node: Node, *, sessions: bool = True) -> Iterator[None]:
    """sshd is down: new connections are refused, and open ones break too if `sessions`."""
    bed.run(node, "pkill", "-KILL", *(["-x", "sshd"] if sessions else ["-F", "/run/sshd.pid"]))
    while listens(node.address):
        time.sleep(0.05)
    try:
        yield
    finally:
        bed.sh(node, "rm -f /run/sshd.pid; /usr/sbin/sshd")
        bed.wait_ready(node)


def kill_ssh_sessions(bed: Bed, node: Node) -> None:
    """Breaks every open ssh connection to the node; new ones work, so there is nothing to heal."""
    # a session may end by itself before it is killed
    bed.sh(node, 'pgrep ^sshd | grep -vx "$(cat /run/sshd.pid)" | xargs -r kill -KILL || true')


@contextlib.contextmanager
def without_engine(bed: Bed, node: Node) -> Iterator[None]:
    """The Docker engine is killed, as by the OOM killer; its containers' processes run until it is restarted."""
    bed.sh(node, "pkill -KILL -x dockerd; pkill -KILL -x containerd; rm -f /var/run/docker.sock; true")
    try:
        yield
    finally:
        start_engine(bed, node)


def start_engine(bed: Bed, node: Node) -> None:
    """Starts the node's engine after `without_engine` or a crash: the newer one if the node has it."""
    path = f"PATH={NEWER_ENGINE}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    docker("exec", "-d", "-e", path, node.container, "/usr/local/sbin/bed-dockerd.sh")
    bed.wait_ready(node)


@contextlib.contextmanager
def small_shm(bed: Bed, node: Node, size: str = "64m") -> Iterator[None]:
    """/dev/shm as small as Docker's default for containers, too small for data loader workers."""
    before = bed.sh(node, "findmnt -no SIZE -b /dev/shm").strip()
    bed.run(node, "mount", "-o", f"remount,size={size}", "/dev/shm")
    try:
        yield
    finally:
        bed.run(node, "mount", "-o", f"remount,size={before}", "/dev/shm")


@contextlib.contextmanager
def small_disk(bed: Bed, node: Node, path: str, size: str = "1m", owner: str = "trainer") -> Iterator[None]:
    """A file system of `size` at `path` (created if missing), owned by `owner`: writing more fails with ENOSPC."""
    bed.run(node, "install", "-d", "-o", owner, "-g", owner, path)
    bed.run(node, "mount", "-t", "tmpfs", "-o", f"size={size},uid={owner},gid={owner},mode=755", "bed-small", path)
    try:
        yield
    finally:
        bed.run(node, "umount", "-l", path)


@contextlib.contextmanager
def small_data_root(bed: Bed, node: Node, size: str = "64m") -> Iterator[None]:
    """An engine whose disk is nearly full: an empty data root of `size`; the old one with its images is restored."""
    with contextlib.ExitStack() as healing:
        _stop_engine(bed, node)
        healing.callback(start_engine, bed, node)
        bed.run(node, "mount", "-t", "tmpfs", "-o", f"size={size}", "bed-small", DATA_ROOT)
        healing.callback(bed.run, node, "umount", "-l", DATA_ROOT)
        start_engine(bed, node)
        healing.callback(_stop_engine, bed, node)
        yield


@contextlib.contextmanager
def containerd_store(bed: Bed, *nodes: Node) -> Iterator[None]:
    """These nodes get a newer engine with containerd's image store, which has only the Debian image, until exit.

    Such a store assigns an image a different id. Raises BedUnavailable.
    """
    engine = newer_engine(bed.settings)
    settings = f'{{"features": {{"containerd-snapshotter": true}}, "data-root": "{CONTAINERD_ROOT}"}}'
    with contextlib.ExitStack() as healing:
        for node in nodes:
            docker("cp", f"{engine}/.", f"{node.container}:{NEWER_ENGINE}")
            _stop_engine(bed, node)
            healing.callback(start_engine, bed, node)
            healing.callback(bed.sh, node, f"rm -rf /etc/docker/daemon.json {CONTAINERD_ROOT} {NEWER_ENGINE}")
            bed.sh(node, f"mkdir -p /etc/docker && echo '{settings}' > /etc/docker/daemon.json")
            start_engine(bed, node)
            healing.callback(_stop_engine, bed, node)
            bed.preload(node, TRAIN_IMAGE)
        yield


@contextlib.contextmanager
def systemd_cgroups(bed: Bed, node: Node) -> Iterator[None]:
    """The engine uses the systemd cgroup driver; it cannot start containers then, as there is no systemd."""
    with contextlib.ExitStack() as healing:
        _stop_engine(bed, node)
        healing.callback(start_engine, bed, node)
        docker("exec", "-d", node.container, "dockerd", "--exec-opt", "native.cgroupdriver=systemd")
        healing.callback(_stop_engine, bed, node)
        bed.wait_ready(node)
        yield


@contextlib.contextmanager
def podman_engine(bed: Bed, *nodes: Node) -> Iterator[None]:
    """`docker` over ssh reaches podman's socket on these nodes, with an empty image store, until exit.

    Raises BedUnavailable.
    """
    with _other_engine(bed, nodes, podman(bed.settings), _PODMAN, _WITHOUT_PODMAN):
        yield


@contextlib.contextmanager
def rootless_engine(bed: Bed, *nodes: Node) -> Iterator[None]:
    """`docker` over ssh reaches a rootless engine of the ssh user on these nodes, without images, until exit.

    Raises BedUnavailable.
    """
    with _other_engine(bed, nodes, rootless(bed.settings), _ROOTLESS, _WITHOUT_ROOTLESS):
        yield


@contextlib.contextmanager
def _other_engine(bed: Bed, nodes: Sequence[Node], files: Path, begin: str, end: str) -> Iterator[None]:
    """files: a folder to copy to / of each node."""
    with contextlib.ExitStack() as healing:
        for node in nodes:
            docker("cp", f"{files}/.", f"{node.container}:/")
            healing.callback(bed.sh, node, end)
            bed.sh(node, begin)
        yield


def _stop_engine(bed: Bed, node: Node, timeout: float = 30) -> None:
    bed.run(node, "pkill", "-TERM", "-x", "dockerd")
    deadline = time.monotonic() + timeout
    while bed.run(node, "pgrep", "-x", "dockerd", check=False).returncode == 0:
        if time.monotonic() > deadline:
            raise CommandFailed(f"{node.alias}: dockerd did not stop within {timeout:.0f} s")
        time.sleep(0.1)


def _drop(bed: Bed, node: Node, *match: str) -> None:
    bed.run(node, "iptables", "-A", "BED_FAULT", *match, "-j", "DROP")


@contextlib.contextmanager
def fake_gpus(bed: Bed, node: Node, count: int = 2, *, toolkit: bool = True) -> Iterator[list[str]]:
    """Fake GPUs: an nvidia-smi that lists them and an engine that accepts them; yields their UUIDs.

    Enough to test the assignment of GPUs to runs; nothing can compute on them. toolkit: False for an engine with
    the NVIDIA runtime in its settings, on a node where it is not installed.
    """
    uuids = [f"GPU-{node.index:08x}-0000-0000-0000-{index:012x}" for index in range(count)]
    lines = "".join(f"{index}, {uuid}, Fake GPU, 16000, 580.95.05\\n" for index, uuid in enumerate(uuids))
    hook = "nvidia-container-runtime-hook"
    bed.sh(
        node,
        f"printf '#!/bin/sh\\nprintf \"{lines}\"\\n' > /usr/local/bin/nvidia-smi\n"
        f"printf '#!/bin/sh\\nexit 0\\n' > /usr/local/bin/{hook}\n"
        f"chmod 755 /usr/local/bin/nvidia-smi /usr/local/bin/{hook}\n"
        f"{'' if toolkit else f'rm /usr/local/bin/{hook}'}\n"
        'echo \'{"runtimes": {"nvidia": {"path": "runc"}}}\' > /etc/docker/daemon.json',
    )
    with contextlib.ExitStack() as healing:
        healing.callback(bed.wait_ready, node)
        healing.callback(docker, "exec", "-d", node.container, "/usr/local/sbin/bed-dockerd.sh")
        healing.callback(_stop_engine, bed, node)
        healing.callback(bed.sh, node, f"rm -f /usr/local/bin/nvidia-smi /usr/local/bin/{hook} /etc/docker/daemon.json")
        _stop_engine(bed, node)
        start_engine(bed, node)
        yield uuids


@contextlib.contextmanager
def nvidia(bed: Bed, node: Node, machine: Machine) -> Iterator[None]:
    """The node resembles `machine`: PCI bus, device files, and a stand-in for nvidia-smi if the machine has it."""
    smi, bus, tree = "/usr/local/bin/nvidia-smi", "/sys/bus/pci/devices", "/opt/nvidia-test"
    files = " ".join(machine.files)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as healing:
        machine.tree(Path(folder))
        if machine.smi:
            machine.install(Path(folder))
        Path(folder).chmod(0o755)
        healing.callback(bed.sh, node, f"umount {bus}; rm -rf {tree} {smi} {files}")
        docker("cp", folder, f"{node.container}:{tree}")
        bed.sh(
            node,
            f"set -e; [ ! -e {tree}/nvidia-smi ] || mv {tree}/nvidia-smi {smi}; mount --bind {tree}/devices {bus}; "
            f"for file in {files}; do mknod -m 666 $file c 1 3; done",
        )
        yield


@contextlib.contextmanager
def sshd_setting(bed: Bed, node: Node, line: str) -> Iterator[None]:
    """An additional line in the node's sshd_config, for connections made from now on."""
    file, reload = "/etc/ssh/sshd_config.d/fault.conf", "kill -HUP $(cat /run/sshd.pid); sleep 0.3"
    bed.sh(node, f"echo '{line}' > {file}; {reload}")
    bed.wait_ready(node)
    try:
        yield
    finally:
        bed.sh(node, f"rm {file}; {reload}")
        bed.wait_ready(node)


@contextlib.contextmanager
def login_shell(bed: Bed, node: Node, shell: str) -> Iterator[None]:
    """Another login shell of the ssh user: tcsh, zsh, fish, or the path of a program."""
    if "/" not in shell:
        docker("cp", f"{login_shells(bed.settings)}/.", f"{node.container}:/")
        bed.run(node, "ldconfig")
    bed.run(node, "usermod", "-s", shell if "/" in shell else f"/usr/local/bin/{shell}", TRAINER)
    try:
        yield
    finally:
        bed.run(node, "usermod", "-s", "/bin/bash", TRAINER)
