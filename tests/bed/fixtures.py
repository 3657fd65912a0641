"""pytest fixtures of the bed; tests/conftest.py makes them available to every test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import NoReturn

import pytest

from tests.bed import cluster, faults
from tests.bed.bed import Bed, Node
from tests.bed.settings import BedUnavailable, Settings


@pytest.fixture(scope="session")
def bed() -> Iterator[Bed]:
    """The bed with at least two nodes, brought up if a Docker engine answers, and left up for the next session.

    The beds of pytest-xdist's further workers are taken down, and one whose session was killed: its faults may remain.

    Without an engine the test is skipped with one line, or fails if LAUNCHER_BED_REQUIRED is set. Without that variable
    a test run never installs packages or starts an engine; `python -m tests.bed up` does. One session at a time.
    """
    settings = Settings.from_environment()
    used = settings.state / "used"  # while a session runs
    with cluster.locked(settings, "session"):
        try:
            if used.exists():
                cluster.down(settings)
            cluster.up(settings, 2, install=required())
            attached = Bed.attach(settings)
        except BedUnavailable as error:
            unavailable(str(error))
        used.touch()
        yield attached
        used.unlink(missing_ok=True)
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        cluster.down(settings)


@pytest.fixture
def clean_bed(bed: Bed) -> Bed:
    """The bed without leftovers of earlier tests. What this one leaves, the next one sweeps: it costs half a second."""
    bed.sweep()
    return bed


@contextlib.contextmanager
def with_image_store(bed: Bed, nodes: Sequence[Node], store: str) -> Iterator[Bed]:
    """The bed with this kind of image store on these nodes: "classic", unchanged, or "containerd"."""
    with contextlib.ExitStack() as healing:
        try:
            if store == "containerd":
                healing.enter_context(faults.containerd_store(bed, *nodes))
        except BedUnavailable as reason:
            unavailable(str(reason))
        yield bed


def unavailable(reason: str) -> NoReturn:
    """Ends a test that cannot run here: skips it with one line, or fails it if LAUNCHER_BED_REQUIRED is set."""
    if required():
        pytest.fail(f"LAUNCHER_BED_REQUIRED is set, but: {reason}", pytrace=False)
    pytest.skip(reason)


def required() -> bool:
    return os.environ.get("LAUNCHER_BED_REQUIRED", "") not in ("", "0")
