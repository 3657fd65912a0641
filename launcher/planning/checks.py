"""Checks of a node's facts: ok, warn or fail, and the fix. Pure functions.

`launcher doctor` prints all checks; `up` refuses nodes with FAIL and warns about WARN, by the same rules.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from launcher.faults import disk
from launcher.job.arguments import argv_of
from launcher.job.models import Job
from launcher.job.scalars import NumberOfSeconds, show_duration
from launcher.model.checked import OUTPUT_ROOT
from launcher.model.facts import CLOCK_SLACK, ImageFacts, NodeFacts
from launcher.model.version import version_numbers

SMALL_SHM = 1 << 30
LITTLE_DISK = 40 << 30  # an NVIDIA PyTorch image has 20 GiB or more, and is unpacked next to its archive
NO_DISK = 2 << 30
_NETWORK = re.compile(r"nfs|cifs|smb|fuse\.|lustre|beegfs|gpfs|ceph|9p")
_SNAP = "/var/snap/docker/"
_EXPANDED_BY_A_SHELL = re.compile(r"^~(/|$)|\$(\w|\{\w)")
OLDEST = {
    "Docker": "20.10",  # the oldest tested version
    "podman": "4.0",  # the oldest version with a tested Docker API
}


class Level(str, Enum):
    """Severity, the worst last."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """Result of one check. `fix`: how to fix it, for all levels except OK."""

    node: str
    name: str
    level: Level
    what: str
    fix: str = ""


def written(job: Job) -> list[str]:
    """Return a note for each value that may mean something else: a variable that a shell would expand, but is passed as
    written, a duration without a unit, and a hang_timeout that the budget always precedes.
    """
    every = [job.env, *(entry.env for entry in job.machines)]
    named = {name: value for env in every for name, value in env.items() if _EXPANDED_BY_A_SHELL.search(value)}
    durations = {key: getattr(job, key) for key in ("timeout", "budget", "hang_timeout", "lost_after")}
    bare = {key: value for key, value in durations.items() if isinstance(value, NumberOfSeconds)}
    late = []
    if job.budget is not None and job.hang_timeout is not None and job.hang_timeout >= job.budget:
        told = f"is not shorter than the budget of {show_duration(job.budget)}, which ends a hang first, as done"
        late = [f"hang_timeout: {show_duration(job.hang_timeout)} {told}"]
    return [
        *(f"env {name}: {text} is passed as written; ~ and variables are not expanded" for name, text in named.items()),
        *(f"{key}: {value} is {show_duration(value)}: without a unit it is in seconds" for key, value in bare.items()),
        *late,
    ]


def of_node(node: NodeFacts, job: Job | None = None) -> list[Check]:
    """Return all checks of a single node except those of its GPUs. job: the job it will run, if known."""
    containers = job is None or job.traits.has_images
    found = [_clock(node), *([engine(node, job), _disk(node)] if containers else [])]
    found += output(node, job)
    if job is not None and job.resources.output is not None:
        found.append(output_room(node, job.resources.output))
    if containers and (job is None or job.docker.ipc == "host"):
        found.append(_shm(node))
    return found


def another_port(port: int) -> str:
    return f"choose another port: --set port={port + 1 if port < 65535 else port - 1}"


def wait_or_stop(run: str, hosts: Sequence[str], other: str) -> str:
    """Return the fix for a GPU or port that a run holds. other: the alternative. hosts: of all its nodes; none of a
    `doctor --bench`, which no `down` stops."""
    if not hosts:
        return f"wait for it: --wait; or {other}"
    stop = f"launcher down {run} --nodes {','.join(dict.fromkeys(hosts))}"
    return f"wait for it: --wait; {other}; or stop that run: {stop}"


def engine(node: NodeFacts, job: Job | None = None) -> Check:
    """Return whether the node's container engine can run the job."""
    facts = node.engine
    if facts is None:
        return Check(
            node.name, "engine", Level.FAIL, "no container engine was found", "install Docker Engine on the node"
        )
    if facts.root_dir.startswith(_SNAP) and (check := _snap(node, job)) is not None:
        return check
    numbers, oldest = version_numbers(facts.version), OLDEST[facts.kind]
    if numbers and numbers < version_numbers(oldest):
        what = f"{facts.kind} {facts.version} is too old"
        return Check(node.name, "engine", Level.FAIL, what, f"{oldest} or newer is needed")
    if facts.kind == "podman" and job is not None and job.restarts:
        what = "podman reports a container that it is about to restart as exited, so restarts cannot be followed"
        return Check(node.name, "engine", Level.FAIL, what, "set restarts: 0, or use Docker on the node")
    rootless = ", rootless" if facts.rootless else ""
    what = f"{facts.kind} {facts.version}{rootless}, {facts.store}, user {node.user} may use it"
    return Check(node.name, "engine", Level.OK, what)


def _snap(node: NodeFacts, job: Job | None) -> Check | None:
    """Return why a Docker that was installed by snap cannot run the job; None if it sees all folders that it mounts."""
    own = "install Docker's own packages: docs.docker.com/engine/install, after sudo snap remove docker"
    unseen = "Docker was installed by snap, which"
    if not _in_home(node.output_root, node):
        what = f"{unseen} cannot mount hidden folders of a home, such as ~/.launcher, and shows containers other "
        what += "folders than the node's in place of those outside of homes"
        fix = f"{own}; or, where DISK is a folder of the home that is not hidden, {_moved(node)}"
        return Check(node.name, "engine", Level.FAIL, what, fix)
    sources = [mount.with_home(node.home).source for mount in (job.mounts if job else ())]
    outside = [source for source in sources if not _in_home(source, node)]
    if outside:
        what = f"{unseen} shows containers another folder than the node's in place of {', '.join(outside)}"
        return Check(node.name, "engine", Level.FAIL, what, f"move it into {node.home}; or {own}")
    return None


def _in_home(path: str, node: NodeFacts) -> bool:
    """Whether a folder is in the user's home, and neither hidden nor in a hidden one."""
    inside = path.removeprefix(f"{node.home}/")
    return inside != path and not any(part.startswith(".") for part in inside.split("/"))


def one_machine(nodes: Sequence[NodeFacts]) -> list[Check]:
    """Return a failure for each node that is an earlier one under another name. `local` may be there several times."""
    found, known = [], dict[tuple[str, frozenset[str]], NodeFacts]()
    for node in nodes:
        addresses = frozenset(address for interface in node.interfaces for address in interface.addresses)
        first = known.setdefault((node.boot, addresses), node) if node.boot and addresses else node
        if first.host != node.host:
            what = f"{first.name} and {node.name} are the same machine: both have the same boot ID and addresses"
            fix = "name each machine once; `processes` sets its number of workers"
            found.append(Check(node.name, "machine", Level.FAIL, what, fix))
    return found


def alike(nodes: Sequence[NodeFacts]) -> list[Check]:
    """Return checks of properties that should be the same on all nodes."""
    found = one_machine(nodes)
    values = [node.arch for node in nodes]
    if len(set(values)) > 1:
        what = "; ".join(f"{node.name}: {value}" for node, value in zip(nodes, values, strict=True))
        what = f"differs between nodes: {what}"
        found.append(Check("all", "architecture", Level.WARN, what, "the slowest node limits the speed"))
    return found


def _clock(node: NodeFacts) -> Check:
    if abs(node.clock_offset) <= CLOCK_SLACK:
        return Check(node.name, "clock", Level.OK, f"off by {node.clock_offset:+.2f} s")
    what = f"the clock is off by {node.clock_offset:+.0f} s; times in logs will not match"
    return Check(node.name, "clock", Level.WARN, what, "Synchronize it on the node: sudo timedatectl set-ntp true")


def _shm(node: NodeFacts) -> Check:
    if node.shm_size <= 0 or node.shm_size >= SMALL_SHM:
        return Check(node.name, "shared memory", Level.OK, f"/dev/shm has {node.shm_size >> 20} MiB")  # noqa: S108
    what = f"/dev/shm is only {node.shm_size >> 20} MiB; data loader workers may crash with a bus error"  # noqa: S108
    return Check(
        node.name, "shared memory", Level.WARN, what, "Enlarge it on the node: mount -o remount,size=8g /dev/shm"
    )


def output(node: NodeFacts, job: Job | None = None) -> list[Check]:
    """Return what is wrong with the file system of output folders: no inodes, no programs, no access for the engine."""
    folder, found = f"{node.home}/{OUTPUT_ROOT}", []
    link = f"{_moved(node)}, where DISK is a folder of another disk"
    if node.output_broken:
        what = f"{folder} is a link to {node.output_broken}, which does not exist"
        fix = f"make that folder: mkdir -p {shlex.quote(node.output_broken)}"
        found.append(Check(node.name, "output", Level.FAIL, what, fix))
    if node.output_inodes == 0:
        cause = disk.no_inodes(f"the disk of {folder}")
        found.append(Check(node.name, "output", Level.FAIL, cause.what, cause.fix))
    if node.output_mount.noexec:
        what = f"{folder}, with the code, is on a disk that is mounted noexec: no file in it can be executed itself"
        started = job is not None and job.run.command is not None and job.run.command[0].startswith("./")
        fix = f"start a script with its interpreter (command: [bash, FILE]), or {link}"
        found.append(Check(node.name, "output", Level.FAIL if started else Level.WARN, what, fix))
    facts = node.engine
    if _NETWORK.match(node.output_mount.kind) and facts is not None and not facts.rootless:
        what = (
            f"{folder} is on a network file system ({node.output_mount.kind}), which {facts.kind} must read as root: "
        )
        what += "it cannot if the server has root_squash"
        found.append(Check(node.name, "output", Level.WARN, what, f"if containers are refused, {link}"))
    return found


def _moved(node: NodeFacts) -> str:
    """Return the line that moves ~/.launcher to a folder of another disk, and leaves a link to it."""
    folder = f"{node.home}/{OUTPUT_ROOT}"
    return f"run there: mkdir -p {folder} && mv {folder} DISK/launcher && ln -s DISK/launcher {folder}"


def output_room(node: NodeFacts, needed: int) -> Check:
    """Check the room for output folders against the job's `resources.output`."""
    folder = f"{node.home}/{OUTPUT_ROOT}"
    if node.output_free < 0:
        return Check(
            node.name,
            "output",
            Level.WARN,
            f"free space of {folder} is unknown",
            f"check it on the node: df -h {node.home}",
        )
    free, wanted = (f"{size / (1 << 30):.1f} GiB" for size in (node.output_free, needed))
    what = f"{free} free in {folder}, and the job needs {wanted} (resources.output)"
    if node.output_free >= needed:
        return Check(node.name, "output", Level.OK, what)
    fix = f"free disk space: launcher clean; or, where DISK is a folder of a larger disk, {_moved(node)}"
    return Check(node.name, "output", Level.FAIL, what, fix)


def _disk(node: NodeFacts) -> Check:
    free = node.engine.disk_free if node.engine else -1
    folder = node.engine.root_dir if node.engine else ""
    what = f"{free / (1 << 30):.1f} GiB free in {folder}, where images are stored"
    if free < 0:
        fix = f"check it on the node: df -h {folder}"
        return Check(node.name, "disk", Level.WARN, f"free space of {folder} is unknown", fix)
    fix = "free disk space: launcher clean, docker system df"
    if node.engine and node.engine.inodes_free == 0:
        return Check(node.name, "disk", Level.FAIL, disk.no_inodes(f"{folder}, where images are stored,").what, fix)
    level = Level.FAIL if free < NO_DISK else Level.WARN if free < LITTLE_DISK else Level.OK
    return Check(node.name, "disk", level, what, "" if level is Level.OK else fix)


def decoder(job: Job, image: ImageFacts) -> Check | None:
    """Check which decoder the trainer will use; None if the job does not run it, names one, or it is not known."""
    if job.run.module != "train" or image.decoder is None or "--decoder" in argv_of(job.run.args):
        return None
    if image.decoder:
        where = "in the image" if image.decoder == "image" else "compiled at the start"
        return Check("all", "decoder", Level.OK, f"roi, {where}: about 1.8 times as fast as torchvision's")
    what = "the trainer decodes JPEGs with torchvision; its own decoder, roi, is about 1.8 times as fast"
    fix = "it needs a C compiler and libjpeg-turbo's headers (Debian, Ubuntu: gcc libc6-dev libjpeg-dev)"
    return Check("all", "decoder", Level.WARN, what, fix)
