"""The code folder is copied unchanged: every file with its path and content."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tarfile

import pytest

from tests.bed.bed import Bed
from tests.e2e import names
from tests.e2e.cli import Cli, bed_job
from tests.e2e.programs.lists import tree


def test_files_of_any_name_are_copied_for_a_process(home_cli: Cli) -> None:
    program = names.project(home_cli)
    job = home_cli.job("names", runtime="process", nodes=["local"], run={"command": ["python3", program]})
    assert json.loads(home_cli("up", job).stdout) == tree(home_cli.cwd)


@pytest.mark.bed
def test_files_of_any_name_are_copied_into_a_container(bed_cli: Cli, bed: Bed) -> None:
    program = names.project(bed_cli)
    job = bed_cli.job("names", **bed_job(nodes=["node1"], run={"command": ["python3", program]}))
    assert json.loads(bed_cli("up", job).stdout) == tree(bed_cli.cwd)


def test_an_invalid_pattern_in_an_ignore_file_is_skipped(home_cli: Cli) -> None:
    program = home_cli.program("lists.py")
    (home_cli.cwd / "sub").mkdir()
    for name in ("kept", "left out"):
        (home_cli.cwd / "sub" / name).write_text("")
    for folder in (".", "sub"):
        (home_cli.cwd / folder / ".gitignore").write_text("!\n/\nleft*\n")
    job = home_cli.job("ignores", runtime="process", nodes=["local"], run={"command": ["python3", program]})
    found = json.loads(home_cli("up", job).stdout)
    assert set(found) == {".gitignore", "ignores.yaml", "lists.py", "sub/.gitignore", "sub/kept"}


@pytest.mark.ci
@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root can read all without setpriv")
@pytest.mark.parametrize("command", [("up",), ("plan", "--offline"), ("shell",)])
def test_a_folder_of_the_code_that_cannot_be_read_is_refused_unless_it_is_ignored(
    command: tuple[str, ...], home_cli: Cli
) -> None:
    rights = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
    cli = Cli(home_cli.cwd, home_cli.env, (*rights, *home_cli.launcher))
    job = cli.job("locked", runtime="process", nodes=["local"], run={"command": ["true"]})
    private = cli.cwd / "sub" / "private"
    private.mkdir(parents=True)
    private.chmod(0)
    refused = cli(command[0], job, *command[1:], code=2)
    assert f"code {private}: cannot be read: Permission denied" in refused.stderr
    assert "or list it in .dockerignore" in refused.stderr
    assert not cli.runs()
    (cli.cwd / ".dockerignore").write_text("private\n")
    cli(command[0], job, *command[1:])


def test_what_is_sent_and_what_is_not_is_said_before_anything_starts(home_cli: Cli) -> None:
    """A private key, a link out of the code, and the home folder as code."""
    cwd = home_cli.cwd
    (cwd / "robot").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    (cwd / ".env").write_text("TOKEN=x")
    (cwd / "a.log").write_text("")
    (cwd / ".gitignore").write_text("*.log\n")
    (cwd / "link").symlink_to(".gitignore")
    job = home_cli.job("said", runtime="process", nodes=["local"], run={"command": ["ls", "-A"]})
    for command in (("plan", job, "--offline"), ("up", job)):
        done = home_cli(*command)
        assert re.search(r"launcher: code: 2 files, \d+ B, 1 left out by .gitignore, 1 link\n", done.stderr)
        assert "left out of the code, as it may contain credentials: .env, robot;" in done.stderr
    assert done.stdout.split() == [".gitignore", "link", "said.yaml"]
    with tarfile.open(home_cli.runs()[-1] / "code.tar.gz") as archive:
        assert archive.getnames() == [".gitignore", "link", "said.yaml"]
    (cwd / "common").symlink_to("..")
    at_home = Cli(cwd, {**home_cli.env, "HOME": str(cwd)})
    for words, cli in (("the link common -> .. leads out", home_cli), (f"code: {cwd} is a home folder", at_home)):
        for command in (("plan", job, "--offline"), ("up", job)):
            assert words in cli(*command, code=2).stderr
    assert len(home_cli.runs()) == 1


def test_a_module_that_was_left_out_is_named_when_its_import_fails(home_cli: Cli) -> None:
    (home_cli.cwd / "pkg" / "data").mkdir(parents=True)
    (home_cli.cwd / "pkg" / "data" / "loader.py").write_text("x = 1\n")
    (home_cli.cwd / "main.py").write_text("from pkg.data.loader import x\n")
    (home_cli.cwd / ".gitignore").write_text("# data\ndata/\n")
    job = home_cli.job("missing", runtime="process", nodes=["local"], run={"command": [sys.executable, "main.py"]})
    (home_cli.cwd / "pkg" / "__init__.py").write_text("")
    done = home_cli("up", job, code=1)
    assert "pkg/data/ exists here but was not sent: excluded by .gitignore:2" in done.stderr
    assert home_cli.result()["failure"]["cure"].startswith("pkg/data/ exists here")
