"""Prints numbered lines for a while: a program to follow, detach from and stop.

ticks.py COUNT [FILE]: ten lines a second, and all that are left at once when FILE exists.
"""

import signal
import sys
import time
from pathlib import Path

signal.signal(signal.SIGTERM, lambda *_: (print("got SIGTERM, saving", flush=True), sys.exit(0)))
for tick in range(int(sys.argv[1])):
    print(f"tick {tick}", flush=True)
    if not sys.argv[2:] or not Path(sys.argv[2]).exists():
        time.sleep(0.1)
