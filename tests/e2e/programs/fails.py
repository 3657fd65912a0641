"""A faulty program: fails.py NODE CODE exits with CODE on that node (`all`: on each) and keeps running on others."""

import os
import sys
import time

node, code = sys.argv[1], int(sys.argv[2])
time.sleep(0.5)
if node in (os.environ["LAUNCHER_NODE"], "all"):
    if not code:
        raise KeyError("dog")
    sys.exit(code)
time.sleep(600)
