"""One launcher at a time starts the variants of a sweep."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.features.sweeps.alone import alone
from launcher.records.sweeps import is_run_here, lock_of

GROUP = "night-20261128-200000-bbbb"


def test_a_second_launcher_is_refused_and_one_that_only_looks_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with alone(GROUP):
        assert is_run_here(GROUP)
        with pytest.raises(UsageError, match="another launcher runs its variants"), alone(GROUP):
            pass
    assert not is_run_here(GROUP)
    looking, held = lock_of(GROUP).open("wb"), threading.Event()

    def start() -> None:
        with alone(GROUP):
            held.set()

    with looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        starting = threading.Thread(target=start)
        starting.start()
    starting.join(60)
    assert held.is_set()
