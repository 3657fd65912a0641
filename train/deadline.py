"""SIGTERM ends a process in time, whatever it waits for.

Training stops between two steps. A read that does not return, or a peer that does not come, would make it wait until it
is killed, without a word. Python's signal handlers do not run during such calls, but the wakeup descriptor is
written, and a thread reads it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from train.data import reading

SECONDS = 25.0  # torchrun kills its workers after 30 s, `launcher down` the container after 45 s
EXIT_STOPPED = 143


@contextmanager
def ends_after_sigterm(who: str, over: threading.Event) -> Iterator[None]:
    """Unless `over` is set, or the block is left, within SECONDS after SIGTERM, the process ends.

    `who` is its name in the message. To be called in the main thread.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    watch = threading.Thread(target=_watch, args=(ours, over, who), name="deadline", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        theirs.close()
        watch.join()
        ours.close()  # not earlier: further signals are written to it


def _watch(signals: socket.socket, over: threading.Event, who: str) -> None:
    while numbers := signals.recv(16):
        if signal.SIGTERM in numbers:
            break
    else:
        return
    if over.wait(SECONDS):
        return
    found = reading.longest()
    why = f"; {found[0]} has been read for {found[1]:.0f} s" if found and found[1] >= SECONDS else ""
    text = f"train: {who}: no step ended within {SECONDS:g} s after SIGTERM{why}; leaving without a new checkpoint"
    print(text, file=sys.stderr, flush=True)
    os._exit(EXIT_STOPPED)
