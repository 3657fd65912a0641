"""The code of a git revision: what is sent is what a checkout of it has, and the user's checkout is not touched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.api.jobs import load
from launcher.errors import JobInvalid
from launcher.job.files import check_files
from launcher.job.models import Job
from launcher.job.overrides import variants
from launcher.records.exported import exported, temporary_folder
from launcher.records.revisions import resolved
from launcher.records.snapshot import Snapshot, list_code, pack
from tests.repositories import commit, git

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 3\n"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "a project"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch", "main")
    monkeypatch.chdir(folder)
    yield folder
    assert [*(tmp_path / "cache").rglob("exported/*")] == []


def job(**keys: Any) -> Job:
    return load({"name": "x", "runtime": "process", "nodes": ["local"], "run": {"script": "main.py"}, **keys})


def sent(found: Job, here: Path, said: list[str] | None = None) -> Snapshot:
    """Return what a run of this job would send."""
    log = [].append if said is None else said.append
    with exported(found, here) as code:
        check_files(found, here, {}, code.folder if code else None)
        return pack(list_code(found, here, log, exported=code), log)


def refused(found: Job, here: Path) -> str:
    with pytest.raises(JobInvalid) as told:
        sent(resolved(found, here), here)
    return str(told.value)


def test_a_revision_is_sent_as_a_checkout_of_it_would_be(repository: Path) -> None:
    """Also what .gitattributes keeps out of archives; and nothing that is not committed."""
    files = {".gitattributes": "docs export-ignore\nmain.py export-subst\n", "docs/a": "a", "main.py": "$Format:%H$"}
    commit(repository, {**files, ".gitignore": "kept\n", "sub/kept": "k"})
    (repository / "run.sh").write_text("#!/bin/sh\n")
    (repository / "run.sh").chmod(0o755)
    (repository / "link").symlink_to("docs/a")
    git(repository, "add", "run.sh", "link")
    first = commit(repository, {})
    clean = sent(job(), repository)
    commit(repository, {"main.py": "second"})
    (repository / "main.py").write_text("edited")
    (repository / "new.py").write_text("new")
    git(repository, "add", "new.py")
    before = (git(repository, "status", "--porcelain"), (repository / ".git" / "index").read_bytes())
    then = sent(job(revision=first), repository)
    assert then == clean
    assert then.folder == repository
    assert (git(repository, "status", "--porcelain"), (repository / ".git" / "index").read_bytes()) == before
    assert then.revision is not None
    assert (then.revision.commit, sent(job(revision="main"), repository).revision.parent) == (first, first)  # type: ignore[union-attr]


def test_what_a_revision_changes_is_described(repository: Path) -> None:
    commit(repository, {"main.py": "1\n"})
    commit(repository, {"main.py": "2\n", "new.py": "3\n"})
    found = sent(job(revision="HEAD"), repository).revision
    assert found is not None
    assert [line.split() for line in found.stat.splitlines()] == [
        ["main.py", "|", "2", "+-"],
        ["new.py", "|", "1", "+"],
        ["2", "files", "changed,", "2", "insertions(+),", "1", "deletion(-)"],
    ]
    first = sent(job(revision="HEAD~1"), repository).revision
    assert first is not None
    assert (first.parent, first.stat) == ("", "")


def test_only_dockerignore_and_the_rules_for_credentials_leave_files_out(repository: Path) -> None:
    files = {".gitignore": "*.log\n", ".dockerignore": "big\n", "a.log": "1", "big": "2", ".netrc": "3", "main.py": ""}
    for name, text in files.items():
        (repository / name).write_text(text)
    git(repository, "add", "--all", "--force")
    commit(repository, {})
    found = sent(job(revision="HEAD"), repository)
    assert set(found.left_out.why) == {"big", ".netrc"}


def test_the_code_may_be_a_folder_of_the_repository(repository: Path) -> None:
    """Also one that is not in the checkout any more, and for a caller in such a folder."""
    first = commit(repository, {"sub/main.py": "1", "other": "2"})
    git(repository, "rm", "--quiet", "-r", "sub")
    commit(repository, {"other": "3"})
    found = sent(job(code="sub", revision=first, run={"script": "sub/main.py"}), repository)
    (repository / "sub").mkdir()
    assert sent(job(revision=first), repository / "sub") == found
    assert "has no folder sub, which is the job's `code`" in refused(
        job(code="sub", revision="HEAD", run={"script": "sub/main.py"}), repository
    )


def test_a_revision_means_what_it_meant_at_the_start(repository: Path) -> None:
    first = commit(repository, {"main.py": "1"})
    found = resolved(job(sweep={"code": ["main"], "grid": {"lr": [1, 2]}}), repository)
    second = commit(repository, {"main.py": "2"})
    assert found.commits == {"main": first}
    assert resolved(job(sweep={"code": ["../gone"]}), repository, {"../gone": "../gone"}).codes == ("../gone",)
    assert [(each.name, each.job.revision) for each in variants(found)] == [
        (f"code={first[:8]} lr=1", first),
        (f"code={first[:8]} lr=2", first),
    ]
    again = resolved(job(sweep={"code": ["main", "HEAD"]}), repository, {"main": first})
    assert again.codes == (first, second)


def test_a_folder_is_a_code_too(repository: Path, tmp_path: Path) -> None:
    """A worktree, a folder outside of any repository; a script is in it where it is in the code."""
    first = commit(repository, {"sub/main.py": "1"})
    git(repository, "worktree", "add", "--quiet", "--detach", str(tmp_path / "tree"))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "main.py").write_text("")
    keys: dict[str, Any] = {"code": "sub", "run": {"script": "sub/main.py"}}
    found = resolved(job(**keys, sweep={"code": ["../tree/sub", "../plain", "HEAD"]}), repository)
    made = [each.job for each in variants(found)]
    assert [(each.code, each.run.script, each.revision) for each in made] == [
        ("../tree/sub", "../tree/sub/main.py", None),
        ("../plain", "../plain/main.py", None),
        ("sub", "sub/main.py", first),
    ]
    assert sent(made[0], repository) == sent(made[2], repository)
    assert sent(made[1], repository)
    assert sent(job(revision="HEAD", **keys), tmp_path / "tree") == sent(made[2], repository)  # in a worktree


def test_a_bare_and_a_shallow_clone_have_revisions(repository: Path, tmp_path: Path) -> None:
    first = commit(repository, {"main.py": "1"})
    commit(repository, {"main.py": "2"})
    git(tmp_path, "clone", "--quiet", "--bare", str(repository), "bare.git")
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repository}", "shallow")
    here = sent(job(revision="HEAD"), repository)
    assert sent(job(revision="main"), tmp_path / "bare.git") == here
    shallow = sent(job(revision="HEAD"), tmp_path / "shallow")
    assert (shallow, shallow.revision.parent) == (here, "")  # type: ignore[union-attr]
    assert "\n  -> this clone is shallow: git fetch --unshallow" in refused(job(revision=first), tmp_path / "shallow")


def test_what_is_not_in_the_repository_is_refused_by_name(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    git(tmp_path / "inner", "init", "--quiet")
    commit(tmp_path / "inner", {"a": "1"})
    commit(repository, {"main.py": "1", "weights/model.bin": POINTER, ".gitattributes": "*.bin filter=lfs\n"})
    told = refused(job(revision="HEAD"), repository)
    assert "has weights/model.bin (1 LFS pointer): its content is not in the repository" in told
    assert re.search(r"\n  -> git worktree add .*git lfs pull there, and give that folder", told)
    allowed = ("-c", "protocol.file.allow=always")
    git(repository, *allowed, "submodule", "add", "--quiet", str(tmp_path / "inner"), "lib/inner")
    commit(repository, {"main.py": "2"})
    told = refused(job(revision="HEAD"), repository)
    assert "has lib/inner (1 submodule): its files are not in the repository" in told


def test_a_code_that_there_is_not_is_refused(repository: Path, tmp_path: Path) -> None:
    commit(repository, {"main.py": "1"})
    git(repository, "branch", "both")
    (repository / "both").mkdir()
    with pytest.raises(JobInvalid) as told:
        resolved(job(sweep={"code": ["none", "both", "./none", "main", "HEAD"]}), repository)
    text = str(told.value)
    assert "sweep.code.0: no such revision in" in text
    assert "none; nor is there such a folder\n  -> to list them: git log --oneline --all\n" in text
    assert "sweep.code.1: is a folder and a revision\n  -> write ./both, or refs/heads/both for a branch\n" in text
    with pytest.raises(JobInvalid, match=r"sweep\.code\.1: is the same code as main"):
        resolved(job(sweep={"code": ["main", "HEAD"]}), repository)
    assert "is not in a git repository" in refused(job(revision="HEAD"), tmp_path)
    assert "no such file: " in refused(job(revision="HEAD", run={"script": "other.py"}), repository)


@pytest.mark.parametrize("run", [{"command": ["python3", "new.py"]}, {"module": "new"}])
def test_a_program_that_is_not_committed_is_refused(repository: Path, run: dict[str, Any]) -> None:
    first = commit(repository, {"main.py": "1"})
    (repository / "new.py").touch()
    told = refused(job(run=run, revision="HEAD"), repository)
    [name] = [word for word in ("new.py", "new") if word in run.get("command", [run.get("module")])]
    assert f"{first[:8]} has no {name}, which the job starts, and which {repository} has" in told
    commit(repository, {"new.py": "2"})
    sent(resolved(job(run=run, revision="HEAD"), repository), repository)
    (repository / "new.py").unlink()  # then the image may have it
    sent(resolved(job(run=run, revision=first), repository), repository)
    sent(resolved(job(run={"command": ["sh", "-c", "x" * 300 + ".sh"]}, revision=first), repository), repository)


def test_the_job_file_that_is_given_counts(repository: Path) -> None:
    text = "name: x\nruntime: process\nnodes: [local]\nrun: {script: main.py}\n"
    commit(repository, {"job.yaml": text, "main.py": "1"})
    file, said = repository / "job.yaml", list[str]()
    sent(load("job.yaml", set={"revision": "HEAD"}), repository, said)
    assert not [line for line in said if "counts" in line]
    file.write_text(f"{text}restarts: 1\n")
    sent(load("job.yaml", set={"revision": "HEAD"}), repository, said)
    assert [line for line in said if line.startswith("job.yaml counts as it is now; ")]


def test_what_is_not_committed_is_said_of_the_commit_that_is_checked_out(repository: Path) -> None:
    """Of the files that would be sent without a revision, and only below `code`; the job file counts as it is now."""
    text = "name: x\nruntime: process\nnodes: [local]\ncode: a folder\nrun: {script: a folder/main.py}\n"
    files = {f"a folder/{name}": "1" for name in ("main.py", "gone.py", "moved.py", "same.py")}
    first = commit(repository, {**files, "job.yaml": text, "other.py": "1", ".gitignore": "ignored\n"})
    second, code = commit(repository, {"other.py": "2"}), repository / "a folder"

    def said(revision: str) -> list[str]:
        found = list[str]()
        sent(resolved(load("job.yaml", set={"revision": revision}), repository), repository, found)
        return [line for line in found if "uncommitted" in line]

    assert said("HEAD") == []
    (repository / "job.yaml").write_text(f"{text}restarts: 1\n")
    (repository / "other.py").write_text("3")
    (code / "runs").mkdir()
    for name in ("ignored", "runs/never", "cached.pyc"):
        (code / name).write_text("1")
    index = repository / ".git" / "index"
    before = index.read_bytes()
    assert said("main") == []
    (code / "main.py").write_text("2")
    assert said("HEAD") == [f"{second[:8]} is HEAD; 1 file with uncommitted changes is not in it: main.py"]
    (code / "new.py").write_text("1")
    (code / "gone.py").unlink()
    assert index.read_bytes() == before
    git(code, "mv", "moved.py", "then.py")
    of = "gone.py, main.py, moved.py, then.py, new.py"
    assert said(second) == [f"{second[:8]} is HEAD; 5 files with uncommitted changes are not in it: {of}"]
    (code / "newer.py").write_text("1")
    assert said("main")[0].endswith(f": {of} and 1 more")
    assert said(first) == []


HOLDS = """
from launcher.records.exported import temporary_folder
with temporary_folder():
    print(flush=True)
    input()
"""


def test_the_next_launcher_removes_the_folder_of_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with temporary_folder() as first:
        (first / "a").write_text("1")
        call, pipe = [sys.executable, "-c", HOLDS], subprocess.PIPE
        with subprocess.Popen(call, env=environ, stdin=pipe, stdout=pipe) as killed:
            assert killed.stdout
            killed.stdout.readline()
            killed.kill()
        assert len([*first.parent.iterdir()]) == 2
        with temporary_folder() as second:
            assert sorted(first.parent.iterdir()) == sorted([first, second])
            assert (first / "a").exists()
    assert [*first.parent.iterdir()] == []
