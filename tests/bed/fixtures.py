"""pytest fixtures of the bed; tests/conftest.py makes them known to every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.bed import cluster
from tests.bed.bed import Bed
from tests.bed.settings import BedUnavailable, Settings


@pytest.fixture(scope="session")
def bed() -> Bed:
    """The bed with at least two nodes, brought up if an engine answers, and left up for the next session.

    Without an engine: a skip with one line, or a failure where LAUNCHER_BED_REQUIRED is set. A test run never installs
    packages and never starts an engine: that is for `python -m tests.bed up`.
    """
    settings = Settings.from_environment()
    required = os.environ.get("LAUNCHER_BED_REQUIRED", "") not in ("", "0")
    try:
        cluster.up(settings, 2, install=required)
        return Bed.attach(settings)
    except BedUnavailable as error:
        if required:
            pytest.fail(f"LAUNCHER_BED_REQUIRED is set and the bed is unavailable: {error}", pytrace=False)
        pytest.skip(str(error))


@pytest.fixture
def clean_bed(bed: Bed) -> Iterator[Bed]:
    """The bed with nothing of earlier tests on its nodes; it sweeps again afterwards and so proves no cleanliness."""
    for node in bed.nodes:
        bed.sweep(node)
    yield bed
    for node in bed.nodes:
        bed.sweep(node)
