"""Stop the processes that a failed test leaves behind."""

from collections.abc import Iterator

import pytest

from tests.train import runs


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    while runs.STARTED:
        process = runs.STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.wait()
