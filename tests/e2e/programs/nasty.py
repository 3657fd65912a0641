"""Difficult output of real programs: a line of a megabyte, progress bars, a split character, no final newline."""

import os
import sys
import time


def say(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


rank = os.environ.get("RANK", "0")
for _ in range(12):
    print(f"rank {rank} at {time.time():.2f}", flush=True)
    time.sleep(0.5)
if rank == "0":
    say(b"x" * (1 << 20) + b"\n")
    say(b"10%\r50%\r100%\r\n")
    say("grün".encode()[:3])
    time.sleep(0.5)
    say("grün".encode()[3:] + b" \xff broken\n")
    say(b"the last line has no end")
sys.exit(0)
