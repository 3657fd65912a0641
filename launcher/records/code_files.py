"""The code files of a folder: without run records, caches, and what .gitignore or .dockerignore exclude."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pathspec

from launcher.errors import JobInvalid

# Never code: version control, run records, caches, environments.
_ALWAYS = (".git/", "/runs/", "__pycache__/", ".venv/", "*.pyc", ".mypy_cache/", ".ruff_cache/", ".pytest_cache/")
_IGNORE_FILES = (".gitignore", ".dockerignore")  # .dockerignore only at the top
_KINDS = (stat.S_IFREG, stat.S_IFLNK)


@dataclass(frozen=True)
class CodeFile:
    """A regular file or a symbolic link. `name` is its path from the folder, with slashes."""

    name: str
    path: str
    status: os.stat_result  # of the file itself, not of a link's target


@dataclass(frozen=True)
class _Rules:
    """The patterns of an ignore file, for paths below the folder `at` ("" or "folder/.../")."""

    at: str
    patterns: pathspec.PathSpec[pathspec.Pattern]


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Raise JobInvalid if the body of the with statement cannot read part of this code folder."""
    try:
        yield
    except OSError as error:
        fix = "make it readable for you, or list it in .dockerignore"
        raise JobInvalid(f"code {error.filename or folder}", f"cannot be read: {error.strerror}", fix) from error


def code_files(folder: Path) -> Iterator[CodeFile]:
    """Yield the files of a folder before those of its subfolders, each sorted; ignored folders are skipped.

    Raises OSError if a folder or an ignore file cannot be read.
    """
    waiting: list[tuple[str, tuple[_Rules, ...]]] = [("", (_rules("", _ALWAYS),))]
    while waiting:
        at, rules = waiting.pop()
        try:
            with os.scandir(folder / at) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except FileNotFoundError:
            if at:
                continue  # removed since it was listed
            raise
        found = {entry.name: entry for entry in entries}
        for name in _IGNORE_FILES if not at else _IGNORE_FILES[:1]:
            ignore = found.get(name)
            if ignore is not None and (ignore.is_file(follow_symlinks=False) or ignore.is_symlink()):
                text = Path(ignore.path).read_text(encoding="utf-8", errors="replace")
                rules = (*rules, _rules(at, text.splitlines()))
        folders = []
        for name, entry in found.items():
            if entry.is_dir(follow_symlinks=False):
                if not _ignored(rules, f"{at}{name}/"):
                    folders.append((f"{at}{name}/", rules))
            elif not _ignored(rules, at + name):
                with suppress(FileNotFoundError):  # removed since it was listed
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_IFMT(status.st_mode) in _KINDS:
                        yield CodeFile(at + name, entry.path, status)
        waiting += reversed(folders)


def _rules(at: str, lines: Iterable[str]) -> _Rules:
    return _Rules(at, pathspec.PathSpec.from_lines(_pattern, lines))


def _pattern(line: str) -> pathspec.Pattern:
    """Return the pattern of a line. Invalid patterns, such as a lone `!` or `/`, match nothing, as in git."""
    pattern = pathspec.util.lookup_pattern("gitignore")
    if not line.rstrip().removeprefix("!").strip("/"):
        return pattern("")
    try:
        return pattern(line)
    except (ValueError, re.error):
        return pattern("")


def _ignored(rules: tuple[_Rules, ...], name: str) -> bool:
    """The deepest ignore file with a matching pattern decides, as in git. name: a folder's ends with /."""
    for each in reversed(rules):
        verdict = each.patterns.check_file(name[len(each.at) :]).include
        if verdict is not None:
            return verdict
    return False
