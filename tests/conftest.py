"""Fixtures available to every test, settings of all property tests, and which tests run beside one another."""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

from tests.bed.fixtures import bed, clean_bed

__all__ = ["bed", "clean_bed"]

# A shell ignores SIGINT in background jobs; the programs that tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The programs that tests start, again and again, find their byte code.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# On a busy machine an example may take seconds.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n 2`: the tests of the bed in one process, which mostly wait, beside all others, which compute.

    pytest-xdist (`--dist each`) lets each process run what it has collected.
    """
    count, worker = (os.environ.get(f"PYTEST_XDIST_WORKER{name}", "") for name in ("_COUNT", ""))
    if worker:
        items[:] = [item for item in items if lane(item) % int(count) == int(worker.removeprefix("gw"))]


def lane(item: pytest.Item) -> int:
    return 0 if "bed" in getattr(item, "fixturenames", ()) else 1
