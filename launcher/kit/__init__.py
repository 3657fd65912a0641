"""Small scripts that stand in front of every process of a job, in any image: POSIX sh and nothing but coreutils.

entry.sh stands in front of the image's entrypoint, rank.sh in front of each worker, within.sh in front of what `exec`
and `shell` add to a container that runs already; agent.py, in the image's Python, is torchrun that finds its peers
again. Their folder inside a container: the scripts, `home/` (a writable home for a uid that the image does not know),
`secrets/NAME` (the value's bytes, 0600).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

SCRIPTS = ("agent.py", "entry.sh", "environment.sh", "rank.sh", "within.sh")


@functools.cache
def scripts() -> Mapping[str, bytes]:
    """The scripts' texts by file name."""
    return {name: Path(__file__).with_name(name).read_bytes() for name in SCRIPTS}
