"""python debug_client.py SOCKET RANK: the terminal of a rank that waits in breakpoint() (launcher_breakpoint.py).

Exit code 0 when the rank goes on or ends, LEFT if it was left waiting, NOT_THERE if it does not wait. Runs in the
Python of the rank, 3.7 or newer.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

LEFT, NOT_THERE = 75, 3
INTERRUPT = b"\x03\n"


def main(path: str, rank: str) -> int:
    with contextlib.suppress(ImportError):  # then lines have neither history nor editing
        __import__("readline")
    folder = os.open(Path(path).parent, os.O_RDONLY)
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(f"/proc/self/fd/{folder}/{Path(path).name}")  # a socket's path has at most 107 bytes
    except OSError:  # it has ended, or another terminal was faster
        return NOT_THERE
    text, decoder = "", codecs.getincrementaldecoder("utf-8")("replace")
    interrupted: list[bool] = []

    def interrupt(*_: object) -> None:
        """Interrupt what the rank runs."""
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(True)
        what = f"\ninterrupting rank {rank}: it stops when its current call lets it. Ctrl-C again: leave it\n"
        os.write(1, what.encode())  # sys.stdout may be in a write()
        with contextlib.suppress(OSError):
            link.sendall(INTERRUPT)

    signal.signal(signal.SIGINT, interrupt)
    while True:
        shown, begun, prompt = text.partition("\0")
        sys.stdout.write(shown)
        sys.stdout.flush()
        text = begun + prompt
        if "\0" in prompt:
            prompt, _, text = prompt.partition("\0")
            interrupted.clear()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            line = answer(prompt, rank)
            signal.signal(signal.SIGINT, interrupt)
            if line is None:
                return LEFT
            with contextlib.suppress(OSError):  # the end is read next
                link.sendall(f"{line}\n".encode("utf-8", "replace"))
            continue
        try:
            received = link.recv(65536)
        except OSError:
            received = b""
        if not received:
            return 0
        text += decoder.decode(received)


def answer(prompt: str, rank: str) -> str | None:
    """Return what the user types; None at the end of the input."""
    while True:
        try:
            return input(prompt)
        except KeyboardInterrupt:
            print(f"\nrank {rank} is stopped. c: it goes on, q: it ends, Ctrl-D: leave it waiting")
        except EOFError:
            print(f"\nleft: rank {rank} still waits: launcher debug {os.environ['LAUNCHER_RUN']} --rank {rank}")
            return None


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:  # not at a prompt
        print(f"\nleft: rank {sys.argv[2]} still runs the command, and waits again when it stops")
        sys.exit(LEFT)
