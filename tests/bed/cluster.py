"""The nodes of a bed: created, reused if they match the request, recovered, removed."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.bed import host, images
from tests.bed.addresses import Addresses
from tests.bed.host import docker
from tests.bed.settings import (
    BASE_IMAGE,
    CONTAINER_PYTHON,
    NODE_IMAGE,
    SITE_PACKAGES_IN_NODE,
    TRAIN_IMAGE,
    VENV_IN_NODE,
    BedUnavailable,
    Settings,
)
from tests.bed.shell import CommandFailed, locked_file, run, succeeds
from tests.bed.sshfiles import SshFiles

SHARED = "shared"  # the lock of everything that beds share: the engine, images, addresses
BENCHMARKING_RANGE = ipaddress.ip_network("198.18.0.0/15")  # RFC 2544: never routed, so traffic stays on this machine
LABEL = "launcher-bed"  # without the prefix `launcher.`, by which leftover checks find the launcher's containers
FINGERPRINT = "launcher-bed.fingerprint"
READY_TIMEOUT = 60.0  # seconds for a node's sshd and engine
UNPRIVILEGED = [
    *("--cap-add", "ALL", "--cap-drop", "SYS_RESOURCE", "--security-opt", "seccomp=unconfined"),
    *("--security-opt", "apparmor=unconfined", "--security-opt", "systempaths=unconfined"),
    *("-v", "/sys/fs/cgroup:/sys/fs/cgroup:rw"),
]


@contextlib.contextmanager
def locked(settings: Settings, what: str = "change") -> Iterator[None]:
    """A lock: one process at a time changes a bed, and one test session (`what="session"`) at a time uses it."""
    with locked_file(settings.cache / f"{settings.name}.{what}.lock"):
        yield


def up(
    settings: Settings, nodes: int = 2, *, install: bool = True, say: Callable[[str], None] = lambda _: None
) -> list[int]:
    """Brings the bed up with at least `nodes` nodes, reusing existing ones; returns the indices of its nodes.

    Without `install`, nothing on this machine outside its Docker engine changes. Raises BedUnavailable, CommandFailed.
    """
    if not (settings.site_packages).is_dir():
        raise BedUnavailable(
            f"{settings.venv} has no {CONTAINER_PYTHON} site-packages, which the bed's Debian 12 containers need"
        )
    with locked(settings):
        with locked_file(settings.cache / f"{SHARED}.lock"):
            if install:
                host.ensure(settings)
            else:
                host.require_engine()
            say("engine answers")
            images.ensure(settings)
            say("images ready")
            addresses = _network(settings)
        indices = sorted({*range(1, nodes + 1), *existing(settings)})
        files = SshFiles(settings.state)
        files.make_keys(indices)
        files.write({index: addresses.node(index) for index in indices}, addresses.blackhole, addresses.no_route)
        with ThreadPoolExecutor(len(indices)) as pool:
            list(pool.map(lambda index: _ensure_node(settings, files, addresses, index), indices))
            say("nodes answer")
            list(pool.map(lambda index: preload(settings, index, TRAIN_IMAGE), indices))
            say(f"{TRAIN_IMAGE} on every node")
    return indices


def down(settings: Settings, *, purge: bool = False, stop_engine: bool = False) -> None:
    """Removes nodes with their volumes, the network and the state; keeps images and caches unless `purge`."""
    with locked(settings):
        engine = host.engine_answers()
        if engine:
            containers = docker("ps", "-aq", "--filter", f"label={LABEL}={settings.name}").split()
            if containers:
                docker("rm", "-f", "-v", *containers)
            with locked_file(settings.cache / f"{SHARED}.lock"):
                if succeeds(["docker", "network", "inspect", settings.name]):
                    docker("network", "rm", settings.name)
            if purge:
                images.purge(settings)
        run(["rm", "-rf", "--", str(settings.state)])
        if stop_engine and engine and not docker("ps", "-q"):  # other containers may need it
            host.stop_engine(settings)


def addresses_of(settings: Settings) -> Addresses:
    """The address plan of a bed that is up; raises BedUnavailable if it is down."""
    done = run(["docker", "network", "inspect", "-f", "{{(index .IPAM.Config 0).Subnet}}", settings.name], check=False)
    if done.returncode:
        raise BedUnavailable(f"the bed {settings.name} is down: `python -m tests.bed up` brings it up")
    return Addresses(ipaddress.IPv4Network(done.stdout.strip()))


def wait_ready(settings: Settings, index: int, timeout: float = READY_TIMEOUT) -> None:
    """Waits until the node's sshd and engine answer; raises CommandFailed with the last lines of the node's logs."""
    address = addresses_of(settings).node(index)
    name = settings.container(index)
    deadline = time.monotonic() + timeout
    while not (_greets(address) and succeeds(["docker", "exec", name, "docker", "info", "-f", "{{.ID}}"])):
        if time.monotonic() > deadline:
            log = run(["docker", "logs", "--tail", "5", name], check=False)
            engine = run(["docker", "exec", name, "tail", "-n", "5", "/var/log/dockerd.log"], check=False)
            raise CommandFailed(f"{name} was not ready within {timeout:.0f} s: {log.stdout}{log.stderr}{engine.stdout}")
        time.sleep(0.1)


def preload(settings: Settings, index: int, image: str) -> None:
    """Copies an image of this machine's engine to a node's, unless the node has that same image."""
    name = settings.container(index)
    found = run(["docker", "exec", name, "docker", "image", "inspect", "-f", "{{.Id}}", image], check=False)
    if found.stdout.strip() == images.image_id(image):
        return
    with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as save:
        load = subprocess.run(
            ["docker", "exec", "-i", name, "docker", "load", "-q"], stdin=save.stdout, capture_output=True, check=False
        )
    if save.returncode or load.returncode:
        raise CommandFailed(f"could not copy {image} to {name}: {load.stderr.decode().strip()}")


def existing(settings: Settings) -> list[int]:
    """Indices of this bed's nodes, running or not."""
    names = docker("ps", "-a", "--filter", f"label={LABEL}={settings.name}", "--format", "{{.Names}}").split()
    return sorted(int(name.rpartition("-node")[2]) for name in names)


def _network(settings: Settings) -> Addresses:
    """The bed's bridge, on the first /24 of the benchmarking range that no other network of this engine uses."""
    with contextlib.suppress(BedUnavailable):
        return addresses_of(settings)
    taken = []
    for network in json.loads(docker("network", "inspect", *docker("network", "ls", "-q").split())):
        taken += [ipaddress.ip_network(item["Subnet"]) for item in network["IPAM"]["Config"] or [] if "Subnet" in item]
    for subnet in BENCHMARKING_RANGE.subnets(new_prefix=24):
        if not any(subnet.version == other.version and subnet.overlaps(other) for other in taken):
            docker("network", "create", "--subnet", str(subnet), "--label", f"{LABEL}={settings.name}", settings.name)
            return Addresses(ipaddress.IPv4Network(subnet))
    raise BedUnavailable(f"every /24 of {BENCHMARKING_RANGE} is taken by a Docker network")


def _ensure_node(settings: Settings, files: SshFiles, addresses: Addresses, index: int) -> None:
    """Makes sure that the node exists as requested, running and ready; a node with other settings is replaced."""
    name = settings.container(index)
    rights = _rights(name)
    wanted = hashlib.sha256(b"".join([
        (images.image_id(NODE_IMAGE) or "").encode(), str(settings.venv).encode(), addresses.node(index).encode(),
        files.key.read_bytes(), files.host_key(index).read_bytes(), " ".join(rights).encode(),
    ])).hexdigest()  # fmt: skip
    state = run(
        ["docker", "inspect", "-f", f'{{{{index .Config.Labels "{FINGERPRINT}"}}}} {{{{.State.Status}}}}', name],
        check=False,
    )
    fingerprint, _, status = state.stdout.strip().partition(" ")
    if fingerprint == wanted and status == "running":
        # If the environment was deleted and recreated at the same path, the node still has the old one mounted.
        mounted = run(["docker", "exec", name, "test", "-d", SITE_PACKAGES_IN_NODE], check=False).returncode == 0
        fingerprint = wanted if mounted else "stale"
    if fingerprint != wanted:
        run(["docker", "rm", "-f", "-v", name], check=False)
        _create(settings, files, addresses, index, [*rights, "--label", f"{FINGERPRINT}={wanted}"])
        status = "created"
    if status == "paused":
        docker("unpause", name)
    elif status != "running":
        docker("start", name)
    try:
        wait_ready(settings, index, READY_TIMEOUT if status != "running" else 10)
    except CommandFailed:
        if status != "running":
            raise
        docker("restart", "-t", "1", name)  # a killed test left a fault behind: power-cycle it
        wait_ready(settings, index)


def _create(settings: Settings, files: SshFiles, addresses: Addresses, index: int, more: list[str]) -> None:
    name = settings.container(index)
    docker(
        *("create", "--name", name, "--hostname", f"node{index}", "--init", "--label", f"{LABEL}={settings.name}"),
        *("--network", settings.name, "--ip", addresses.node(index), "--shm-size=1g"),
        *("--tmpfs", "/tmp:exec,mode=1777", "--tmpfs", "/run:exec"),
        *("-v", f"{settings.venv}:{VENV_IN_NODE}:ro"),
        *(["-e", f"BED_BLACKHOLE={addresses.blackhole}"] if index == 1 else []),
        *more,
        NODE_IMAGE,
    )
    folder = Path(settings.state) / f"node{index}"
    folder.mkdir(exist_ok=True)
    (folder / "authorized_keys").write_bytes(files.key.with_suffix(".pub").read_bytes())
    (folder / "host_key").write_bytes(files.host_key(index).read_bytes())
    docker("cp", f"{folder}/.", f"{name}:/etc/bed")


def _rights(name: str) -> list[str]:
    """--privileged if this machine allows it, else all capabilities but SYS_RESOURCE, which some sandboxes refuse."""
    probe = f"{name}-probe-{os.getpid()}"
    allowed = succeeds(
        ["docker", "run", "--rm", "--name", probe, "--network", "none", "--privileged", BASE_IMAGE, "true"]
    )
    if not allowed:
        run(["docker", "rm", "-f", probe], check=False)
    return ["--privileged"] if allowed else UNPRIVILEGED


def _greets(address: str) -> bool:
    """Whether an ssh server sends its identification on port 22 (RFC 4253, 4.2)."""
    try:
        with socket.create_connection((address, 22), timeout=1) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
