"""The loss of another process: reported as a single line instead of a library's traceback."""

from __future__ import annotations

import importlib
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from train.errors import TrainError
from train.parallel.world import World

# how gloo, the store and NCCL report it
_GONE = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Socket closed|Connection refused|recvValue failed|failed to recv"
    r"|Timed out waiting .*ms for (recv|send)|remote process exited|ncclRemoteError|store.*may have died",
    re.IGNORECASE,
)


@contextmanager
def name_lost_peers(world: World) -> Iterator[None]:
    """Turns a collective's error about a peer that is gone or did not answer in time into a TrainError."""
    try:
        yield
    except RuntimeError as error:
        if not _GONE.search(str(error)):
            raise
        with suppress(ImportError):  # the launcher's workers have it: what each rank waits for is written down
            importlib.import_module("launcher_flight_recorder").record()
        why = next(line for line in str(error).splitlines() if _GONE.search(line)).strip()
        raise TrainError(
            f"rank {world.rank} of {world.size} on {socket.gethostname()} lost another process: {why}; the cause is in "
            f"the log of the first rank to fail (`launcher status` names it)"
        ) from error
