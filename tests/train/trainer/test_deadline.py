"""The time that a process has after SIGTERM; a read that never returns is in test_bad_input."""

import os
import signal
import threading

import pytest

from train.deadline import exit_after_sigterm


def test_a_second_sigterm_after_the_training_has_stopped_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """torchrun and the container's entry script may both send it."""
    stopped = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    try:
        with exit_after_sigterm("rank 0", stopped):
            [watch] = [thread for thread in threading.enumerate() if thread.name == "deadline"]
            os.kill(os.getpid(), signal.SIGTERM)
            watch.join(60)
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not watch.is_alive()
    assert capfd.readouterr().err == ""
