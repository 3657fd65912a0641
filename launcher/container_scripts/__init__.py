"""Scripts that wrap every process of a job in any image; the shell scripts need only POSIX sh and coreutils.

entry.sh wraps the image's entrypoint, rank.sh each worker, and within.sh the commands that `exec` and `shell` start in
a running container. torchrun.py, run by the image's Python, is torchrun with the exit code of the rank that failed;
agent.py is it with nodes that can rejoin after a restart; elastic.py (`launcher.elastic`) does the same for jobs with
min_nodes. torch loads flight_recorder.py (`launcher.hangs`) in each worker. Python's breakpoint() calls
launcher_breakpoint.py, whose terminal debug.sh and debug_client.py are. The folder in the container holds the
scripts, `home/` (a writable home for a uid that is unknown in the image) and `secrets/NAME` (the value's bytes, mode
0600).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

# by folder of the launcher; in the container they are in one
SCRIPTS = {
    "container_scripts": (
        *("agent.py", "debug.sh", "debug_client.py", "entry.sh", "environment.sh", "rank.sh", "torchrun.py"),
        *("within.sh", "words.py"),
    ),
    "elastic/container_scripts": ("begun.py", "elastic.py", "ends.py", "meeting.py", "wire.py"),
}
PLUGIN = "torch_plugin"  # on the workers' PYTHONPATH; a separate folder, so that no script shadows a module of the job
RECORDER = "launcher_flight_recorder"
MODULES = "modules"  # on the PYTHONPATH of all processes of the program, also without torch
BREAKPOINT = "launcher_breakpoint"


@functools.cache
def scripts() -> Mapping[str, bytes]:
    """Return the contents of the scripts by file name."""
    found = {name: _read(folder, name) for folder, names in SCRIPTS.items() for name in names}
    found[f"{PLUGIN}/{RECORDER}.py"] = _read("hangs/container_scripts", "flight_recorder.py")
    found[f"{MODULES}/{BREAKPOINT}.py"] = _read("container_scripts", f"{BREAKPOINT}.py")
    entry_point = f"[torch.backends]\n{RECORDER} = {RECORDER}:start\n"
    found[f"{PLUGIN}/{RECORDER}-1.dist-info/entry_points.txt"] = entry_point.encode()
    return found


def _read(folder: str, name: str) -> bytes:
    return (Path(__file__).parents[1] / folder / name).read_bytes()
