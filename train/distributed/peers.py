"""Report the loss of another process as a single line instead of a library's traceback."""

from __future__ import annotations

import importlib
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from train.distributed.world import World
from train.errors import TrainError

# errors of gloo, the store and NCCL
_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Socket closed|Connection refused|recvValue failed|failed to recv"
    r"|Timed out waiting .*ms for (recv|send)|remote process exited|ncclRemoteError|store.*may have died",
    re.IGNORECASE,
)


@contextmanager
def report_lost_peers(world: World) -> Iterator[None]:
    """Convert a collective's error about a lost or unresponsive peer into a TrainError."""
    try:
        yield
    except RuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        with suppress(ImportError):  # available in the launcher's workers; records the pending collective of each rank
            importlib.import_module("launcher_flight_recorder").record()
        why = next(line for line in str(error).splitlines() if _LOST.search(line)).strip()
        raise TrainError(
            f"rank {world.rank} of {world.size} on {socket.gethostname()} lost another process: {why}; for the cause, "
            f"see the log of the first rank that failed (shown by `launcher status`)"
        ) from error
