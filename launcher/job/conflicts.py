"""Keys of a job that exclude each other: each check is a pure function from the job to what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.job.hosts import LOCAL, machine
from launcher.job.models import Job
from launcher.job.problems import Path, printable

CODE = "/workspace/code"


@dataclass(frozen=True)
class Conflict:
    """`keys`: the top-level keys involved; if one of them is itself invalid, the conflict is not reported."""

    path: Path
    message: str
    keys: tuple[str, ...]


def conflicts(job: Job) -> list[Conflict]:
    """All conflicts in the job, in the order of the checks below."""
    checks = (_image, _nodes, _process, _paths, _variables, _shm)
    return [conflict for check in checks for conflict in check(job)]


def _image(job: Job) -> Iterator[Conflict]:
    if job.runtime == "docker" and job.image is None:
        message = "needed for runtime docker: {base: ...} or {ref: ...}; or set runtime: process"
        yield Conflict(("image",), message, ("image", "runtime"))


def _nodes(job: Job) -> Iterator[Conflict]:
    seen: dict[tuple[str, str], int] = {}
    names: dict[str, int] = {}
    for rank, node in enumerate(job.nodes):
        first = seen.setdefault(machine(node.host), rank)
        if first != rank and (node.host != LOCAL or job.nodes[first].host != LOCAL):
            yield Conflict(("nodes", rank), f"{node.host} is a node already (entry {first})", ("nodes",))
        elif first != rank and job.runtime == "docker":
            message = "local may repeat only under runtime: process"
            yield Conflict(("nodes", rank), message, ("nodes", "runtime"))
        elif names.setdefault(node.name, rank) != rank:
            message = f"the name {node.name} is given to entry {names[node.name]} already; give it another `name`"
            yield Conflict(("nodes", rank), message, ("nodes",))


def _process(job: Job) -> Iterator[Conflict]:
    """A container's settings are refused for plain processes: a limit that is not kept is worse than none."""
    if job.runtime != "process":
        return
    for rank, node in enumerate(job.nodes):
        if node.host != LOCAL:
            message = f"runtime process runs on this machine only: expected local, not {node.host}"
            yield Conflict(("nodes", rank), message, ("nodes", "runtime"))
        elif node.address is not None:
            message = "runtime process meets on this machine's own address; leave it out"
            yield Conflict(("nodes", rank, "address"), message, ("nodes", "runtime"))
    for part in ("docker", "resources"):
        settings = getattr(job, part)
        for key, field in type(settings).model_fields.items():
            if getattr(settings, key) != field.default:
                message = "has no effect without containers; leave it out, or set runtime: docker"
                yield Conflict((part, key), message, (part, "runtime"))
    for mount in job.mounts:
        if mount.source != mount.target:
            source = printable(mount.source)
            message = f"plain processes see files where they are: expected {source} as target, or runtime: docker"
            yield Conflict(("mounts", mount.source), message, ("mounts", "runtime"))


def _paths(job: Job) -> Iterator[Conflict]:
    if job.runtime != "docker":
        return
    for mount in job.mounts:
        if inside(mount.target, CODE):
            message = f"{mount.target} would hide the code, which is at {CODE}"
            yield Conflict(("mounts", mount.source), message, ("mounts", "runtime"))
        if mount.target == job.output:
            message = f"{mount.target} is the run's output folder; mount elsewhere, or set output"
            yield Conflict(("mounts", mount.source), message, ("mounts", "output", "runtime"))
    if inside(job.output, CODE):
        yield Conflict(("output",), f"{job.output} would hide the code, which is at {CODE}", ("output", "runtime"))


def inside(folder: str, path: str) -> bool:
    """Whether `path` is `folder` or below it; both absolute and in normal form."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _variables(job: Job) -> Iterator[Conflict]:
    seen: set[str] = set()
    message = "is a secret too; a secret's value does not stand in the job file: leave one of them out"
    for index, secret in enumerate(job.secrets):
        if secret.name in seen:
            yield Conflict(("secrets", index), f"{secret.name} is listed twice", ("secrets",))
        seen.add(secret.name)
        if secret.name in job.env:
            yield Conflict(("env", secret.name), message, ("env", "secrets"))
    for rank, node in enumerate(job.nodes):
        for name in sorted(seen & set(node.env)):
            yield Conflict(("nodes", rank, "env", name), message, ("nodes", "secrets"))


def _shm(job: Job) -> Iterator[Conflict]:
    if job.runtime == "docker" and job.resources.shm is not None and job.docker.ipc not in ("private", "shareable"):
        message = f"has no effect with docker.ipc {job.docker.ipc}; set docker: {{ipc: private}}, or leave shm out"
        yield Conflict(("resources", "shm"), message, ("resources", "docker", "runtime"))
