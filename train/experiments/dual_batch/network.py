"""The parameter server over torch RPC: rank 0 serves, ranks 1 to G call it. Worker w is rank w + 1.

RPC calls functions by name, so the served objects are module globals.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import TCPStore, rpc  # type: ignore[attr-defined]  # torch's stub lacks the first

from train import loaded_code
from train.config import Config
from train.data.contents import Contents, Digest
from train.distributed.agreement import check_options, shared_options
from train.errors import TrainError
from train.experiments.dual_batch.merge import Weights
from train.experiments.dual_batch.server import Grant, ParameterServer

T = TypeVar("T")
HEARTBEAT_INTERVAL = 1.0  # seconds
JOIN_TIMEOUT = 300.0  # seconds until all have joined; a slow machine may still be loading torch
STORE_TIMEOUT = 10.0  # seconds to reach the store
_JOINED, _LOST = "dual_batch/joined", "dual_batch/lost/{}"  # keys in the store
_served: list[ParameterServer] = []
_data: list[Contents] = []  # data set of the served run
_options: list[dict[str, Any]] = []  # that must be the same everywhere
_code: dict[str, str] = {}  # the same, see `train.loaded_code`


def serve(server: ParameterServer, data: Contents, options: dict[str, Any]) -> None:
    """Set what handles calls to this rank, and the data set and `shared_options` that all workers must have."""
    _served.append(server)
    _data.append(data)
    _options.append(options)
    _code.update(loaded_code.loaded())


def join(rank: int, size: int) -> None:
    """Join the other processes at MASTER_ADDR:MASTER_PORT."""
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=2 * size + 4, rpc_timeout=JOIN_TIMEOUT)
    rpc.init_rpc(_name(rank), rank=rank, world_size=size, rpc_backend_options=options)  # type: ignore[no-untyped-call]  # torch's
    if rank == 0:
        store().set(_JOINED, "1")


def store() -> TCPStore:
    """Connect to the rendezvous store at MASTER_ADDR:MASTER_PORT, which processes outside RPC can also reach.

    Raises:
        TrainError: the store does not respond.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT), wait_for_workers=False)
    except RuntimeError as error:
        raise TrainError(f"the rendezvous store at {host}:{port} does not respond; see the log of rank 0") from error


def report_lost(rank: int, why: str) -> bool:
    """Record in the store that this rank is dead; return False if not all ranks had joined, so no server would read it.

    Raises:
        TrainError: the store does not respond.
    """
    found = store()
    if not found.check([_JOINED]):
        return False
    found.set(_LOST.format(rank), why)
    return True


def reported_lost(found: TCPStore, rank: int) -> str | None:
    """Return the reason recorded by `report_lost` for this rank, or None."""
    key = _LOST.format(rank)
    return found.get(key).decode() if found.check([key]) else None


def disconnect() -> None:
    """Leave RPC without waiting for other processes, because some may be dead."""
    rpc.shutdown(graceful=False)
    _served.clear()
    _data.clear()


def _name(rank: int) -> str:
    return f"worker{rank}" if rank else "server"


def _pull(worker: int) -> Grant | str:
    return _served[0].pull(worker)


def _push(worker: int, weights: Weights, sums: Tensor) -> None:
    _served[0].push(worker, weights, sums)


def _digest() -> Digest:
    return _data[0].digest(*_data[0].splits)


def _difference(worker: Contents) -> str | None:
    return worker.difference(_data[0])


def _options_of_the_server() -> tuple[dict[str, Any], str]:
    return _options[0], socket.gethostname()


def _code_of_the_server() -> tuple[dict[str, str], str]:
    return _code, socket.gethostname()


def _heartbeat(worker: int) -> None:
    _served[0].heartbeat(worker)


def _lose(worker: int, why: str) -> None:
    _served[0].lose(worker, why)


def _leave(worker: int, stopped: bool) -> None:
    _served[0].leave(worker, stopped)


@dataclass
class Remote:
    """A worker's proxy for the server."""

    worker: int
    timeout: float  # seconds per call
    _over: threading.Event = field(default_factory=threading.Event)

    def agree(self, config: Config, contents: Contents) -> None:
        """Raise TrainError if this worker's options, code or data set differ from the server's."""
        check_options(shared_options(config, sharded=False), *self._call(_options_of_the_server))
        theirs, host = self._call(_code_of_the_server)
        if files := loaded_code.changed(loaded_code.loaded(), theirs):
            raise TrainError(f"the code differs from rank 0 ({host}): has {files}; copy it from there")
        if contents.digest(*contents.splits).same(self._call(_digest)):
            return
        raise TrainError(
            f"--data {config.data} differs from rank 0: has {self._call(_difference, contents)}; copy it from "
            f"there (rank {self.worker + 1} on {socket.gethostname()})"
        )

    def pull(self) -> Grant | str:
        return self._call(_pull, self.worker)

    def push(self, weights: Weights, sums: Tensor) -> None:
        self._call(_push, self.worker, weights, sums)

    def lose(self, why: str) -> None:
        """Report that this worker cannot continue."""
        self._call(_lose, self.worker, why)

    def leave(self, stopped: bool) -> None:
        """Report that this worker has finished, or was stopped."""
        self._over.set()
        with contextlib.suppress(TrainError):  # the server may exit before it responds to the last worker
            self._call(_leave, self.worker, stopped)

    def start_heartbeats(self) -> None:
        """Send heartbeats from a thread until this worker leaves."""
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()

    def _send_heartbeats(self) -> None:
        while not self._over.wait(HEARTBEAT_INTERVAL):
            try:
                self._call(_heartbeat, self.worker)
            except TrainError:
                continue  # if the server is lost, the main thread's next call reports it

    def _call(self, what: Callable[..., T], *values: object) -> T:
        try:
            result: T = rpc.rpc_sync("server", what, args=values, timeout=self.timeout)
        except RuntimeError as error:
            where = f"{os.environ.get('MASTER_ADDR', '?')}"
            reason = str(error).splitlines()[0]
            raise TrainError(
                f"worker {self.worker} (rank {self.worker + 1}): the parameter server (rank 0, {where}) does not "
                f"respond: {reason}; see the log of rank 0, and check for a firewall between the nodes"
            ) from error
        return result
