"""The time that a process has after SIGTERM or Ctrl-C; a read that never returns is in test_bad_input."""

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest

from train.deadline import exit_after_sigterm


def test_a_second_sigterm_after_the_training_has_stopped_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """torchrun and the container's entry script may both send it."""
    stopped = threading.Event()
    with exit_after_sigterm("rank 0", stopped.set, stopped):
        [watch] = [thread for thread in threading.enumerate() if thread.name == "deadline"]
        os.kill(os.getpid(), signal.SIGTERM)
        watch.join(60)
        os.kill(os.getpid(), signal.SIGTERM)
    assert not watch.is_alive()
    assert capfd.readouterr().err == ""


def test_a_sigterm_that_interrupts_a_wait_for_the_store_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    """torch 2.4's store then raises this error; the same error without a signal is a failure."""
    interrupted = os.strerror(errno.EINTR)

    def wait(*signals: signal.Signals) -> None:
        with exit_after_sigterm("rank 1 on here", lambda: None, threading.Event()):
            for number in signals:
                signal.raise_signal(number)
            raise RuntimeError(interrupted)

    with pytest.raises(SystemExit) as ended:
        wait(signal.SIGTERM)
    assert ended.value.code == 143
    said = "train: rank 1 on here: SIGTERM ended the wait for the other processes; exiting without a new checkpoint\n"
    assert capfd.readouterr().err == said
    with pytest.raises(RuntimeError, match=interrupted):
        wait()


AT_ONCE = """
import _signal, os, signal, sys, threading, time
from train import deadline

def caught(frame, event, function):
    if event == "c_return" and function is _signal.signal:
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGTERM)

deadline.SECONDS = 0.1
sys.setprofile(caught)
with deadline.exit_after_sigterm("rank 0 on here", lambda: print("asked", flush=True), threading.Event()):
    time.sleep(1000)
"""


def test_a_sigterm_that_comes_as_soon_as_it_is_caught_has_the_deadline() -> None:
    ended = subprocess.run([sys.executable, "-c", AT_ONCE], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 143
    assert "asked" in ended.stdout
    assert "rank 0 on here: no step finished within 0.1 s after SIGTERM" in ended.stderr


TWICE = """
import os, signal, sys, threading
from train import deadline

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
over = threading.Event()
with deadline.exit_after_sigterm("rank 0 on here", lambda: print("asked", flush=True), over):
    signal.raise_signal(signal.SIGINT)
    print("goes on", flush=True)
    if sys.argv[1] == "twice":
        signal.raise_signal(signal.SIGINT)
    over.set()
print("done", flush=True)
"""


def test_ctrl_c_asks_for_a_stop_and_a_second_one_ends_the_process() -> None:
    said = ["asked", "goes on"]
    for times, code, lines in (("once", 0, [*said, "done"]), ("twice", -signal.SIGINT, said)):
        ended = subprocess.run(
            [sys.executable, "-c", TWICE, times], check=False, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == code, ended.stderr
        assert ended.stdout.splitlines() == lines
        assert ended.stderr == "train: Ctrl-C: stopping with a checkpoint; a second one ends the training at once\n"
