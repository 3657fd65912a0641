"""For hangs.py: prints a line each second, from the start of torchrun until the first step of a rank.

A busy machine needs longer than a test's hang timeout to load torch, and torchrun prints nothing meanwhile.
"""

import os
import subprocess

if "RANK" not in os.environ and "LAUNCHER_OUTPUT" in os.environ:
    ends = f'[ -e "$LAUNCHER_OUTPUT/begun" ] || ! kill -0 {os.getpid()} 2>/dev/null'
    subprocess.Popen(["sh", "-c", f"until {ends}; do echo starting; sleep 1; done"])
