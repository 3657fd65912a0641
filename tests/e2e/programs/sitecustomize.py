"""For hangs.py: print a line per second from the start of torchrun to the first step of a rank.

On a busy machine, loading torch takes longer than a test's hang timeout, and torchrun prints nothing during it.
"""

import os
import subprocess

if "RANK" not in os.environ and "LAUNCHER_OUTPUT" in os.environ:
    ends = f'[ -e "$LAUNCHER_OUTPUT/begun" ] || ! kill -0 {os.getpid()} 2>/dev/null'
    subprocess.Popen(["sh", "-c", f"until {ends}; do echo starting; sleep 1; done"])
