"""What a node's facts say of it: fit, questionable or unfit, and the fix. Pure.

`launcher doctor` prints all of it; `up` refuses FAIL and warns of WARN, by the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from launcher.job.models import Job
from launcher.model.facts import NodeFacts

SMALL_SHM = 1 << 30
CLOCK_SLACK = 5.0
LITTLE_DISK = 40 << 30  # an NVIDIA PyTorch image is 20 GiB and more, and is unpacked beside its archive
NO_DISK = 2 << 30
OLDEST = {
    "Docker": "20.10",  # the oldest that was tried
    "podman": "4.0",  # the oldest whose Docker API was tried
}


class Level(str, Enum):
    """How bad it is, the worst last."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """The result of one check. `fix`: what to do, for everything but OK."""

    node: str
    name: str
    level: Level
    what: str
    fix: str = ""


def of_node(node: NodeFacts, job: Job | None = None) -> list[Check]:
    """Everything about one node by itself but its GPUs. job: what it is to run, if that is known."""
    docker = job is None or job.runtime == "docker"
    found = [_clock(node), *([engine(node, job), _disk(node)] if docker else [])]
    if docker and (job is None or job.docker.ipc == "host"):
        found.append(_shm(node))
    return found


def master_port(job: Job, master: NodeFacts) -> Check:
    if job.port not in master.listening:
        return Check(master.name, "port", Level.OK, f"{job.port} is free for the rendezvous")
    what = f"port {job.port}, where the ranks would meet, is in use"
    fix = "stop what listens there (another run? `launcher runs`), or choose another: --set port=29501"
    return Check(master.name, "port", Level.FAIL, what, fix)


def engine(node: NodeFacts, job: Job | None = None) -> Check:
    """Whether the node's container engine can run it."""
    facts = node.engine
    if facts is None:
        return Check(node.name, "engine", Level.FAIL, "no container engine was found", "install Docker Engine there")
    numbers, oldest = _numbers(facts.version), OLDEST[facts.kind]
    if numbers and numbers < _numbers(oldest):
        what = f"{facts.kind} {facts.version} is too old"
        return Check(node.name, "engine", Level.FAIL, what, f"{oldest} or newer is needed")
    if facts.kind == "podman" and job is not None and job.restarts:
        what = "podman calls a container ended that it is about to restart, so restarts cannot be followed"
        return Check(node.name, "engine", Level.FAIL, what, "restarts: 0, or use Docker there")
    rootless = ", rootless" if facts.rootless else ""
    what = f"{facts.kind} {facts.version}{rootless}, {facts.store}, user {node.user} may use it"
    return Check(node.name, "engine", Level.OK, what)


def alike(nodes: Sequence[NodeFacts]) -> list[Check]:
    """What should be the same on all nodes."""
    found = []
    values = [node.arch for node in nodes]
    if len(set(values)) > 1:
        what = "; ".join(f"{node.name}: {value}" for node, value in zip(nodes, values, strict=True))
        what = f"not the same everywhere: {what}"
        found.append(Check("all", "architecture", Level.WARN, what, "the slowest sets the pace"))
    return found


def _clock(node: NodeFacts) -> Check:
    if abs(node.clock_offset) <= CLOCK_SLACK:
        return Check(node.name, "clock", Level.OK, f"off by {node.clock_offset:+.2f} s")
    what = f"its clock is off by {node.clock_offset:+.0f} s; times in logs will not match"
    return Check(node.name, "clock", Level.WARN, what, "Set it there: sudo timedatectl set-ntp true")


def _shm(node: NodeFacts) -> Check:
    if node.shm_size <= 0 or node.shm_size >= SMALL_SHM:
        return Check(node.name, "shared memory", Level.OK, f"its /dev/shm has {node.shm_size >> 20} MiB")
    what = f"/dev/shm is only {node.shm_size >> 20} MiB; loader workers may die with a bus error"  # noqa: S108
    return Check(node.name, "shared memory", Level.WARN, what, "Enlarge it there: mount -o remount,size=8g /dev/shm")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _disk(node: NodeFacts) -> Check:
    free = node.engine.disk_free if node.engine else -1
    place = node.engine.root_dir if node.engine else ""
    what = f"{free / (1 << 30):.1f} GiB free in {place}, where images go"
    if free < 0:
        return Check(node.name, "disk", Level.WARN, f"free space of {place} is not known", f"look there: df -h {place}")
    fix = "make room: launcher clean, docker system df"
    level = Level.FAIL if free < NO_DISK else Level.WARN if free < LITTLE_DISK else Level.OK
    return Check(node.name, "disk", level, what, "" if level is Level.OK else fix)
