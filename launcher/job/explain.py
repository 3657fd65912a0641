"""What is wrong with a job, in terms of the job file: keys, what was expected of them, and keys that exclude others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from pydantic import ValidationError

from launcher.job.models import Job
from launcher.job.parts import DockerOptions, Image, NodeEntry, Part, Resources, Run
from launcher.job.problems import LocatedError, Origin, Path, nearest, printable, show
from launcher.job.scalars import ANY, LOCAL, argv_of, machine
from launcher.model.container import CODE, KIT

# Where, what, and the top-level keys involved: if one of them is itself invalid, the conflict is not reported.
Conflict = tuple[Path, str, set[str]]

_PARTS: Mapping[Path, type[Part]] = {
    (): Job,
    ("image",): Image,
    ("run",): Run,
    ("resources",): Resources,
    ("docker",): DockerOptions,
}

LEAST_SILENCE = 5  # seconds

# Ways of the trainer in which no node has the whole model.
SPLIT = ("fsdp", "model", "pipeline", "dual_batch")

# Other tools' names of these keys.
_SYNONYMS = {
    "cmd": "command",
    "cwd": "code",
    "environment": "env",
    "hosts": "nodes",
    "max_restarts": "restarts",
    "nproc_per_node": "processes",
    "num_gpus": "gpus",
    "shm_size": "shm",
    "volumes": "mounts",
    "workdir": "code",
}


def check(data: Any, origin: Origin) -> tuple[Job | None, list[tuple[Path, str]]]:
    """The job, or everything that is wrong with it. Conflicts are reported even if single keys are invalid, unless
    they involve one of those.
    """
    try:
        job = Job.model_validate(data, context=origin)
    except ValidationError as error:
        found = list(_refused(error))
        wrong = {str(path[0]) for path, _ in found if path}
        if wrong and isinstance(data, Mapping):
            # The valid keys, with placeholders for the required ones that are wrong.
            required = {"name": "x", "nodes": ["local"], "run": {"module": "x"}}
            valid = {key: value for key, value in data.items() if key not in wrong}
            with contextlib.suppress(ValidationError):
                conflicts = _conflicts(Job.model_validate({**required, **valid}))
                found += [(path, message) for path, message, keys in conflicts if not wrong & keys]
        return None, found
    found = [(path, message) for path, message, _ in _conflicts(job)]
    return (None if found else job), found


def _refused(error: ValidationError) -> Iterator[tuple[Path, str]]:
    """Path and message of everything that the models refuse."""
    for detail in error.errors(include_url=False):
        path: Path = tuple(part for part in detail["loc"] if part != "[key]")
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, LocatedError):
            yield from (((*path, *below), message) for below, message in cause.problems)
        elif isinstance(cause, ValueError):
            yield path, str(cause)
        else:
            yield path, _message(detail["type"], path, detail["input"], detail)


def _message(kind: str, path: Path, value: Any, detail: Mapping[str, Any]) -> str:
    if kind == "missing":
        return "required, but not given"
    if kind == "extra_forbidden":
        return "unknown key" + _belongs(path)
    if kind == "string_type":
        return f"expected text, not {show(value)}"
    if kind == "literal_error":
        expected = detail["ctx"]["expected"]
        known = expected.replace("'", "").replace(" or ", ", ").split(", ")
        return f"expected {expected}, not {show(value)}" + (nearest(value, known) if isinstance(value, str) else "")
    if kind in ("model_type", "model_attributes_type", "dict_type", "mapping_type"):
        part = _part_at(path)
        keys = f" with keys such as {', '.join(list(part.model_fields)[:4])}" if part else ""
        return f"expected a mapping{keys}, not {show(value)}"
    if kind in ("tuple_type", "list_type"):
        return f"expected a list, not {show(value)}" + ("; write [...] around it" if isinstance(value, str) else "")
    return str(detail["msg"])


def _belongs(path: Path) -> str:
    """The mapping that has such a key, else the nearest key of the same mapping, else all keys of this one."""
    *parent, last = path
    key, part = str(last), _part_at(tuple(parent))
    if part is None:
        return ""
    known = part.model_fields
    if _SYNONYMS.get(key) in known:
        return f"; did you mean '{_SYNONYMS[key]}'?"
    for place, other in _PARTS.items():
        if key in other.model_fields and other is not part:
            return f"; '{key}' belongs under '{place[0]}'" if place else f"; '{key}' belongs at the top, not indented"
    return nearest(key, known) or f"; expected one of {', '.join(known)}"


def _part_at(path: Path) -> type[Part] | None:
    """The model of the mapping at `path`."""
    return NodeEntry if len(path) == 2 and path[0] in ("nodes", "spares") else _PARTS.get(path)


def _conflicts(job: Job) -> Iterator[Conflict]:
    """Keys that exclude each other."""
    if job.runtime == "docker":
        yield from _docker(job)
    else:
        yield from _process(job)
    yield from _nodes(job)
    yield from _pool(job)
    yield from _elastic(job)
    yield from _variables(job)


def _nodes(job: Job) -> Iterator[Conflict]:
    seen: dict[tuple[str, str], int] = {}
    names: dict[str, int] = {}
    for rank, node in enumerate(job.machines):
        path = _path_of(job, rank)
        key = str(path[0])
        first = rank if node.host == ANY else seen.setdefault(machine(node.host), rank)
        if first != rank and (node.host != LOCAL or job.machines[first].host != LOCAL):
            yield path, f"{node.host} is a node already (entry {first})", {key}
        elif first != rank and job.runtime == "docker":
            yield path, "local may repeat only under runtime: process", {key, "runtime"}
        elif names.setdefault(node.name, rank) != rank:
            message = f"the name {node.name} is given to entry {names[node.name]} already; give it another `name`"
            yield path, message, {key}


def _path_of(job: Job, rank: int) -> Path:
    spare = rank - len(job.nodes)
    return ("nodes", rank) if spare < 0 else ("spares", spare)


def _pool(job: Job) -> Iterator[Conflict]:
    if job.each is None:
        return
    if not job.sweep:
        yield ("nodes",), "a pool is for the variants of a sweep: add one, or list the nodes: [a, b]", {"nodes", "each"}
    if job.each > len(job.nodes):
        yield ("each",), f"the pool has {len(job.nodes)} nodes", {"nodes", "each"}
    if job.min_nodes is not None:
        message = "a variant that loses a node is started on others: leave min_nodes and spares out"
        yield ("min_nodes",), message, {"min_nodes", "each"}


def _elastic(job: Job) -> Iterator[Conflict]:
    least, nodes, spares = job.min_nodes, len(job.nodes), len(job.spares or ())
    if least is None:
        for key in ("spares", "lost_after"):
            if getattr(job, key) and not (key == "lost_after" and job.each):
                yield (key,), "needs min_nodes, the number of nodes with which the run goes on", {key, "min_nodes"}
        return
    if least > nodes:
        yield ("min_nodes",), f"{least} of {nodes} nodes cannot take part", {"min_nodes", "nodes"}
    elif 2 * least <= nodes + spares:
        known = f"{nodes} nodes" + (f" and {spares} spare{'s' * (spares > 1)}" if spares else "")
        message = (
            f"a network that is cut in two could leave {least} of {known} on each side, and both would train; "
            f"expected at least {(nodes + spares) // 2 + 1}, so that 2 x min_nodes > nodes + spares"
        )
        if nodes + spares == 2:
            message = f"two machines survive no loss: {message}; name a third one, as a node or a spare"
        yield ("min_nodes",), message, {"min_nodes", "nodes", "spares"}
    if job.lost_after is not None and job.lost_after < LEAST_SILENCE:
        message = f"a busy machine may be silent for so long; expected {LEAST_SILENCE}s or more"
        yield ("lost_after",), message, {"lost_after", "min_nodes"}
    if job.restarts == 0:
        message = "with 0 no loss is survived, as each takes one of them: leave it out, min_nodes makes it 10"
        yield ("restarts",), message, {"restarts", "min_nodes"}
    if job.sweep:
        message = "its next variant could not begin without a node that the last one has lost: leave min_nodes out"
        yield ("sweep",), message, {"sweep", "min_nodes"}
    words = argv_of(job.run.args) if job.run.module == "train" else ()
    for place, word in enumerate(words[1:], 1):
        if words[place - 1] == "--parallel" and word in SPLIT:
            path: Path = ("run", "args", "parallel" if isinstance(job.run.args, Mapping) else place)
            message = f"with {word} a lost node takes its part of the model with it: leave min_nodes out"
            yield path, message, {"run", "min_nodes"}


def _process(job: Job) -> Iterator[Conflict]:
    """A container's settings are refused for plain processes: a limit that is not kept is worse than none."""
    for rank, node in enumerate(job.machines):
        if node.host not in (LOCAL, ANY):
            message = f"runtime process runs on this machine only: expected local, not {node.host}"
            yield _path_of(job, rank), message, {"nodes", "spares", "runtime"}
        elif node.address is not None:
            message = "runtime process meets on this machine's own address; leave it out"
            yield (*_path_of(job, rank), "address"), message, {"nodes", "spares", "runtime"}
    on_cluster = all(node.host == ANY for node in job.machines)  # which keeps the limits of a plain process too
    for part in ("docker", "resources"):
        settings = getattr(job, part)
        for key, field in type(settings).model_fields.items():
            if getattr(settings, key) != field.default and not (on_cluster and key in ("cpus", "memory")):
                message = "has no effect without containers; leave it out, or set runtime: docker"
                if key in ("cpus", "memory"):
                    message += f". For a cluster (--on) give the nodes by number: nodes: {len(job.nodes)}"
                yield (part, key), message, {part, "runtime"}
    for data in job.data:
        message = "plain processes see files where they are: leave it out, or set runtime: docker"
        yield ("data", data.name), message, {"data", "runtime"}
    for mount in job.mounts:
        if mount.source != mount.target:
            source = printable(mount.source)
            message = f"plain processes see files where they are: expected {source} as target, or runtime: docker"
            yield ("mounts", mount.source), message, {"mounts", "runtime"}


def _docker(job: Job) -> Iterator[Conflict]:
    if job.image is None:
        message = "needed for runtime docker: {base: ...} or {ref: ...}; or set runtime: process"
        yield ("image",), message, {"image", "runtime"}
    for mount in job.mounts:
        if message := _in_the_way(mount.target):
            yield ("mounts", mount.source), message, {"mounts", "runtime"}
        if mount.target == job.output:
            message = f"{mount.target} is the run's output folder; mount elsewhere, or set output"
            yield ("mounts", mount.source), message, {"mounts", "output", "runtime"}
    taken = {job.output: "is the run's output folder", **{m.target: f"has {m.source} already" for m in job.mounts}}
    for data in job.data:
        twice = f"{data.at} {taken[data.at]}; choose another path" if data.at in taken else ""
        if message := _in_the_way(data.at) or twice:
            yield ("data", data.name, "at"), message, {"data", "mounts", "output", "runtime"}
        taken[data.at] = f"has {data.name} already"
    if message := _in_the_way(job.output):
        yield ("output",), message, {"output", "runtime"}
    if job.resources.shm is not None and job.docker.ipc not in ("private", "shareable"):
        message = f"has no effect with docker.ipc {job.docker.ipc}; set docker: {{ipc: private}}, or leave shm out"
        yield ("resources", "shm"), message, {"resources", "docker", "runtime"}


def _in_the_way(target: str) -> str:
    """Why nothing of the user's may be mounted there in a container; "" where it may."""
    if PurePosixPath(CODE).is_relative_to(target):
        return f"{target} would hide the code, which is at {CODE}"
    if PurePosixPath(target).is_relative_to(KIT):
        return f"{KIT} has the launcher's own scripts and the secrets; choose another folder"
    return ""


def _variables(job: Job) -> Iterator[Conflict]:
    seen: set[str] = set()
    message = "is a secret too, and a secret's value is never written in the job file: leave one of them out"
    for index, secret in enumerate(job.secrets):
        if secret.name in seen:
            yield ("secrets", index), f"{secret.name} is listed twice", {"secrets"}
        seen.add(secret.name)
        if secret.name in job.env:
            yield ("env", secret.name), message, {"env", "secrets"}
    for rank, node in enumerate(job.machines):
        for name in sorted(seen & set(node.env)):
            yield (*_path_of(job, rank), "env", name), message, {"nodes", "spares", "secrets"}
