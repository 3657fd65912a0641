"""Fixtures available to every test, and which tests may run beside one another."""

import signal

import pytest

from tests.bed.fixtures import bed, clean_bed

__all__ = ["bed", "clean_bed"]

# A shell ignores SIGINT in background jobs; the programs that tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n 2`: the tests of the bed in one process, in their order, and beside it the others, a file at a time."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        file = item.nodeid.partition("::")[0]
        on_bed = "bed" in fixtures or file.startswith(("tests/bed/", "tests/e2e/"))
        item.add_marker(pytest.mark.xdist_group("bed" if on_bed else file))
