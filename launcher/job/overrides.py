"""Changes of a job: `--set a.b=value` and `--nodes a,b` give new trees of the file, a sweep's variants new jobs."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from launcher.errors import JobInvalid
from launcher.job.arguments import change, merged, placed
from launcher.job.document import Node, compose
from launcher.job.fields import parse_option
from launcher.job.models import Job, is_commit
from launcher.job.parts import NodeEntry
from launcher.job.problems import BadValueError, Mark, Path, Problem, dotted, printable, refusal
from launcher.job.scalars import Args, ArgValue, names_of, parse_text
from launcher.model.plan import CODE

IN_SWEEP: Path = ("sweep", CODE)


def apply_set(root: Node, assignment: str) -> tuple[Node, list[Problem]]:
    """For `a.b=v`, return the tree with the YAML value v at a.b. Missing mappings are created; numbers index lists. In
    a list of arguments, the option of that name gets the value (`arguments.change`). A key that is text gets v as it is
    written: a shell removes the quotes of '0123', and of an empty variable nothing is left. Raises JobInvalid.
    """
    source = f"--set {printable(assignment if len(assignment) <= 80 else assignment[:77] + '...')}"
    key, equals, text = assignment.partition("=")
    parts: Path = tuple(key.strip().split("."))
    if not equals or not all(parts):
        raise JobInvalid(source, "expected KEY=VALUE, such as run.args.epochs=6", "quote it for your shell")
    value, problems = compose(text, source, inline=True)
    mark = Mark(source)
    if _is_text(parts) and (value is None or isinstance(value.value, (bool, int, float))):
        value = Node(mark, text.strip())
    problems = [replace(problem, path=(*parts, *problem.path)) for problem in problems]
    return _with_value(root, parts, value or Node(mark, None), mark, ()), problems


def _is_text(path: Path) -> bool:
    """Whether the key at this path is text; for those in lists it is not known."""
    kind: Any = Job
    for part in path:
        found = getattr(kind, "model_fields", {}).get(part)
        kind = None if found is None else found.annotation
        while (
            len(inner := [each for each in get_args(kind) if each is not NoneType]) == 1
            or get_origin(kind) is Annotated
        ):
            kind = inner[0]
    return kind is str


def _with_value(node: Node, parts: Path, value: Node, mark: Mark, done: Path) -> Node:
    if not parts:
        return replace(value, mark=mark)
    part, *rest = parts
    path = (*done, part)
    if _are_args(done) and not _is_index(node, parts):
        return _with_option(node, ".".join(map(str, parts)), value, mark, done)
    if isinstance(node.value, list):
        if not str(part).isdecimal() or int(part) >= len(node.value):
            message = f"{dotted(done)} is a list of {len(node.value)}: expected an index below that, not "
            raise refusal([Problem(mark, path, message + dotted((part,)))])
        items = list(node.value)
        items[int(part)] = _with_value(items[int(part)], tuple(rest), value, mark, path)
        return replace(node, value=items)
    if isinstance(node.value, dict) or node.value is None:
        entries = dict(node.value or {})
        entries[str(part)] = _with_value(entries.get(str(part), Node(mark, None)), tuple(rest), value, mark, path)
        return replace(node, value=entries)
    raise refusal([Problem(mark, path, f"{dotted(done)} is neither a mapping nor a list")])


def _are_args(path: Path) -> bool:
    return path == ("run", "args") or (len(path) == 3 and path[0] in ("nodes", "spares") and path[2] == "args")


def _is_index(node: Node, parts: Path) -> bool:
    """Whether the path leads to an item of a list of arguments, or of an option's values."""
    if isinstance(node.value, list):
        return len(parts) == 1 and str(parts[0]).isdecimal()
    known = node.value.get(str(parts[0])) if isinstance(node.value, dict) else None
    return len(parts) == 2 and known is not None and isinstance(known.value, list)


def _with_option(node: Node, key: str, value: Node, mark: Mark, done: Path) -> Node:
    """Return arguments with another value of an option, whose name may have dots."""
    value = replace(value, mark=mark)
    if isinstance(node.value, dict) or node.value is None:
        return replace(node, value=placed(node.value or {}, key, value))
    try:
        words = [parse_text(word.plain()) for word in node.value]
        start, stop, new = change(words, *parse_option(key, value.plain()))
    except BadValueError as error:
        raise refusal([Problem(mark, (*done, key), str(error))]) from None
    return replace(node, value=[*node.value[:start], *(Node(mark, word) for word in new), *node.value[stop:]])


def apply_nodes(root: Node, nodes: Sequence[str]) -> Node:
    """Return the tree with these nodes. A node that the file lists, by host or name, keeps its settings.
    Raises JobInvalid.
    """
    mark = Mark("--nodes")
    if not nodes or not all(node.strip() for node in nodes):
        raise JobInvalid(
            str(mark), "a node is missing", "give ssh aliases, user@host:port or local, separated by commas"
        )
    old = root.value.get("nodes")
    entries: list[Node] = old.value if old is not None and isinstance(old.value, list) else []
    written = [entry.plain() if isinstance(entry.value, dict) else {"host": entry.plain()} for entry in entries]
    hosts = [host if isinstance(host := one.get("host"), str) else "" for one in written]
    known: dict[str, Node] = {}
    for entry, one, host, name in zip(entries, written, hosts, names_of(hosts), strict=True):
        for alias in (str(one.get("name")), host, name):
            known.setdefault(alias, entry)
    chosen = [known.get(node.strip(), Node(mark, node.strip())) for node in nodes]
    return replace(root, value={**root.value, "nodes": Node(mark, chosen)})


def apply_pool(root: Node) -> Node:
    """Replace `nodes: {pool: [a, b], each: 1}` by `nodes: [a, b]` and `each: 1`. Raises JobInvalid."""
    nodes = root.value.get("nodes")
    if nodes is None or not isinstance(nodes.value, dict) or "pool" not in nodes.value:
        return root
    unknown = [key for key in nodes.value if key not in ("pool", "each")]
    if unknown:
        what = "unknown key; expected one of pool, each"
        raise refusal([Problem(nodes.value[key].mark, ("nodes", key), what) for key in unknown])
    each = nodes.value.get("each") or Node(nodes.mark, 1)
    return replace(root, value={**root.value, "nodes": nodes.value["pool"], "each": each})


def apply_budget(root: Node) -> Node:
    """Replace `sweep: {budget: 5m, grid: {...}}` by `sweep: {grid: {...}}` and `budget: 5m`. Raises JobInvalid."""
    sweep = root.value.get("sweep")
    if sweep is None or not isinstance(sweep.value, dict) or "budget" not in sweep.value:
        return root
    budget = sweep.value["budget"]
    if (own := root.value.get("budget")) is not None:
        if own.mark.source.startswith("--set"):
            what = f"the sweep has a budget already: change that, --set sweep.{own.mark.source.removeprefix('--set ')}"
            raise refusal([Problem(own.mark, ("budget",), what)])
        raise refusal([Problem(budget.mark, ("sweep", "budget"), "is also a key of the job: remove one of them")])
    rest = {key: node for key, node in sweep.value.items() if key != "budget"}
    return replace(root, value={**root.value, "sweep": replace(sweep, value=rest), "budget": budget})


def apply_codes(root: Node) -> Node:
    """Replace `sweep: {code: [a, b], grid: {...}}` by `sweep: {grid: {...}}` and `codes: [a, b]`. Raises JobInvalid."""
    sweep = root.value.get("sweep")
    if sweep is None or not isinstance(sweep.value, dict) or CODE not in sweep.value:
        return root
    codes = sweep.value[CODE]
    if "codes" in root.value:
        raise refusal([Problem(codes.mark, IN_SWEEP, "is also given as `codes`: remove one of them")])
    if codes.value == []:
        raise refusal([Problem(codes.mark, IN_SWEEP, "an empty list; expected at least one revision or folder")])
    others = {key: value for key, value in sweep.value.items() if key != CODE}
    left = replace(sweep, value=others or [Node(sweep.mark, {})])
    return replace(root, value={**root.value, "sweep": left, "codes": codes})


def on_nodes(job: Job, nodes: Sequence[NodeEntry], port: int | None = None) -> Job:
    """Return the job of a pool on some of its machines, with that rendezvous port (default: the job's)."""
    given = {} if port is None else {"port": port}
    return job.model_copy(update={"nodes": tuple(nodes), "each": None, "lost_after": None, **given})


def of_one_run(job: Job) -> Job:
    """Return the job as planned for one run: with a pool, on its first machines."""
    return job if job.each is None else on_nodes(job, job.nodes[: job.each])


@dataclass(frozen=True)
class JobVariant:
    """A variant of a sweep. job: without the sweep. args: its own. values: all that name has."""

    job: Job
    args: Args
    name: str
    values: Args


def variants(job: Job) -> list[JobVariant]:
    """Return the variants of a sweep, in order: all arguments with the first code, then with the next one."""
    job = of_one_run(job)
    alone = {"sweep": (), "codes": ()}
    found = []
    for code in job.codes or (None,):
        based = _with_code(job, code)
        for args in job.sweep:
            run = based.run.model_copy(update={"args": merged(job.run.args, args)})
            values = args if code is None else with_code(args, code)
            single = based.model_copy(update={**alone, "run": run})
            found.append(JobVariant(single, args, variant_name(values), values))
    return found


def expand_sweep(job: Job) -> list[Job]:
    """Return one job per variant, in order, without `sweep`, and with a pool on its first machines; without a sweep,
    return the job itself.
    """
    return [variant.job for variant in variants(job)] if job.sweep else [job]


def _with_code(job: Job, code: str | None) -> Job:
    """Return the job with the code of a variant: a commit of its repository, or a folder, in which its script is."""
    if code is None:
        return job
    if is_commit(code):
        return job.model_copy(update={"revision": code})
    run, script = job.run, job.run.script
    if script is not None:
        inside = posixpath.relpath(posixpath.normpath(script), posixpath.normpath(job.code))
        run = run.model_copy(update={"script": posixpath.join(code, inside)})
    return job.model_copy(update={"code": code, "run": run})


def with_code(args: Args, code: str) -> Args:
    """Return what distinguishes a variant of code: `code` is the beginning of a commit's name, or a folder."""
    shown = short_commit(code) if is_commit(code) else code
    return {CODE: shown, **args} if isinstance(args, Mapping) else (f"{CODE}={shown}", *args)


def short_commit(commit: str) -> str:
    """Of a fixed length: git's grows with the repository, and variants are known by their names."""
    return commit[:8]


def asked_for(job: Job) -> str:
    """Return the name by which the job's commit was asked for, such as a branch; "" if by its own, or if it is a code
    folder.
    """
    commit = job.revision or ""
    return next((text for text, code in job.commits.items() if code == commit and not commit.startswith(text)), "")


def variant_name(variant: Args) -> str:
    """Return a variant's name in tables: `batch_size=128 lr=0.1`."""
    if not isinstance(variant, Mapping):
        return " ".join(variant)
    return " ".join(f"{key}={shown_value(value)}" for key, value in variant.items())


def shown_value(value: ArgValue) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return value if isinstance(value, str) else {True: "true", False: "false", None: "null"}[value]
