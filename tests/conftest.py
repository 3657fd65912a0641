"""Fixtures available to every test, settings of all property tests, and which tests run beside one another."""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

import train  # noqa: F401 - or pytest takes tests/train for it, and the modules of an installed one
from tests.bed import cluster
from tests.bed.fixtures import bed, clean_bed
from tests.bed.settings import Settings

__all__ = ["bed", "clean_bed"]

# A shell ignores these in background jobs; the programs and scripts that tests start and signal would inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# The programs that tests start, again and again, find their byte code.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
WORKER_NUMBER = int(WORKER.removeprefix("gw") or 0)
FURTHER_BEDS = (1, 2)  # the lanes that have them
OWN_PORTS = ("test_elastic", "test_input")
if WORKER_NUMBER in FURTHER_BEDS:
    os.environ["LAUNCHER_BED_NAME"] = f"{os.environ.get('LAUNCHER_BED_NAME', 'launcher-bed')}-{WORKER_NUMBER + 1}"

# On a busy machine an example may take seconds.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n 6`, six lanes, most of which wait most of the time. pytest-xdist (`--dist each`) lets each process run
    what it has collected."""
    if WORKER:
        count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        items[:] = [item for item in items if lane(item) % count == WORKER_NUMBER]


def pytest_sessionfinish() -> None:
    if WORKER_NUMBER in FURTHER_BEDS:
        cluster.down(Settings.from_environment())


def lane(item: pytest.Item) -> int:
    folder, file = item.path.parent.name, item.path.stem
    if "bed" in getattr(item, "fixturenames", ()) or item.get_closest_marker("bed"):
        on_first = folder == "bed" or "image" in file or file > "test_r"
        return 0 if on_first else 1 if file < "test_f" else 2  # each with a bed of its own
    if folder in ("e2e", "bed"):
        return 4 if file.startswith(OWN_PORTS) else 3  # plain processes share this machine's port 29500
    return 4 if folder in ("process", "slurm") else 5
