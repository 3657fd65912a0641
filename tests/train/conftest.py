"""Start the process that ranks are forked from, and stop those that a failed test leaves behind."""

import os
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

from tests.train import runs


@pytest.fixture(scope="session", autouse=True)
def imports_begin() -> None:
    """In a worker, which runs many of these tests: beside the first ones, which start no ranks."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        forkserver.ensure_running()


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    while runs.STARTED:
        process = runs.STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.wait()
