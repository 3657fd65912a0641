"""Numbered lines in bursts: flood.py LINES LINES_PER_BURST PAUSE."""

import sys
import time

lines, burst, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
for start in range(0, lines, burst):
    sys.stdout.write("".join(f"line {i}\n" for i in range(start, min(start + burst, lines))))
    sys.stdout.flush()
    time.sleep(pause)
