"""What this process and those that it started have cost."""

from __future__ import annotations

import resource


def cost() -> dict[str, float]:
    """cpu: processor seconds, Python's own start included; memory: MiB, the most that any one process had."""
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "cpu": own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime,
        "memory": max(own.ru_maxrss, others.ru_maxrss) / 1024,
    }
