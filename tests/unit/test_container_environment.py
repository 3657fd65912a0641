"""The entry script in all common shells: variables, secrets and users of the program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.container_box import Box, needs_root

OTHER_USER = 54321  # a uid that is not in /etc/passwd

SECRETS = {
    "PLAIN": b"abc",
    "LINES": b"one\ntwo\n\n",
    "QUOTES": b"a'b\"c`id`$(id)${HOME}\\n\\",
    "EMPTY": b"",
    "SPACES": b"  lead and trail  \t",
    "BYTES": b"\xff\xc3\x28\xe2\x82",
    "OPTION": b"-n",
}


def test_secrets_arrive_byte_for_byte_and_are_never_printed(box: Box) -> None:
    for name, value in SECRETS.items():
        box.secret(name, value)
    program = (
        f"import os, sys; want = {SECRETS!r}\n"
        "sys.exit([n for n, v in want.items() if os.environb.get(n.encode()) != v] or 0)"
    )
    code, out = box.run(sys.executable, "-c", program)
    assert (code, out) == (0, b"")


@pytest.mark.parametrize("name", ["A-B", "1A", "A B", "a=b"])
def test_a_secret_that_cannot_be_a_variable_is_refused(one: Box, name: str) -> None:
    one.secret(name, b"hush")
    code, out = one.run("true")
    assert code == 73
    assert name.encode() in out
    assert b"hush" not in out


def test_the_jobs_own_variables_are_not_overwritten(box: Box) -> None:
    own = {"log": "1", "code": "2", "name": "3", "kit": "4", "child": "5", "USER": "me", "TORCH_HOME": "/t"}
    out = box.run("env", env=own)[1].decode().splitlines()
    assert {f"{name}={value}" for name, value in own.items()} <= set(out)


def test_only_documented_variables_are_added(box: Box) -> None:
    out = box.run("env")[1].decode().splitlines()
    added = {line.partition("=")[0] for line in out} - set(box.env) - {"PWD", "OLDPWD", "SHLVL", "_"}
    assert added == {
        *("USER", "LOGNAME", "XDG_CACHE_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
        *("PYTHONBREAKPOINT", "PYTHONPATH"),  # launcher debug
        *("MPLCONFIGDIR", "LAUNCHER_JOB", "LAUNCHER_ENTRY"),  # identify the job's processes and the pid of entry.sh
    }


def _own(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, OTHER_USER, OTHER_USER, follow_symlinks=False)


def _as_other_user(argv: list[str]) -> list[str]:
    return [
        shutil.which("setpriv") or "",
        "--reuid",
        str(OTHER_USER),
        "--regid",
        str(OTHER_USER),
        "--clear-groups",
        *argv,
    ]


@pytest.fixture
def open_box(box: Box) -> Iterator[Box]:
    """A box that another user can access: pytest makes its own folder private."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Box(Path(folder), box.shell)


@needs_root
@pytest.mark.parametrize("home", ["/", "/nonexistent", None])
def test_a_uid_unknown_to_the_image_gets_a_home_name_and_caches(open_box: Box, home: str | None) -> None:
    box = open_box
    _own(box.kit)
    _own(box.output)
    env = {k: v for k, v in box.env.items() if k != "HOME"} | ({"HOME": home} if home else {})
    program = (
        "import getpass, os, pathlib\n"
        "print(getpass.getuser())\n"
        "for n in 'HOME TORCH_HOME TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR XDG_CACHE_HOME MPLCONFIGDIR'.split():\n"
        "    p = pathlib.Path(os.environ[n], 'x'); p.mkdir(parents=True); p.rmdir()\n"
        "print(os.environ['HOME'])\n"
    )
    argv = _as_other_user(box.argv("/usr/bin/python3", "-c", program))
    done = subprocess.run(argv, env=env, check=False, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"uid{OTHER_USER}\n{box.kit}/home\n", "")
    assert box.log.stat().st_uid == OTHER_USER


@needs_root
def test_an_unwritable_output_folder_is_reported_in_one_line(open_box: Box) -> None:
    box = open_box
    _own(box.kit)
    argv = _as_other_user(box.argv("echo", "never"))
    done = subprocess.run(argv, env=box.env, check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 73
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert str(box.output) in done.stderr
    assert str(OTHER_USER) in done.stderr


@needs_root
def test_secrets_owned_by_another_user_are_an_error(open_box: Box) -> None:
    box = open_box
    _own(box.kit)
    _own(box.output)
    box.secret("TOKEN", b"hush")
    done = subprocess.run(
        _as_other_user(box.argv("true")), env=box.env, check=False, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 73
    assert "secrets" in done.stderr
