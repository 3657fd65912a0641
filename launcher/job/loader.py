"""Load a job file as a Job. All problems are reported in one message, each with its line and key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path as FilePath
from typing import Any

from launcher.errors import JobInvalid
from launcher.job.document import Node, compose
from launcher.job.explain import check
from launcher.job.models import Job
from launcher.job.overrides import IN_SWEEP, apply_budget, apply_codes, apply_nodes, apply_pool, apply_set
from launcher.job.problems import Positions, Problem, refusal, show

LARGEST = 1_000_000  # bytes
_PROGRAMS = {".py": "script: {}", ".sh": "command: [bash, {}]", ".sbatch": "command: [bash, {}]"}
_START = "create a commented job file: launcher init"


def load_job(path: str | PathLike[str], sets: Sequence[str] = (), nodes: Sequence[str] | None = None) -> Job:
    """Return the job of a file, with overrides `a.b=value` and, if given, other nodes than the file's.

    Raises JobInvalid with all problems. `files.check_files` checks the files that the job refers to.
    """
    found, problems = compose(_read(FilePath(path)), str(path))
    return _job(found, problems, JobSource(str(path), FilePath(path)), sets, nodes)


def parse_job(text: str, source: str = "job.yaml", sets: Sequence[str] = (), nodes: Sequence[str] | None = None) -> Job:
    """Like `load_job`, from text; `source` is its name in messages."""
    found, problems = compose(text, source)
    return _job(found, problems, JobSource(source), sets, nodes)


def job_from(keys: Mapping[str, Any], sets: Sequence[str] = (), nodes: Sequence[str] | None = None) -> Job:
    """Like `load_job`, from the keys of a job file as Python values (via JSON, which is YAML)."""
    texts = [f"{json.dumps(str(key))}: {to_json(str(key), value)}" for key, value in keys.items()]
    found, problems = compose(f"{{{', '.join(texts)}}}", "job", inline=True)
    return _job(found, problems, JobSource("job"), sets, nodes)


def to_json(key: str, value: Any) -> str:
    """Return a value of a job as JSON. Raises JobInvalid for a value that a job file cannot have."""
    try:
        return json.dumps(value, default=_as_json)
    except (TypeError, ValueError, RecursionError) as error:
        fix = "use text, numbers, true, false, lists and mappings"
        raise JobInvalid("job", f"{key}: {error}", fix) from None


def _as_json(value: Any) -> Any:
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Integral | Real):  # of numpy
        return int(value) if isinstance(value, Integral) else float(value)
    raise TypeError(f"a job cannot have {value!r:.80}, which is of type {type(value).__name__}")


@dataclass(frozen=True)
class JobSource:
    """The source of a job: its name in messages, and its file, if any."""

    name: str
    file: FilePath | None = None


def _job(
    found: Node | None, problems: list[Problem], source: JobSource, sets: Sequence[str], nodes: Sequence[str] | None
) -> Job:
    if found is None or (found.value is None and not problems):
        raise JobInvalid(f"{source.name}:1", "the file is empty", _START)
    root = found
    if not isinstance(root.value, dict):
        what = f"expected a mapping with the keys name, nodes, run, ..., not {show(root.plain())}"
        raise JobInvalid(str(root.mark), what, _START)
    for assignment in sets:
        root, more = apply_set(root, assignment)
        problems += more
    # for anchors, as in compose files
    root = replace(root, value={key: node for key, node in root.value.items() if not key.startswith("x-")})
    written = root
    root = apply_codes(apply_budget(apply_pool(root)))
    if nodes is not None:
        root = apply_nodes(root, nodes)
    options = [word for assignment in sets for word in ("--set", assignment)]
    options += [] if nodes is None else ["--nodes", ",".join(nodes)]
    origin = Positions([*written.marks(), *root.marks()], source.file, options)
    job, refused = check(root.plain(), origin)
    known = {problem.path for problem in problems}  # one message per value: the first one is about its YAML
    if "codes" not in written.value:
        refused = [((*IN_SWEEP, *where[1:]) if where[:1] == ("codes",) else where, text) for where, text in refused]
    problems += (
        Problem(origin.where(where) or root.mark, where, message) for where, message in refused if where not in known
    )
    if job is None or problems:
        raise refusal(problems)
    if source.file is not None and source.file.is_file() and not options:  # a pipe gives it once
        origin.of_file = job
    return job


def _read(path: FilePath) -> str:
    if instead := _PROGRAMS.get(path.suffix):
        what = f"is a program, not a job file: a job file (launcher init) has `run: {{{instead.format(path)}}}`"
        raise JobInvalid(str(path), what, "then start it: launcher up JOB")
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError:
        named = path.with_name(f"{path.name}.yaml")
        fix = f"did you mean {named}?" if named.is_file() else _START
        raise JobInvalid(str(path), "no such job file", fix) from None
    except OSError as error:
        raise JobInvalid(str(path), f"cannot be read: {error.strerror}", "give the path of a job file") from None
    if len(data) > LARGEST:
        line = data.count(b"\n") + 1
        raise JobInvalid(f"{path}:{line}", "the file is larger than 1 MB", "check that this is a job file")
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"not UTF-8: byte 0x{data[error.start]:02x}"
        raise JobInvalid(f"{path}:{line}", what, "save the job file as UTF-8 text") from None
