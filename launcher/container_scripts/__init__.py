"""Scripts that run in front of every process of a job, in any image: POSIX sh with nothing but coreutils.

entry.sh runs in front of the image's entrypoint, rank.sh in front of each worker, within.sh in front of the commands
that `exec` and `shell` start in a running container; agent.py, under the image's Python, is torchrun whose nodes find
each other again after a restart, elastic.py with meeting.py the same in a job with min_nodes. The folder inside a
container holds the scripts, `home/` (a writable home for a uid that the image does not know) and `secrets/NAME` (the
value's bytes, mode 0600).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

SCRIPTS = ("agent.py", "elastic.py", "entry.sh", "environment.sh", "meeting.py", "rank.sh", "within.sh")


@functools.cache
def scripts() -> Mapping[str, bytes]:
    """The scripts' texts by file name."""
    return {name: Path(__file__).with_name(name).read_bytes() for name in SCRIPTS}
