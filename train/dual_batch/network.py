"""The parameter server behind torch RPC: rank 0 serves, ranks 1 to G call. Workers are numbered from 0, ranks from 1.

RPC calls functions by name, so the server that they mean is the one value that this module has to keep.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from torch import Tensor
from torch.distributed import TCPStore, rpc  # type: ignore[attr-defined]  # torch's stub lacks the first

from train.dual_batch.merge import Weights
from train.dual_batch.server import Grant, ParameterServer
from train.errors import TrainError

T = TypeVar("T")
BEAT = 1.0  # seconds between signs of life
JOIN = 300.0  # seconds in which all must have met: the slowest machine still loads torch while others wait
TELL = 10.0  # seconds to reach the store, for a word about a death
_MET, _LOST = "dual_batch/met", "dual_batch/lost/{}"  # keys in the store that all meet at
_served: list[ParameterServer] = []


def join(rank: int, size: int, serve: ParameterServer | None = None) -> None:
    """Meets the others at MASTER_ADDR:MASTER_PORT. `serve` is what calls to this rank mean."""
    if serve is not None:
        _served.append(serve)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=2 * size + 4, rpc_timeout=JOIN)
    rpc.init_rpc(_name(rank), rank=rank, world_size=size, rpc_backend_options=options)  # type: ignore[no-untyped-call]  # torch's
    if rank == 0:
        store().set(_MET, "1")


def store() -> TCPStore:
    """The store at MASTER_ADDR:MASTER_PORT, at which everybody met; also reached by those who are no part of RPC.

    Raises:
        TrainError: it does not answer.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=TELL), wait_for_workers=False)
    except RuntimeError as error:
        raise TrainError(f"the rendezvous at {host}:{port} does not answer; look at rank 0's log") from error


def tell_lost(rank: int, why: str) -> bool:
    """Leaves word that this rank is dead, for `told_lost`; False if not all ranks had joined, so that no rank reads it.

    Raises:
        TrainError: the store does not answer.
    """
    board = store()
    if not board.check([_MET]):
        return False
    board.set(_LOST.format(rank), why)
    return True


def told_lost(board: TCPStore, rank: int) -> str | None:
    """Why the rank is dead, as its guard says; None where there is no such word."""
    key = _LOST.format(rank)
    return board.get(key).decode() if board.check([key]) else None


def part() -> None:
    """Leaves without waiting for anybody: some may be dead."""
    rpc.shutdown(graceful=False)
    _served.clear()


def _name(rank: int) -> str:
    return f"worker{rank}" if rank else "server"


def _pull(worker: int) -> Grant | str:
    return _served[0].pull(worker)


def _push(worker: int, weights: Weights, sums: Tensor) -> None:
    _served[0].push(worker, weights, sums)


def _beat(worker: int) -> None:
    _served[0].beat(worker)


def _lose(worker: int, why: str) -> None:
    _served[0].lose(worker, why)


def _leave(worker: int) -> None:
    _served[0].leave(worker)


@dataclass
class Remote:
    """The server as a worker sees it."""

    worker: int
    timeout: float  # seconds, of a call
    _over: threading.Event = field(default_factory=threading.Event)

    def pull(self) -> Grant | str:
        """As the server's."""
        return self._call(_pull, self.worker)

    def push(self, weights: Weights, sums: Tensor) -> None:
        """As the server's."""
        self._call(_push, self.worker, weights, sums)

    def lose(self, why: str) -> None:
        """This worker cannot go on."""
        self._call(_lose, self.worker, why)

    def leave(self) -> None:
        """This worker ends as it should."""
        self._over.set()
        with contextlib.suppress(TrainError):  # the server ends with the last to leave, maybe before it has answered
            self._call(_leave, self.worker)

    def keep_beating(self) -> None:
        """Signs of life from a thread of its own, until this worker leaves or the server is gone."""
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            try:
                self._call(_beat, self.worker)
            except TrainError:
                continue  # if the server is gone, the working thread's next call meets it too, and reports it

    def _call(self, what: Callable[..., T], *values: object) -> T:
        try:
            result: T = rpc.rpc_sync("server", what, args=values, timeout=self.timeout)
        except RuntimeError as error:
            where = f"{os.environ.get('MASTER_ADDR', '?')}"
            reason = str(error).splitlines()[0]
            raise TrainError(
                f"worker {self.worker} (rank {self.worker + 1}): the parameter server (rank 0, {where}) does not "
                f"answer: {reason}; look at rank 0's log, and for a firewall between the nodes"
            ) from error
        return result
