"""The module or file that a program missed and that exists here: left out of the code, or not where Python looks."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from launcher.container_scripts.words import bounded
from launcher.model.container import CODE
from launcher.records.left_out import CREDENTIALS, EMPTY, ENVIRONMENT, NEVER, LeftOut
from launcher.records.store import Record

_MODULE = re.compile(r"No module named ['\"]?([A-Za-z_][\w.]*)")
_TOP_LEVEL = re.compile(r"^ModuleNotFoundError: No module named '(\w+)'$", re.MULTILINE)
_NAME = re.compile(r"cannot import name '(\w+)' from (?:partially initialized module )?'([\w.]+)'")
_MISSING = re.compile(
    r"no such file|not found|n[o']t (exist|find|open|locate)|unable to (\w+ )?open|not a (file|directory)|missing",
    re.IGNORECASE,
)
_FILE = re.compile(r"No such file or directory|FileNotFoundError|NotADirectoryError|not a directory", re.IGNORECASE)
_PARENT = re.compile(r"Parent directory (\S+) does not exist")  # torch.save
_QUOTED = re.compile(r"'([^']{1,500})'|\"([^\"]{1,500})\"|`([^`]{1,500})`|\u2018([^\u2019]{1,500})\u2019")
_WORD = re.compile(r"[^\s'\"`\u2018\u2019,;:()\[\]{}<>=]+")
_SUFFIXES = (".py", ".so", ".pyd", ".pyc")

_FIXES = {
    CREDENTIALS: "pass its values with `secrets`, or add a line `!{name}` to .dockerignore to send it",
    ENVIRONMENT: "add what it needs to image.packages, or a line `!{name}` to .dockerignore to send it",
    EMPTY: "create it in the program",
    NEVER: "move it to another folder, or mount it",
}


def missing_here(words: str, record: Record, rank: int) -> str:
    """Return why a node's failed program missed a module or file that exists here, and a fix; "" if it did not.

    words: its output. rank: of the node.
    """
    spec, (folder, left_out) = record.container(rank), record.left_out()
    code = str(spec.get("layout", {}).get("code") or CODE)
    scripts = [posixpath.dirname(word) for word in spec.get("argv", ()) if word.endswith(".py")]
    paths = [path for path in str(spec.get("env", {}).get("PYTHONPATH", "")).split(":") if path]
    if left_out.why:
        roots = (_in_code(path, code) for path in ("", *scripts, *paths, "src"))
        known = [*dict.fromkeys(root for root in roots if root is not None)]
        if hint := left_out_hint(words, left_out, folder, code, known):
            return hint
    module = _TOP_LEVEL.findall(words)
    sent = record.sent_code if module else None
    searched = [_in_code(path, code) for path in (*(scripts or [""]), *paths)]
    return not_searched_hint(module[-1], sent, searched, ":".join(paths)) if sent else ""


def not_searched_hint(module: str, sent: Iterable[str], roots: Collection[str | None], paths: str = "") -> str:
    """Return how Python finds a module that was sent, but is in none of the folders that it searches; "" if it is not.

    sent: the files of the code. roots: the folders of the code that Python searches. paths: the job's PYTHONPATH. A
    module in a package is never meant, and one in another folder may have the name of a package that is not installed.
    """
    sent, folders = frozenset(sent), set()
    for file in sent:
        folder, slash, inner = f"/{file}".rpartition(f"/{module}/")
        if slash and inner.endswith(".py") and "/" not in inner:
            folders.add(folder.lstrip("/"))
        elif posixpath.basename(file) == f"{module}.py":
            folders.add(posixpath.dirname(file))
    folders = {folder for folder in folders if not folder or f"{folder}/__init__.py" not in sent}
    if not folders or any(root in folders for root in roots):
        return ""
    found = min(folders, key=lambda folder: (bool(folder), folder.count("/")))
    path = ":".join(filter(None, (found or ".", paths)))
    where = f"{found}/" if found else "the code's folder"
    if found in ("", "src"):
        return f"{module} is in {where}, which Python does not search: env: {{PYTHONPATH: {path}}}"
    own = f"if the one in {where} is meant, which Python does not search: env: {{PYTHONPATH: {path}}}"
    return f"install the package {module}; {own}"


def left_out_hint(words: str, left_out: LeftOut, folder: Path, code: str, roots: Sequence[str] = ("",)) -> str:
    """Return why something that the output of a failed rank misses was not sent, and a fix; "" if nothing was left out.

    folder: of the code here. code: its path for the program. roots: folders below it that Python imports from.
    """
    for line in reversed(bounded(words).splitlines()):
        for path in (*_paths(line, code), *_modules(line, left_out, folder, roots)):
            if entry := left_out.entry(path):
                why = left_out.why[entry]
                fix = _FIXES.get(why, "change that line").format(name=entry)
                return f"{entry} exists here but was not sent: {why}; {fix}"
    return ""


def _paths(line: str, code: str) -> Iterator[str]:
    """Yield the paths below the code that a line says are missing."""
    if not _MISSING.search(line):
        return
    quoted = ["".join(found) for found in _QUOTED.findall(line)]
    # a word that does not look like a path is one only if the error is about files
    words = [word for word in (*quoted, *_WORD.findall(line)) if "/" in word or "." in word]
    for word in (*_PARENT.findall(line), *(quoted if _FILE.search(line) else ()), *words):
        if path := _in_code(word, code):
            yield path


def _in_code(path: str, code: str) -> str | None:
    """Return a path of the program as a path from the code's folder; None if it is not in it."""
    for prefix in (code, CODE):
        path = path.removeprefix(prefix).lstrip("/") if path.startswith(f"{prefix}/") else path
    path = posixpath.normpath(path)
    return None if path.startswith(("/", "..")) else "" if path == "." else path


def _modules(line: str, left_out: LeftOut, folder: Path, roots: Sequence[str]) -> Iterator[str]:
    """Yield the files here of the module that a line says is missing."""
    found = [*_MODULE.findall(line), *(f"{module}.{name}" for name, module in _NAME.findall(line))]
    for path in (posixpath.join(root, module.replace(".", "/")) for module in found for root in roots):
        here = folder / path
        files = [*here.parent.glob(f"{here.name}.*"), *here.glob("__init__.py")]
        if left_out.entry(f"{path}/"):  # a folder without __init__.py is a module too
            files += [*here.glob("*.*"), *here.glob("*/*.*")]
        yield from (file.relative_to(folder).as_posix() for file in files if file.suffix in _SUFFIXES)
