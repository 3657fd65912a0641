"""What the models refuse, in terms of the job file: the key, what was expected, the nearest valid key."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from launcher.job.conflicts import conflicts
from launcher.job.models import DockerOptions, Image, Job, NodeEntry, Origin, Part, Resources, Run
from launcher.job.problems import LocatedError, Path, nearest, show

_PARTS: Mapping[Path, type[Part]] = {
    (): Job,
    ("image",): Image,
    ("run",): Run,
    ("resources",): Resources,
    ("docker",): DockerOptions,
}

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
        wrong = {str(detail["loc"][0]) for detail in error.errors(include_input=False) if detail["loc"]}
        beside = _conflicts_beside(data, wrong) if wrong and isinstance(data, Mapping) else ()
        return None, [*explain(error), *beside]
    found = [(conflict.path, conflict.message) for conflict in conflicts(job)]
    return (None if found else job), found


def _conflicts_beside(data: Mapping[str, Any], wrong: set[str]) -> Iterator[tuple[Path, str]]:
    """Check the valid keys, with placeholders for the required ones that are wrong."""
    required = {"name": "x", "nodes": ["local"], "run": {"module": "x"}}
    valid = {key: value for key, value in data.items() if key not in wrong}
    with contextlib.suppress(ValidationError):
        job = Job.model_validate({**required, **valid})
        yield from ((c.path, c.message) for c in conflicts(job) if not wrong & set(c.keys))


def explain(error: ValidationError) -> Iterator[tuple[Path, str]]:
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
        return f"expected {detail['ctx']['expected']}, not {show(value)}" + _literal(value, detail["ctx"]["expected"])
    if kind in ("model_type", "model_attributes_type", "dict_type", "mapping_type"):
        part = part_at(path)
        keys = f" with keys such as {_some(part.model_fields)}" if part else ""
        return f"expected a mapping{keys}, not {show(value)}"
    if kind in ("tuple_type", "list_type"):
        return f"expected a list, not {show(value)}" + ("; write [...] around it" if isinstance(value, str) else "")
    return str(detail["msg"])


def _belongs(path: Path) -> str:
    """The nearest key of the same mapping, else the mapping that has such a key, else all keys of this one."""
    *parent, last = path
    key, part = str(last), part_at(tuple(parent))
    if part is None:
        return ""
    known = part.model_fields
    if _SYNONYMS.get(key) in known:
        return f"; did you mean '{_SYNONYMS[key]}'?"
    if near := nearest(key, known):
        return near
    for place, other in _PARTS.items():
        if key in other.model_fields and other is not part:
            return f"; '{key}' belongs under '{place[0]}'" if place else f"; '{key}' belongs at the top, not indented"
    return f"; expected one of {', '.join(known)}"


def part_at(path: Path) -> type[Part] | None:
    """The model of the mapping at `path`."""
    if len(path) == 2 and path[0] == "nodes":
        return NodeEntry
    return _PARTS.get(path)


def _literal(value: Any, expected: str) -> str:
    return nearest(value, expected.replace("'", "").replace(" or ", ", ").split(", ")) if isinstance(value, str) else ""


def _some(fields: Iterable[str]) -> str:
    return ", ".join(list(fields)[:4])
