"""Problems of a job in terms of the job file: invalid values of keys, and keys that conflict."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from pydantic import ValidationError

from launcher.job.arguments import argv_of, merged
from launcher.job.models import MOST_VARIANTS, Job
from launcher.job.overrides import variant_name
from launcher.job.parts import DockerOptions, Image, NodeEntry, Part, Resources, RunPart
from launcher.job.problems import LocatedError, Path, Positions, expected, nearest, printable, unknown_key
from launcher.job.scalars import ANY, LOCAL, is_url, machine, show_duration
from launcher.model.container import CODE, KIT

# Path, message, and the top-level keys involved: the conflict is not reported if one of these is invalid.
Conflict = tuple[Path, str, set[str]]

_PARTS: Mapping[Path, type[Part]] = {
    (): Job,
    ("image",): Image,
    ("run",): RunPart,
    ("resources",): Resources,
    ("docker",): DockerOptions,
}

LEAST_SILENCE = 5  # seconds

# Parallel methods of the trainer in which no node has the complete model.
SPLIT = ("fsdp", "hsdp", "model", "pipeline", "dual_batch")

# Names of these keys in other tools.
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


def check(data: Mapping[str, Any], origin: Positions) -> tuple[Job | None, list[tuple[Path, str]]]:
    """Return the job, or all of its problems. Conflicts are reported even if other keys are invalid."""
    try:
        job = Job.model_validate(data, context=origin)
    except ValidationError as error:
        found = list(_refused(error, data, origin))
        wrong = {str(path[0]) for path, _ in found if path}
        if wrong:
            # The valid keys, with placeholders for required ones that are invalid.
            required = {"name": "x", "nodes": ["local"], "run": {"module": "x"}}
            valid = {key: value for key, value in data.items() if key not in wrong}
            with contextlib.suppress(ValidationError):
                conflicts = _conflicts(Job.model_validate({**required, **valid}))
                found += [(path, message) for path, message, keys in conflicts if not wrong & keys]
        return None, found
    found = [(path, message) for path, message, _ in _conflicts(job)]
    return (None if found else job), found


def _refused(error: ValidationError, data: Mapping[str, Any], origin: Positions) -> Iterator[tuple[Path, str]]:
    """Yield path and message of every error of the models."""
    for detail in error.errors(include_url=False):
        path: Path = tuple(part for part in detail["loc"] if part != "[key]")
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, LocatedError):
            yield from (((*path, *below), message) for below, message in cause.problems)
        elif isinstance(cause, ValueError):
            yield path, str(cause)
        elif detail["type"] == "extra_forbidden":
            yield path, "unknown key" + (_hint_of_program(path, data, origin) or _hint(path))
        else:
            part = _part_at(path)
            yield path, expected(detail, list(part.model_fields) if part else ())


def _hint_of_program(path: Path, data: Mapping[str, Any], origin: Positions) -> str:
    """Return a hint for an option of the program: a top-level key, or one of `run`, with the name of an argument."""
    *parent, last = path
    key, run, mark = str(last), data.get("run"), origin.where(path)
    if parent not in ([], ["run"]):
        return ""
    args = run.get("args") if isinstance(run, Mapping) else None
    if isinstance(args, Mapping) and key.replace("-", "_") in [str(arg).replace("-", "_") for arg in args]:
        return f"; did you mean 'run.args.{printable(key)}'?"
    keys = {key for part in _PARTS.values() for key in part.model_fields} | {*_SYNONYMS}
    if mark is None or not mark.source.startswith("--set") or nearest(key, keys, 0.7):
        return ""
    return f"; an option of the program is run.args.{printable(key)}"


def _hint(path: Path) -> str:
    """Return a hint: the mapping that has such a key, else the closest key of this mapping, else all of its keys."""
    *parent, last = path
    key, part = str(last), _part_at(tuple(parent))
    if part is None:
        return ""
    known = part.model_fields
    if _SYNONYMS.get(key) in known:
        return f"; did you mean '{_SYNONYMS[key]}'?"
    for parent_path, other in _PARTS.items():
        if key in other.model_fields and other is not part:
            return f"; '{key}' belongs under '{parent_path[0]}'" if parent_path else f"; '{key}' is a top-level key"
    return unknown_key(key, known)


def _part_at(path: Path) -> type[Part] | None:
    """Return the model of the mapping at `path`."""
    return NodeEntry if len(path) == 2 and path[0] in ("nodes", "spares") else _PARTS.get(path)


def _conflicts(job: Job) -> Iterator[Conflict]:
    """Yield keys that conflict with each other."""
    if job.traits.has_images:
        yield from _docker(job)
    else:
        yield from _process(job)
    yield from _nodes(job)
    yield from _pool(job)
    yield from _sweep(job)
    yield from _codes(job)
    yield from _budget(job)
    yield from _elastic(job)
    yield from _variables(job)
    yield from _arguments(job)


def _nodes(job: Job) -> Iterator[Conflict]:
    seen: dict[tuple[str, str], int] = {}
    names: dict[str, int] = {}
    for rank, node in enumerate(job.machines):
        path = _path_of(job, rank)
        key = str(path[0])
        first = rank if node.host == ANY else seen.setdefault(machine(node.host), rank)
        if first != rank and (node.host != LOCAL or job.machines[first].host != LOCAL):
            yield path, f"{node.host} is already listed as entry {first}", {key}
        elif first != rank and not job.traits.one_machine:
            yield path, "local may be repeated only with runtime: process", {key, "runtime"}
        elif names.setdefault(node.name, rank) != rank:
            message = f"entry {names[node.name]} has the same name, {node.name}; choose another `name`"
            yield path, message, {key}


def _path_of(job: Job, rank: int) -> Path:
    spare = rank - len(job.nodes)
    return ("nodes", rank) if spare < 0 else ("spares", spare)


def _pool(job: Job) -> Iterator[Conflict]:
    if job.each is None:
        return
    if not job.sweep:
        yield ("nodes",), "a pool requires a sweep: add one, or list the nodes: [a, b]", {"nodes", "each", "sweep"}
    if job.each > len(job.nodes):
        yield ("each",), f"the pool has only {len(job.nodes)} nodes", {"nodes", "each"}
    if job.min_nodes is not None:
        message = "in a pool, a variant that loses a node is restarted on other nodes: remove min_nodes and spares"
        yield ("min_nodes",), message, {"min_nodes", "each"}


def _sweep(job: Job) -> Iterator[Conflict]:
    """Variants are known by their names: of two with one name, the result of the first would be lost."""
    seen: dict[str, int] = {}
    for number, args in enumerate(job.sweep):
        name = variant_name(args)
        if (first := seen.setdefault(name, number)) != number:
            what = f"{printable(name) or 'a variant without arguments'} is already listed as entry {first}: remove one"
            yield ("sweep", number), what, {"sweep"}


def _codes(job: Job) -> Iterator[Conflict]:
    if not job.codes:
        return
    if not job.sweep:
        yield ("codes",), "requires a sweep: write sweep: {code: [...]}", {"codes", "sweep"}
    if any(isinstance(args, Mapping) and "code" in args for args in job.sweep):
        message = "the variants of code have this name: write --code for the program's option"
        yield ("sweep",), message, {"codes", "sweep"}
    if (count := len(job.codes) * len(job.sweep)) > MOST_VARIANTS:
        yield ("sweep",), f"has {count:,} variants; expected at most {MOST_VARIANTS:,}", {"codes", "sweep"}


def _budget(job: Job) -> Iterator[Conflict]:
    if job.budget is None:
        return
    if job.timeout is not None and job.budget >= job.timeout:
        message = (
            f"is not reached: `timeout` ends the run, as failed, after {show_duration(job.timeout)}; expected less"
        )
        yield ("budget",), message, {"budget", "timeout"}
    if job.min_nodes is not None:
        message = "is counted on the node of rank 0, which changes with min_nodes: use timeout, or remove min_nodes"
        yield ("budget",), message, {"budget", "min_nodes"}


def _elastic(job: Job) -> Iterator[Conflict]:
    least, nodes, spares = job.min_nodes, len(job.nodes), len(job.spares or ())
    if least is None:
        for key in ("spares", "lost_after"):
            if getattr(job, key) and not (key == "lost_after" and job.each):
                yield (key,), "requires min_nodes, the number of nodes with which the run continues", {key, "min_nodes"}
        return
    if least > nodes:
        yield ("min_nodes",), f"is {least}, but there are only {nodes} nodes", {"min_nodes", "nodes"}
    elif 2 * least <= nodes + spares:
        known = f"{nodes} nodes" + (f" and {spares} spare{'s' * (spares > 1)}" if spares else "")
        message = (
            f"with {known}, a network partition could leave {least} on each side, and both would train; "
            f"expected at least {(nodes + spares) // 2 + 1}, so that 2 x min_nodes > nodes + spares"
        )
        if nodes + spares == 2:
            message = f"two machines cannot tolerate a loss: {message}; add a third one as a node or a spare"
        yield ("min_nodes",), message, {"min_nodes", "nodes", "spares"}
    if job.lost_after is not None and job.lost_after < LEAST_SILENCE:
        message = f"too short, as a busy machine may not respond for that long; expected {LEAST_SILENCE}s or more"
        yield ("lost_after",), message, {"lost_after", "min_nodes"}
    if job.restarts == 0:
        message = "min_nodes needs restarts, as every loss uses one: remove this key (default with min_nodes: 10)"
        yield ("restarts",), message, {"restarts", "min_nodes"}
    if job.sweep:
        message = "a sweep cannot continue on fewer nodes after a loss: remove min_nodes"
        yield ("sweep",), message, {"sweep", "min_nodes"}
    argv = argv_of(job.run.args) if job.run.module == "train" else ()
    for index, method in enumerate(argv[1:], 1):
        if argv[index - 1] == "--parallel" and method in SPLIT:
            path: Path = ("run", "args", "parallel" if isinstance(job.run.args, Mapping) else index)
            message = f"with {method}, a lost node takes its part of the model with it: remove min_nodes"
            yield path, message, {"run", "min_nodes"}


def _process(job: Job) -> Iterator[Conflict]:
    """Settings of containers are errors for plain processes: they would not take effect."""
    for rank, node in enumerate(job.machines):
        if node.host not in (LOCAL, ANY):
            message = f"runtime: process runs on this machine only; expected local, not {node.host}"
            yield _path_of(job, rank), message, {"nodes", "spares", "runtime"}
        elif node.address is not None:
            message = "runtime: process uses an address of this machine; remove this key"
            yield (*_path_of(job, rank), "address"), message, {"nodes", "spares", "runtime"}
    on_cluster = all(node.host == ANY for node in job.machines)  # which enforces limits of plain processes too
    for part in ("docker", "resources"):
        settings = getattr(job, part)
        for key, field in type(settings).model_fields.items():
            possible = key == "output" or (on_cluster and key in ("cpus", "memory"))
            if getattr(settings, key) != field.default and not possible:
                message = "has no effect without containers; remove it, or set runtime: docker"
                if key in ("cpus", "memory"):
                    message += f". For a cluster (--on) give the number of nodes: nodes: {job.each or len(job.nodes)}"
                yield (part, key), message, {part, "runtime"}
    for key in ("cache", "models"):
        if getattr(job, key) != type(job).model_fields[key].default:
            message = "has no effect without containers, as plain processes use your own caches; remove it"
            yield (key,), message, {key, "runtime"}
    for data in job.data:
        message = "plain processes access files directly: remove it, or set runtime: docker"
        if is_url(data.source):
            message = "plain processes get no copies of a URL: download it first, or set runtime: docker"
        yield ("data", data.name), message, {"data", "runtime"}
    for mount in job.mounts:
        if mount.source != mount.target:
            source, home = printable(mount.source), mount.source.startswith("~")
            known = "remove it" if home else f"expected {source} as target, or runtime: docker"
            message = f"plain processes access files directly: {known}"
            yield ("mounts", mount.source), message, {"mounts", "runtime"}


def _docker(job: Job) -> Iterator[Conflict]:
    if job.image is None:
        message = "required for runtime: docker, as {base: ...} or {ref: ...}; or set runtime: process"
        yield ("image",), message, {"image", "runtime"}
    for mount in job.mounts:
        if message := _reserved(mount.target):
            yield ("mounts", mount.source), message, {"mounts", "runtime"}
        if mount.target == job.output:
            message = f"{mount.target} is the run's output folder; choose another target, or set output"
            yield ("mounts", mount.source), message, {"mounts", "output", "runtime"}
    taken = {job.output: "is the run's output folder", **{m.target: f"is the target of {m.source}" for m in job.mounts}}
    for data in job.data:
        twice = f"{data.at} {taken[data.at]}; choose another path" if data.at in taken else ""
        if message := _reserved(data.at) or twice:
            yield ("data", data.name, "at"), message, {"data", "mounts", "output", "runtime"}
        taken[data.at] = f"is the target of {data.name}"
    if message := _reserved(job.output):
        yield ("output",), message, {"output", "runtime"}
    if job.resources.shm is not None and job.docker.ipc not in ("private", "shareable"):
        message = f"has no effect with docker.ipc {job.docker.ipc}; set docker: {{ipc: private}}, or remove shm"
        yield ("resources", "shm"), message, {"resources", "docker", "runtime"}


def _reserved(target: str) -> str:
    """Return why the user may not mount anything at this path of a container, else ""."""
    if PurePosixPath(CODE).is_relative_to(target):
        return f"{target} would hide the code at {CODE}"
    if PurePosixPath(target).is_relative_to(KIT):
        return f"{KIT} is reserved for the launcher's scripts and the secrets; choose another folder"
    return ""


def _variables(job: Job) -> Iterator[Conflict]:
    seen: set[str] = set()
    message = "is also a secret, whose value must not be in the job file: remove one of them"
    for index, secret in enumerate(job.secrets):
        if secret.name in seen:
            yield ("secrets", index), f"{secret.name} is listed twice", {"secrets"}
        seen.add(secret.name)
        if secret.name in job.env:
            yield ("env", secret.name), message, {"env", "secrets"}
    for rank, node in enumerate(job.machines):
        for name in sorted(seen & set(node.env)):
            yield (*_path_of(job, rank), "env", name), message, {"nodes", "spares", "secrets"}


def _arguments(job: Job) -> Iterator[Conflict]:
    """Options of nodes and variants that have no clear place in a list of arguments."""
    own = [((*_path_of(job, rank), "args"), node.args) for rank, node in enumerate(job.machines)]
    for path, args in [*own, *((("sweep", number), variant) for number, variant in enumerate(job.sweep))]:
        try:
            merged(job.run.args, args)
        except LocatedError as error:
            yield from (((*path, *below), message, {"run", str(path[0])}) for below, message in error.problems)
