"""`python -m launcher.trainer ARGS` is `python -m train ARGS`, from any folder, without a checkout of the launcher."""

import os
import runpy
import sys

from launcher.shipped import shipped

if __name__ == "__main__":
    folder = str(shipped("train").parent)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))  # of its processes
    runpy.run_module("train", run_name="__main__", alter_sys=True)
