"""What this process and those that it started have cost."""

from __future__ import annotations

import re
import resource
from pathlib import Path


def cost() -> dict[str, float]:
    """cpu: processor seconds, Python's own start included; memory: MiB, the most that this process had.

    Not of rusage: a process inherits that peak from the one that started it.
    """
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return {
        "cpu": own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime,
        "memory": int(peak.group(1)) / 1024 if peak else 0.0,
    }
