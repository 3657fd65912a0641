"""What the models refuse, in the words of the one who wrote the file: the key, what was expected, the nearest key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from launcher.job.checks import ConflictError
from launcher.job.models import DockerOptions, Image, Job, NodeEntry, Part, Resources, Run
from launcher.job.problems import LocatedError, Path, nearest, show

_PARTS: Mapping[Path, type[Part]] = {
    (): Job,
    ("image",): Image,
    ("run",): Run,
    ("resources",): Resources,
    ("docker",): DockerOptions,
}

# What other tools call these things.
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


def check(data: Any) -> tuple[Job | None, list[tuple[Path, str]]]:
    """The job, or everything that is wrong with it. What does not fit together is told even where single keys are
    wrong too, as far as it is not about those.
    """
    try:
        return Job.model_validate(data), []
    except ValidationError as error:
        problems = list(explain(error))
        wrong = {str(detail["loc"][0]) for detail in error.errors(include_input=False) if detail["loc"]}
    if wrong and isinstance(data, Mapping):
        problems += _conflicts_beside(data, wrong)
    return None, problems


def _conflicts_beside(data: Mapping[str, Any], wrong: set[str]) -> Iterator[tuple[Path, str]]:
    """Check the keys that are right, with stand-ins for the required ones that are wrong."""
    standins = {"name": "x", "nodes": ["local"], "run": {"module": "x"}}
    right = {key: value for key, value in data.items() if key not in wrong}
    try:
        Job.model_validate({**standins, **right})
    except ValidationError as error:
        for detail in error.errors():
            cause = detail.get("ctx", {}).get("error")
            if isinstance(cause, ConflictError):
                yield from ((c.path, c.message) for c in cause.conflicts if not wrong & set(c.keys))


def explain(error: ValidationError) -> Iterator[tuple[Path, str]]:
    """Path and message of everything that the models refuse."""
    for detail in error.errors(include_url=False):
        path: Path = tuple(part for part in detail["loc"] if part != "[key]")
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, ConflictError):
            yield from ((conflict.path, conflict.message) for conflict in cause.conflicts)
        elif isinstance(cause, LocatedError):
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
    """The nearest key of the same mapping, else where a key of this name belongs, else what there is."""
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
