"""python agent.py OPTIONS...: torchrun with these options, on nodes that the container engine restarts one by one.

torchrun with a static rendezvous cannot tell a restarted master from the previous one, which still runs until it
notices that a peer has died: a restarted node would join the previous master, and the new master would never see that
node. So every master publishes a generation id in its store, and a restarted node waits until it finds another
id than it last joined. The generation begins with the run's id: where another run's master answers, the node ends and
says so, and so does that master. While torchrun runs, the node also watches the master: when the master has failed,
this node's ranks would wait for it forever, so they are ended.

Runs in the image's own Python, 3.7 or newer, with its torch, 1.10 or newer (with 1.9 it is plain torchrun). The id last
joined is kept in LAUNCHER_OUTPUT, in state/NODE.master.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

GENERATION_KEY = "launcher/master"
LEFT_KEY = "launcher/left/"
REFUSED_KEY = "launcher/refused"  # the run and the node that came to another run's master
RENDEZVOUS_TIMEOUT = 900.0  # seconds for the master to come up: torchrun's own limit of a static rendezvous
PEER_TIMEOUT = 600.0  # seconds that a master which has finished waits for the other nodes to finish
POLL_INTERVAL = 0.1
GRACE = 10.0  # seconds for ranks to notice that their peers are gone, and then again to print their stacks


def main() -> None:
    rank, nodes = int(_option("node_rank")), int(_option("nnodes"))
    address, port = _option("master_addr"), int(_option("master_port"))
    # Loaded before the rendezvous, so that nothing slow comes between it and torchrun. Garbage collection while torch
    # loads finds nothing and takes a seventh of the time; frozen, torch's objects are never scanned again.
    gc.disable()
    import torch.distributed.run

    gc.freeze()
    gc.enable()
    torchrun = torch.distributed.run.main
    if nodes == 1 or not _shares_store(torch.__version__):
        torchrun()
    elif rank == 0:
        store = _store(address, port, is_master=True)
        store.set(GENERATION_KEY, f"{os.environ['LAUNCHER_RUN']} {uuid.uuid4().hex}")
        with _refusals_reported(store):
            torchrun()
        deadline = time.monotonic() + PEER_TIMEOUT
        others = [LEFT_KEY + str(other) for other in range(1, nodes)]
        while not store.check(others) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)
    else:
        folder = Path(os.environ["LAUNCHER_OUTPUT"], "state")
        found = meet(address, port, rank, folder / f"{os.environ['LAUNCHER_NODE']}.master")
        if found is None:
            torchrun()  # fails, with torchrun's own message about the missing master
            return
        store, link = found
        threading.Thread(target=_watch, args=(link,), daemon=True).start()
        try:
            torchrun()
        finally:
            _leave(store, rank)


def meet(address: str, port: int, rank: int, file: Path) -> tuple[Any, socket.socket] | None:
    """The store of a master that this node has not joined yet, and a connection that closes when that master ends.

    file: keeps the generation id last joined. None: no such master came up in time.
    """
    before = file.read_text() if file.exists() else ""
    deadline, announced = time.monotonic() + RENDEZVOUS_TIMEOUT, False
    while time.monotonic() < deadline:
        try:
            link = _link(address, port)
        except OSError:
            time.sleep(POLL_INTERVAL)
            continue
        try:
            store = _store(address, port, is_master=False)
            generation = store.get(GENERATION_KEY).decode()
        except RuntimeError:  # the master ended between the two calls
            link.close()
            continue
        run = generation.partition(" ")[0]
        if run != os.environ["LAUNCHER_RUN"]:
            store.set(REFUSED_KEY, f"{os.environ['LAUNCHER_NODE']} of the run {os.environ['LAUNCHER_RUN']}")
            sys.exit(f"launcher: {address}:{port} belongs to the run {run}: refused to train with it")
        if generation != before and not _closed(link):  # the link is still open, so link and store have one master
            file.write_text(generation)
            return store, link
        if not announced:
            print("launcher: waiting for the other nodes to start again", file=sys.stderr, flush=True)
            announced = True
        _leave(store, rank)
        _wait_closed(link)  # the previous master's ranks may notice late: their own timeouts decide when
        deadline = time.monotonic() + RENDEZVOUS_TIMEOUT
    return None


@contextlib.contextmanager
def _refusals_reported(store: Any) -> Iterator[None]:
    """Report the nodes of other runs that came here, until the block ends: no thread may be in a torch call then."""
    done = threading.Event()

    def report() -> None:
        while not done.wait(1.0):
            if store.check([REFUSED_KEY]):
                node = store.get(REFUSED_KEY).decode()
                store.delete_key(REFUSED_KEY)
                print(f"launcher: {node} came to this run's port and was refused", file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _leave(store: Any, rank: int) -> None:
    with contextlib.suppress(RuntimeError):  # the master has ended already
        store.set(LEFT_KEY + str(rank), "")


def _watch(link: socket.socket) -> None:
    """Wait until the master ends, then end this node: a master that succeeds waits for us, so this one has failed.

    Calls nothing of torch: a thread inside a torch call while Python exits would abort the process.
    """
    _wait_closed(link)
    time.sleep(GRACE)
    print("launcher: the master has ended and this node has not; the stacks of its ranks:", file=sys.stderr, flush=True)
    entry = os.environ.get("LAUNCHER_ENTRY")
    if entry:
        os.kill(int(entry), signal.SIGQUIT)
        time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


def _link(address: str, port: int) -> socket.socket:
    """An idle connection. With these keepalives a rebooted master is noticed within 15 s, an unreachable one only after
    two minutes: the network may come back."""
    link = socket.create_connection((address, port), timeout=10)
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 8)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link


def _closed(link: socket.socket) -> bool:
    """The store answers requests only, and this connection makes none: nothing but its end can be read."""
    return bool(select.select([link], [], [], 0)[0])


def _wait_closed(link: socket.socket) -> None:
    with contextlib.suppress(OSError):  # reset, or the keepalives were not answered
        while link.recv(1):
            pass
    link.close()


def _store(address: str, port: int, *, is_master: bool) -> Any:
    """multi_tenant: torchrun's own store in this process then uses the same server."""
    distributed: Any = importlib.import_module("torch.distributed")  # whose stubs do not export TCPStore
    return distributed.TCPStore(
        address,
        port,
        is_master=is_master,
        timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT),
        wait_for_workers=False,
        multi_tenant=is_master,
    )


def _shares_store(version: str) -> bool:
    """Whether this torch can share torchrun's store (multi_tenant, since 1.10). All nodes have the same image."""
    release = version.split(".")
    return (int(release[0]), int(release[1])) >= (1, 10)


def _option(name: str) -> str:
    return sys.argv[sys.argv.index(f"--{name}") + 1]


if __name__ == "__main__":
    main()
