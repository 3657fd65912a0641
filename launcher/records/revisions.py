"""The code of a git revision, as files in a temporary folder: the checkout and the index are not touched.

Not by `git archive`, which leaves out and changes what .gitattributes says (export-ignore, export-subst): the same
files are sent as from a checkout of the revision.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.job.files import code_folder
from launcher.job.models import Job
from launcher.job.overrides import IN_SWEEP, asked_for, short_commit
from launcher.job.problems import BadValueError
from launcher.job.problems import Path as KeyPath
from launcher.model.plan import Revision
from launcher.model.sizes import counted
from launcher.naming import first_of
from launcher.records.code_files import code_files, with_parents
from launcher.records.git import GitError, git

_SUBMODULE = "160000"  # mode in git's index
_POINTER = b"version https://git-lfs.github.com/spec/"
_LARGEST_POINTER = 1024  # bytes
_NAMED = 5  # files in a message
_LINES = 50  # files in a summary of changes
# As a checkout would have them, but nothing is downloaded for it, and nothing is written beside the index.
_PLAIN = (
    *("filter.lfs.smudge=", "filter.lfs.process=", "filter.lfs.required=false"),
    *("core.splitIndex=false", "core.sparseCheckout=false", "index.sparse=false"),
)


@dataclass(frozen=True)
class Exported:
    """Files of code that are not in the job's code folder. folder: where they are. names: of all files, and folders.

    notes: what is said about them.
    """

    folder: Path
    names: frozenset[str]
    revision: Revision | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Repository:
    """git_dir: its folder. at: path of the job's code in it; "": its top."""

    git_dir: Path
    at: str


def commit_of(revision: str, job: Job, cwd: Path) -> str:
    """Return the commit that a revision of the code's repository means now. Raises BadValueError."""
    return _commit(revision, _repository(code_folder(job, cwd)))


def resolved(job: Job, cwd: Path, known: Mapping[str, str] | None = None) -> Job:
    """Return the job with commits in place of its revisions, which may mean others later. known: what its codes meant
    at an earlier time, commits and folders.

    Raises JobInvalid.
    """
    if job.revision is None and not job.codes:
        return job
    commits, problems = dict(known or {}), list[tuple[KeyPath, str]]()
    if job.revision is not None and job.codes:
        problems.append((("revision",), "a sweep over `code` has the revision of each variant: remove it"))

    def commit(text: str, key: KeyPath) -> str:
        try:
            return commits.get(text) or commit_of(text, job, cwd)
        except BadValueError as error:
            problems.append((key, str(error)))
            return text

    revision = job.revision and commit(job.revision, ("revision",))
    codes = list[str]()
    for index, text in enumerate(job.codes):
        key = (*IN_SWEEP, index)
        try:
            codes.append(text if text not in commits and _is_folder(text, job, cwd) else commit(text, key))
        except BadValueError as error:
            problems.append((key, str(error)))
    same = [os.path.normpath(code) for code in codes]
    problems += [
        ((*IN_SWEEP, index), f"is the same code as {job.codes[same.index(code)]}: remove one of them")
        for index, code in enumerate(same)
        if same.index(code) != index and len(same) == len(job.codes)
    ]
    job.refuse(problems)
    meant = {job.revision: revision} if job.revision and revision and revision != job.revision else {}
    return job.at_commits(revision, codes, {**job.commits, **meant, **dict(zip(job.codes, codes, strict=True))})


def _is_folder(text: str, job: Job, cwd: Path) -> bool:
    """Return whether a code of a sweep is a folder, not a revision. Raises BadValueError if it is both, or neither."""
    folder = code_folder(job.model_copy(update={"code": text}), cwd).is_dir()
    if text.startswith((".", "/", "~")):
        if not folder:
            raise BadValueError(f"no such folder: {text}, from {cwd}")
        return True
    try:
        commit_of(text, job, cwd)
    except BadValueError as error:
        if folder:
            return True
        raise BadValueError(f"{error.what}; nor is there such a folder", error.fix) from None
    if folder:
        raise BadValueError("is a folder and a revision", f"write ./{text}, or refs/heads/{text} for a branch")
    return False


def export(job: Job, cwd: Path, to: Path) -> Exported:
    """Write the code of the job's revision to an empty folder. Raises BadValueError; OSError."""
    code = code_folder(job, cwd)
    repository = _repository(code)
    commit = _commit(job.revision or "", repository)
    tree, index = to / "tree", to / "index"
    tree.mkdir()
    try:
        own = ("--git-dir", str(repository.git_dir), "--work-tree", str(tree), "--literal-pathspecs")
        environ = {"GIT_INDEX_FILE": str(index)}
        git(tree, *own, "read-tree", commit, settings=_PLAIN, environ=environ)
        at = [repository.at] if repository.at else []
        listed = git(tree, *own, "ls-files", "--stage", "-z", "--", *at, settings=_PLAIN, environ=environ)
        entries = [entry.partition("\t") for entry in listed.split("\0") if entry]
        names = [name for _, _, name in entries if name != repository.at]
        folder = tree / repository.at
        if not names:
            what = f"has no folder {repository.at}, which is the job's `code`" if repository.at else "has no file"
            raise BadValueError(f"{short_commit(commit)} {what}")
        submodules = [name for about, _, name in entries if about.startswith(_SUBMODULE)]
        if submodules:
            raise _refusal(commit, submodules, "submodule", "its files are", "git submodule update --init")
        given = "".join(f"{name}\0" for name in names)
        git(tree, *own, "checkout-index", "--quiet", "-z", "--stdin", settings=_PLAIN, environ=environ, given=given)
        revision = replace(_described(repository, commit), asked=asked_for(job))
        notes = (_job_file(job, cwd, repository, commit), _uncommitted(job, cwd, repository, commit))
    except GitError as error:
        raise BadValueError(f"{short_commit(commit)} cannot be exported: git: {error}") from None
    if pointers := [name for name in names if _is_pointer(tree / name)]:
        raise _refusal(commit, pointers, "LFS pointer", "its content is", "git lfs pull")
    inside = (os.path.relpath(name, repository.at or ".") for name in names)
    return Exported(folder, frozenset(with_parents(inside)), revision, tuple(filter(None, notes)))


def _repository(code: Path) -> _Repository:
    """Return the repository with the job's code. It may have a folder only in some revisions. Raises BadValueError."""
    there = next(folder for folder in (code, *code.parents) if folder.is_dir())
    try:
        git_dir, at = git(there, "rev-parse", "--absolute-git-dir", "--show-prefix").split("\n")[:2]
    except GitError as error:
        if "not a git repository" in str(error):
            raise BadValueError(f"{code} is not in a git repository; expected a folder instead of a revision") from None
        raise BadValueError(f"the repository of {code} cannot be read: git: {error}") from None
    inside = posixpath.normpath(posixpath.join(at, os.path.relpath(code, there)))
    return _Repository(Path(git_dir), "" if inside == "." else inside)


def _commit(revision: str, repository: _Repository) -> str:
    try:
        return git(repository.git_dir, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").strip()
    except GitError:
        shallow = git(repository.git_dir, "rev-parse", "--is-shallow-repository").strip()
        fix = (
            "this clone is shallow: git fetch --unshallow"
            if shallow == "true"
            else "to list them: git log --oneline --all"
        )
        raise BadValueError(f"no such revision in {repository.git_dir}: {revision}", fix) from None


def _described(repository: _Repository, commit: str) -> Revision:
    """Raises GitError."""
    line = git(repository.git_dir, "rev-list", "--parents", "--max-count=1", commit).split()
    if len(line) < 2:
        return Revision(commit)
    plain = ("--no-ext-diff", "--no-textconv", "--no-color", f"--stat-count={_LINES}", "--stat=80")
    return Revision(commit, line[1], git(repository.git_dir, "diff", *plain, line[1], commit).rstrip())


def _refusal(commit: str, names: list[str], kind: str, what: str, fix: str) -> BadValueError:
    which = f"{first_of(names, _NAMED)} ({counted(len(names), kind)})"
    how = f"git worktree add ../{short_commit(commit)} {short_commit(commit)}, {fix} there, and give that folder"
    return BadValueError(f"{short_commit(commit)} has {which}: {what} not in the repository", how)


def _is_pointer(file: Path) -> bool:
    if file.is_symlink() or not file.is_file() or file.stat().st_size > _LARGEST_POINTER:
        return False
    return file.read_bytes().startswith(_POINTER)


def _job_file(job: Job, cwd: Path, repository: _Repository, commit: str) -> str:
    """Return which job file counts, if the revision has it with another content; "" otherwise."""
    if job.file is None:
        return ""
    code, file = code_folder(job, cwd), Path(os.path.normpath(cwd / job.file))
    name = posixpath.normpath(posixpath.join(repository.at, os.path.relpath(file, code)))
    if name.startswith("..") or not file.is_file():
        return ""
    try:
        then = git(repository.git_dir, "show", "--no-textconv", f"{commit}:{name}")
    except GitError:  # it has none
        return ""
    differs = os.fsencode(then) != file.read_bytes()
    return f"{job.file} counts as it is now; {short_commit(commit)} has it with another content" if differs else ""


def _uncommitted(job: Job, cwd: Path, repository: _Repository, commit: str) -> str:
    """Return which files of the code have changes that are not committed, if the commit is the one that is checked out;
    "" if there are none. The job file counts as it is now.
    """
    code = code_folder(job, cwd)
    try:
        if not code.is_dir() or commit != _commit("HEAD", repository):
            return ""
    except BadValueError:  # a new branch, without a commit
        return ""
    try:
        if git(code, "rev-parse", "--is-inside-work-tree").strip() != "true":
            return ""
        how = ("--porcelain", "-z", "--no-renames", "--untracked-files=all", "--ignore-submodules")
        entries = [entry for entry in git(code, "status", *how, "--", ".").split("\0") if entry]
        new = {file.name for file in code_files(code)} if any(entry.startswith("??") for entry in entries) else set()
    except (GitError, OSError) as error:
        return f"{short_commit(commit)} is HEAD; whether files have changes that are not in it is not known: {error}"
    given = None if job.file is None else os.path.relpath(cwd / job.file, code)
    found = [(entry[:2], os.path.relpath(entry[3:], repository.at or ".")) for entry in entries]
    names = [name for state, name in found if name != given and (state != "??" or name in new)]
    if not names:
        return ""
    what = f"{counted(len(names), 'file')} with uncommitted changes {'are' if len(names) > 1 else 'is'} not in it"
    return f"{short_commit(commit)} is HEAD; {what}: {first_of(names, _NAMED)}"
