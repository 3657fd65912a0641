"""Scripts that wrap every process of a job in any image; the shell scripts need only POSIX sh and coreutils.

entry.sh wraps the image's entrypoint, rank.sh each worker, and within.sh the commands that `exec` and `shell` start in
a running container. torchrun.py, run by the image's Python, is torchrun with the exit code of the rank that failed;
agent.py is it with nodes that can rejoin after a restart, elastic.py and its modules do the same for jobs with
min_nodes. torch loads flight_recorder.py in each worker: when a
run hangs, it records the pending collectives, and flight_report.py analyses the recordings in the job's image. The
folder in the container holds the scripts, `home/` (a writable home for a uid that is unknown in the image) and
`secrets/NAME` (the value's bytes, mode 0600).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

ELASTIC = ("begun.py", "elastic.py", "ends.py", "meeting.py", "torchrun.py", "wire.py", "words.py")
SCRIPTS = ("agent.py", *ELASTIC, "entry.sh", "environment.sh", "rank.sh", "within.sh")
PLUGIN = "torch_plugin"  # on the workers' PYTHONPATH; a separate folder, so that no script shadows a module of the job
RECORDER = "launcher_flight_recorder"


@functools.cache
def scripts() -> Mapping[str, bytes]:
    """Return the contents of the scripts by file name."""
    found = {name: text(name) for name in SCRIPTS}
    found[f"{PLUGIN}/{RECORDER}.py"] = text("flight_recorder.py")
    entry_point = f"[torch.backends]\n{RECORDER} = {RECORDER}:start\n"
    found[f"{PLUGIN}/{RECORDER}-1.dist-info/entry_points.txt"] = entry_point.encode()
    return found


def text(name: str) -> bytes:
    return Path(__file__).with_name(name).read_bytes()
