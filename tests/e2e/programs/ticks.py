"""Prints numbered lines for a while: a program to follow, detach from and stop."""

import signal
import sys
import time

signal.signal(signal.SIGTERM, lambda *_: (print("got SIGTERM, saving", flush=True), sys.exit(0)))
for tick in range(int(sys.argv[1])):
    print(f"tick {tick}", flush=True)
    time.sleep(0.1)
