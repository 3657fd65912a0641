"""pytest's plugin of CI (.ci/pytest): which failed tests are run once more, alone, and which of these are unstable.

ALSO_RUN: lines about other runs, for the end.

A failure that is not a test's own is not tried again: a file that cannot be imported, a test that is skipped although
nothing may be missing, a worker that dies, with which the tests end that it and others had before them. `pytest --lf`
would pass over all three. It also knows a test with an xdist_group by a name that the test has only in a worker, and
runs all tests of the file in its place.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.bed.fixtures import required

AT_MOST = 3  # more are no accident
GROUP = re.compile(r"@[^\]]*$")  # pytest-xdist appends the test's group to its name

_died: list[str] = []  # workers
_also_run: list[str] = []


def pytest_configure() -> None:
    _also_run.extend(os.environ.pop("ALSO_RUN", "").splitlines())  # no test's own variable


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failed-to", type=Path, help="file for the names of failed tests that may be run once more")
    parser.addoption("--say-unstable", action="store_true", help="these tests failed before: print those that pass now")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if error is not None:
        _died.append(node.gateway.id)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    file: Path | None = session.config.option.failed_to
    if file is None or hasattr(session.config, "workerinput") or exitstatus != pytest.ExitCode.TESTS_FAILED or _died:
        return
    stats = _stats(session.config)
    of_tests = [report for report in _failed(stats) if isinstance(report, pytest.TestReport)]
    names = {GROUP.sub("", report.nodeid) for report in of_tests}
    complete = len(of_tests) == len(_failed(stats)) and not (required() and stats.get("skipped"))
    if complete and len(names) <= AT_MOST:
        file.write_text("".join(f"{name}\n" for name in sorted(names)))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for line in _also_run:
        terminalreporter.write_line(line)
    if config.option.say_unstable:
        stats = _stats(config)
        failed = {report.nodeid for report in _failed(stats)}
        for report in stats.get("passed", []):
            if report.nodeid not in failed:
                terminalreporter.write_line(f"unstable: {report.nodeid}")


def _stats(config: pytest.Config) -> dict[str, list[Any]]:
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    return reporter.stats if reporter else {}


def _failed(stats: dict[str, list[Any]]) -> list[Any]:
    return [*stats.get("failed", []), *stats.get("error", [])]
