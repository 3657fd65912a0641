"""pytest fixtures of the bed; tests/conftest.py makes them known to every test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NoReturn

import pytest

from tests.bed import cluster
from tests.bed.bed import Bed
from tests.bed.settings import BedUnavailable, Settings


@pytest.fixture(scope="session")
def bed() -> Iterator[Bed]:
    """The bed with at least two nodes, brought up if an engine answers, and left up for the next session.

    Without an engine: a skip with one line, or a failure where LAUNCHER_BED_REQUIRED is set. A test run never installs
    packages and never starts an engine: that is for `python -m tests.bed up`. Sessions take turns on a bed.
    """
    settings = Settings.from_environment()
    with cluster.locked(settings, "session"):
        try:
            cluster.up(settings, 2, install=_required())
            attached = Bed.attach(settings)
        except BedUnavailable as error:
            unavailable(str(error))
        yield attached


@pytest.fixture
def clean_bed(bed: Bed) -> Iterator[Bed]:
    """The bed with nothing of earlier tests on its nodes; it sweeps again afterwards and so proves no cleanliness."""
    for node in bed.nodes:
        bed.sweep(node)
    yield bed
    for node in bed.nodes:
        bed.sweep(node)


def unavailable(reason: str) -> NoReturn:
    """End a test that cannot run here: a skip with one line, or a failure where LAUNCHER_BED_REQUIRED is set."""
    if _required():
        pytest.fail(f"LAUNCHER_BED_REQUIRED is set, but: {reason}", pytrace=False)
    pytest.skip(reason)


def _required() -> bool:
    return os.environ.get("LAUNCHER_BED_REQUIRED", "") not in ("", "0")
