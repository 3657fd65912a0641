"""Scripts that run in front of every process of a job, in any image: POSIX sh with nothing but coreutils.

entry.sh runs in front of the image's entrypoint, rank.sh in front of each worker, within.sh in front of the commands
that `exec` and `shell` start in a running container; agent.py, under the image's Python, is torchrun whose nodes find
each other again after a restart, elastic.py with its modules the same in a job with min_nodes. torch loads
flight_recorder.py in each worker: it writes down what the worker waits for when the run hangs, and flight_report.py
reads that in the job's image. The folder inside a container holds the scripts, `home/` (a writable home for a uid that
the image does not know) and `secrets/NAME` (the value's bytes, mode 0600).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

ELASTIC = ("begun.py", "elastic.py", "ends.py", "meeting.py", "wire.py", "words.py")
SCRIPTS = ("agent.py", *ELASTIC, "entry.sh", "environment.sh", "rank.sh", "within.sh")
PLUGIN = "torch_plugin"  # on the workers' PYTHONPATH, alone in a folder: no other script hides a module of the job's
RECORDER = "launcher_flight_recorder"


@functools.cache
def scripts() -> Mapping[str, bytes]:
    """The scripts' texts by file name."""
    found = {name: text(name) for name in SCRIPTS}
    found[f"{PLUGIN}/{RECORDER}.py"] = text("flight_recorder.py")
    entry_point = f"[torch.backends]\n{RECORDER} = {RECORDER}:start\n"
    found[f"{PLUGIN}/{RECORDER}-1.dist-info/entry_points.txt"] = entry_point.encode()
    return found


def text(name: str) -> bytes:
    return Path(__file__).with_name(name).read_bytes()
