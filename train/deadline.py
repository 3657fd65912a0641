"""Exit within a time limit after SIGTERM or Ctrl-C (SIGINT), even if the process is blocked.

Training stops between two steps. A read that does not return, or a missing peer, would block the process until it is
killed, without a message. Python's signal handlers do not run during such calls, but the signal is written to the
wakeup descriptor, which a thread reads. With torch 2.4, a wait for the rendezvous store fails because of the signal.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from train.data import reading

# torchrun kills its workers after 40 s, `launcher down` the container after 45 s; Slurm a job, by default, after 30 s
SECONDS = 25.0
INTERRUPTED = b"train: Ctrl-C: stopping with a checkpoint; a second one ends the training at once\n"
EXIT_STOPPED = 143


@contextmanager
def exit_after_sigterm(process: str, ask: Callable[[], None], over: threading.Event) -> Iterator[None]:
    """Call `ask` on SIGTERM or SIGINT, and exit SECONDS later, unless `over` is set or the block is left before.

    A second SIGINT ends the process. `process`: its name in the message. Must be called in the main thread.

    Raises:
        SystemExit: 143, if the signal interrupted a call of the block that then failed.
    """
    asked: list[str] = []

    def terminate(number: int, _: object) -> None:
        asked.append(signal.Signals(number).name)
        ask()

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # it also ends a call that does not return
        if os.environ.get("RANK", "0") == "0":
            os.write(2, INTERRUPTED)  # not print, which this signal may have interrupted
        terminate(number, frame)

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    descriptor = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    watch = threading.Thread(target=_watch, args=(ours, over, process), name="deadline", daemon=True)
    watch.start()
    # last: from now on SIGTERM does not end the process by itself
    handlers = {signal.SIGTERM: signal.signal(signal.SIGTERM, terminate)}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a shell starts jobs in the background
        handlers[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except RuntimeError as error:
        if not (os.strerror(errno.EINTR) in str(error) and asked):
            raise
        print(
            f"train: {process}: {asked[0]} ended the wait for the other processes; exiting without a new checkpoint",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(EXIT_STOPPED) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        over.set()
        signal.set_wakeup_fd(descriptor)
        theirs.close()
        watch.join()
        ours.close()  # not earlier: further signals are written to it


def _watch(signals: socket.socket, over: threading.Event, process: str) -> None:
    while numbers := signals.recv(16):
        if asked := [number for number in (signal.SIGTERM, signal.SIGINT) if number in numbers]:
            break
    else:
        return
    if over.wait(SECONDS):
        return
    found = reading.longest()
    why = f"; reading {found[0]} has taken {found[1]:.0f} s so far" if found and found[1] >= SECONDS else ""
    text = (
        f"train: {process}: no step finished within {SECONDS:g} s after {asked[0].name}{why}; exiting without a new "
        f"checkpoint"
    )
    print(text, file=sys.stderr, flush=True)
    os._exit(EXIT_STOPPED)
