"""Fixtures available to every test, settings of property tests, and how tests are selected and handed out."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import train  # noqa: F401 - or pytest takes tests/train for it, and the modules of an installed one
from tests.bed.fixtures import bed, clean_bed, required

__all__ = ["bed", "clean_bed"]

# A shell ignores these in background jobs; the programs and scripts that tests start and signal would inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# The programs that tests start, again and again, find their byte code, and so do the workers that of the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

gc.disable()  # until all tests are collected: a second in each worker

TESTS = Path(__file__).parent
WORKERS, WITH_BEDS = 6, 4  # at least: many tests wait most of the time; those with a bed each use more of the machine
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if WORKER not in ("", "gw0"):  # each worker has a separate bed
    os.environ["LAUNCHER_BED_NAME"] = f"{os.environ.get('LAUNCHER_BED_NAME', 'launcher-bed')}-{WORKER}"

OF_CALLERS_ENGINE = "image|compose|crash"  # files whose tests make and remove images in this machine's own engine
TRAIN = "train: trainer and experiments", "train: the others"  # half of the time each
SECONDS = {"e2e": 3.0, "unit": 0.15}  # that a test of this folder takes, roughly; others 1

# What `python -m pytest` leaves out (pyproject.toml), and how to run it
LEFT_OUT = {
    "slow": ("slow", "-m slow"),
    "gpu": ("for a GPU", "-m gpu"),
    "bed": ("for a cluster", "-m 'bed and not slow'"),
    "ci": ("longer", "-m 'ci and not bed and not slow'"),
}
_left_out: Counter[str] = Counter()

# On a busy machine an example may take seconds.
EXAMPLES = int(os.environ.get("LAUNCHER_TEST_EXAMPLES", "100"))
settings.register_profile("untimed", max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Tests that are named by file run in this process, which starts faster; others run in several processes."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    if named and all(".py" in arg for arg in config.args):
        return 0
    return max(WORKERS if "not bed" in config.option.markexpr else WITH_BEDS, os.cpu_count() or 1)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that need a cluster, and those that stay in one worker because they share something.

    Here, and not when all tests have been collected: by then pytest-xdist has read the groups.
    """
    folder, file = str(item.path.parent.relative_to(TESTS)), item.path.stem
    if "bed" in getattr(item, "fixturenames", ()) or folder == "slurm":
        item.add_marker("bed")
    if folder.startswith("train/"):  # expensive fixtures, one per file, and in each worker a process with torch
        item.add_marker(pytest.mark.xdist_group(TRAIN[folder not in ("train/trainer", "train/experiments")]))
    elif folder == "slurm":
        item.add_marker(pytest.mark.xdist_group("slurm"))
    elif folder == "bed" or (folder == "e2e" and re.search(OF_CALLERS_ENGINE, file)):
        item.add_marker(pytest.mark.xdist_group("images"))


@pytest.hookimpl(trylast=True)  # only those that are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests into the order in which the workers take them: first the long groups, one for each worker.

    The others that wait for a cluster are spread evenly among those that compute. Without a cluster, the trainer's are
    first: two workers compute while the others wait.
    """
    kinds: dict[str, list[pytest.Item]] = {"slurm": [], "images": [], "bed": [], "train": [], "": []}
    for item in items:
        group = next((mark.args[0] for mark in item.iter_markers("xdist_group")), "")
        bed = "bed" if item.get_closest_marker("bed") else ""
        kinds["train" if group in TRAIN else group if group in kinds else bed].append(item)
    if kinds["bed"]:
        computing = {*kinds["train"], *kinds[""]}
        kinds["train"], kinds[""] = [], [item for item in items if item in computing]
    placed = []
    for kind in (kinds["bed"], kinds[""]):
        ends = list(itertools.accumulate(SECONDS.get(str(item.path.parent.relative_to(TESTS)), 1.0) for item in kind))
        placed += [(end / ends[-1], item) for end, item in zip(ends, kind, strict=True)]
    spread = [item for _, item in sorted(placed, key=lambda each: each[0])]
    items[:] = [*kinds["slurm"], *kinds["images"], *kinds["train"], *spread]


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if WORKER and grouped and not any("@" in item.nodeid for item in grouped):
        pytest.exit("pytest-xdist ignores the groups of tests: install the versions of constraints.txt", returncode=4)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        _left_out.update([next((mark for mark in LEFT_OUT if item.get_closest_marker(mark)), "")])


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config: Any = session.config
    if WORKER:
        config.workeroutput["left_out"] = dict(_left_out)
    elif _skipped(config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if node.gateway.id == "gw0" and error is None:  # all workers collect the same tests
        _left_out.update(node.workeroutput["left_out"])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    counts = [f"{_left_out[mark]} {what} ({how})" for mark, (what, how) in LEFT_OUT.items() if _left_out[mark]]
    if counts:
        terminalreporter.write_line(f"tests left out: {', '.join(counts)}")
    if _skipped(config):
        terminalreporter.write_line("skipped tests count as failures, since LAUNCHER_BED_REQUIRED is set")


def _skipped(config: pytest.Config) -> bool:
    """Whether tests were skipped although nothing may be missing here."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    return required() and bool(reporter and reporter.stats.get("skipped"))
