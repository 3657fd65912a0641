"""What a killed job leaves in /dev/shm with --ipc=host: found by name, owner, age and by no process having it open.

Only names that PyTorch, Python, NCCL, OpenMP and UCX are known to make are touched: /dev/shm may hold a user's
data set.
"""

from __future__ import annotations

import math

from launcher.errors import EngineFailed
from launcher.node.machine import Machine, run_script

NAMES = ("torch_*", "psm_*", "sem.mp-*", "sem.loky-*", "nccl-*", "__KMP_REGISTERED_LIB_*", "cuda.shm.*", "ucx_shm_*")

# $1: seconds since the epoch, by this node's clock. Prints the name of every file that it removed.
SCRIPT = f"""
since=$1
for pattern in {" ".join(f"'{name}'" for name in NAMES)}; do
  find /dev/shm -maxdepth 1 -type f -user "$(id -u)" -name "$pattern" 2>/dev/null
done | while IFS= read -r file; do
  changed=$(stat -c %Y -- "$file" 2>/dev/null) || continue
  [ "$changed" -ge "$since" ] || continue
  grep -qsF -- "$file" /proc/[0-9]*/maps && continue
  find /proc/[0-9]*/fd -lname "$file" 2>/dev/null | grep -q . && continue
  rm -f -- "$file" && printf '%s\\n' "${{file##*/}}"
done
"""


def sweep(machine: Machine, since: float) -> tuple[str, ...]:
    """Run it; the names. since: of time.time() on the node. Raises EngineFailed, NodeUnreachable, NodeUnfit."""
    done = run_script(machine, SCRIPT, str(math.floor(since)))
    if done.code:
        raise EngineFailed(machine.node, f"could not look through /dev/shm: {done.complaint}")
    lines = done.out.decode("utf-8", "replace").splitlines()
    return tuple(line for line in lines if line and "/" not in line)
