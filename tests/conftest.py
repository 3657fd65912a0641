"""Fixtures available to every test, settings of all property tests, and which tests run beside one another."""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

import train  # noqa: F401 - or pytest takes tests/train for it, and the modules of an installed one
from tests.bed.fixtures import bed, clean_bed

__all__ = ["bed", "clean_bed"]

# A shell ignores these in background jobs; the programs and scripts that tests start and signal would inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# The programs that tests start, again and again, find their byte code.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# On a busy machine an example may take seconds.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n 3`: the tests of the bed in one process, which mostly wait; those that start runs on this machine
    alone, as they share its ports, in the second; all others, which compute, in the third.

    pytest-xdist (`--dist each`) lets each process run what it has collected.
    """
    count, worker = (os.environ.get(f"PYTEST_XDIST_WORKER{name}", "") for name in ("_COUNT", ""))
    if worker:
        items[:] = [item for item in items if lane(item) % int(count) == int(worker.removeprefix("gw"))]


def lane(item: pytest.Item) -> int:
    if "bed" in getattr(item, "fixturenames", ()) or item.get_closest_marker("bed"):
        return 0
    return 1 if item.path.parent.name in ("e2e", "process", "slurm", "bed") else 2
