"""What a test started and left behind, because it failed, does not outlive it."""

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
