"""Another process is gone: the one line that its victims say, instead of a library's stack."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from train.errors import TrainError
from train.parallel.world import World

# gloo's, the store's and NCCL's words for it
_GONE = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Socket closed|Connection refused|recvValue failed|failed to recv"
    r"|Timed out waiting .*ms for (recv|send)|remote process exited|ncclRemoteError|store.*may have died",
    re.IGNORECASE,
)


@contextmanager
def lost_peers_named(world: World) -> Iterator[None]:
    """What a collective says of a peer that closed its connection, or did not answer in time, becomes a TrainError."""
    try:
        yield
    except RuntimeError as error:
        if not _GONE.search(str(error)):
            raise
        why = next(line for line in str(error).splitlines() if _GONE.search(line)).strip()
        raise TrainError(
            f"rank {world.rank} of {world.size} on {socket.gethostname()} lost another process: {why}; what ended that "
            f"one is in its own log (the first rank to fail; `launcher status` names it)"
        ) from error
