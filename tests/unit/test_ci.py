"""What `.ci/pytest` makes of failed tests, on small test files of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pythons import PROMISED, environment, interpreter, lowest, main, result_of, with_project

ROOT = Path(__file__).resolve().parents[2]

ONCE = """
import os, pathlib, pytest
def first(name):  # whether this is the first time
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
"""
Ci = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def ci(tmp_path: Path) -> Ci:
    """Runs .ci/pytest on this text of a test file; returns its exit code and its lines."""

    def run(tests: str, *arguments: str, required: bool = False) -> tuple[int, list[str]]:
        (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '-q --max-worker-restart 0'\n")
        (tmp_path / "test_it.py").write_text(ONCE + tests)
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "LAUNCHER_"))}
        variables |= {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        variables |= {"LAUNCHER_BED_REQUIRED": "1"} if required else {}
        done = subprocess.run(
            ["bash", ROOT / ".ci/pytest", "-p", "no:cacheprovider", *arguments],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout.splitlines()

    return run


def test_a_test_that_passes_when_run_once_more_is_named_and_the_run_passes(ci: Ci) -> None:
    tests = """
@pytest.mark.xdist_group("a group")
@pytest.mark.parametrize("what", ["a@b c", "x"])
def test_a(what): assert what == "x" or not first("a")
@pytest.fixture
def torn():
    yield
    assert not first("b")
def test_b(torn): pass
def test_c(): pass
"""
    code, lines = ci(tests, "-n", "2", "--dist", "loadgroup")
    assert code == 0
    assert [line for line in lines if line.startswith("unstable")] == [
        "unstable: test_it.py::test_a[a@b c]",
        "unstable: test_it.py::test_b",
    ]
    assert re.fullmatch(r"2 passed in .*", lines[-1])


def test_a_test_that_fails_twice_is_a_failure(ci: Ci) -> None:
    tests = "def test_a(): assert not first('a')\ndef test_b(): assert False\n"
    code, lines = ci(tests)
    assert code == 1
    assert "unstable: test_it.py::test_a" in lines
    assert "unstable: test_it.py::test_b" not in lines
    assert re.fullmatch(r"1 failed, 1 passed in .*", lines[-1])


@pytest.mark.parametrize(
    ("tests", "code", "summary"),
    [
        ("@pytest.mark.parametrize('n', range(4))\ndef test_a(n): assert not first(str(n))\n", 1, "4 failed"),
        ("def test_a(): assert not first('a')\ndef test_b(): pytest.skip('no bed')\n", 1, "1 failed, 1 skipped"),
        ("assert not first('a')\ndef test_a(): pass\n", 2, "1 error"),
        ("", 5, "no tests ran"),
        ("def test_a(): pass\n", 0, "1 passed"),
    ],
    ids=["four", "skipped", "import", "none", "passed"],
)
def test_what_is_not_run_once_more(ci: Ci, tests: str, code: int, summary: str) -> None:
    ended, lines = ci(tests, required=True)
    assert (ended, lines[-1].partition(" in ")[0]) == (code, summary)
    assert "== what failed, once more and alone" not in lines


def test_a_file_that_a_worker_cannot_import_is_a_failure(ci: Ci) -> None:
    code, lines = ci("assert os.environ.get('PYTEST_XDIST_WORKER') is None\ndef test_a(): pass\n", "-n", "1")
    assert (code, lines[-1].partition(" in ")[0]) == (1, "1 error")


def test_a_worker_that_dies_is_a_failure_for_the_tests_after_it_are_not_run(ci: Ci) -> None:
    code, lines = ci("def test_a():\n    if first('a'): os._exit(1)\ndef test_b(): pass\n", "-n", "1")
    assert (code, lines[-1].partition(" in ")[0]) == (1, "1 failed")


def test_the_promised_pythons_are_run() -> None:
    lowest, highest = PROMISED
    assert f'requires-python = ">={lowest}"' in (ROOT / "pyproject.toml").read_text()
    for page in ("README.md", "docs/guide.md"):
        assert f"Python {lowest} to {highest}" in (ROOT / page).read_text()
    assert f"for Python {lowest} to {highest}" in (ROOT / "constraints.txt").read_text()


def test_a_python_that_cannot_be_had_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAUNCHER_CI_CACHE", str(tmp_path))
    assert main(["3.99"]) == 1
    assert capsys.readouterr().out.startswith("Python 3.99: NOT RUN: no python3.99 in PATH or ")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_lowest_versions_that_pyproject_allows_will_do(tmp_path: Path) -> None:
    python = interpreter(PROMISED[0], tmp_path / "python")
    environment(python, tmp_path / "made", lowest())
    code, line = result_of(with_project(tmp_path / "made", tmp_path / "lowest"))
    assert code == 0, line


def test_unstable_tests_are_named_as_they_are() -> None:
    lines = (ROOT / "tests/unstable.txt").read_text().splitlines()
    for name in (line for line in lines if not line.startswith("#")):
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0].rpartition('::')[2]}(" in (ROOT / file).read_text(), name
