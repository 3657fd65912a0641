"""python agent.py OPTIONS...: torchrun with these options, on nodes that the container engine restarts one by one.

A node may be back before the master has noticed that it was gone: the master's torchrun still runs, is about to end and
will be started again. With a static rendezvous, the node would join the old torchrun, and the new one would wait for
it. Therefore each torchrun of the master publishes a generation id of its own in its store, and a restarted node waits
for an id other than the last one that it joined. The id starts with the run's id: a node that reaches the master of
another run exits with an error, and that master reports it. While torchrun runs, the node also monitors the master:
after a failure of the master, the ranks of this node would wait for it forever, so they are terminated.

Runs in the image's own Python, 3.7 or newer, with its torch, 1.10 or newer (with 1.9, plain torchrun is used). The id
that was last joined is stored in LAUNCHER_OUTPUT, in state/NODE.master.
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
REFUSED_KEY = "launcher/refused"  # the node and its run that tried to join another run's master
RENDEZVOUS_TIMEOUT = 900.0  # seconds to wait for the master: torchrun's own limit for a static rendezvous
OTHERS_TIMEOUT = 600.0  # seconds that a finished master waits for the other nodes
POLL_INTERVAL = 0.1
GRACE = 10.0  # seconds for ranks to notice that their peers exited, and again to print their stacks


def main() -> None:
    rank, nodes = int(_option("node_rank")), int(_option("nnodes"))
    address, port = _option("master_addr"), int(_option("master_port"))
    # Imported before the rendezvous, to avoid a delay between it and torchrun. Garbage collection during the import
    # frees nothing and takes a seventh of the time; frozen objects are not scanned again.
    gc.disable()
    script: Any = importlib.import_module("torchrun")  # in the same folder; it imports torch
    gc.freeze()
    gc.enable()
    torchrun = script.main
    if nodes == 1 or not _shares_store(script.torch.__version__):
        torchrun()
    elif rank == 0:
        store = _store(address, port, is_master=True)
        store.set(GENERATION_KEY, f"{os.environ['LAUNCHER_RUN']} {uuid.uuid4().hex}")
        with _refusals_reported(store):
            torchrun()
        deadline = time.monotonic() + OTHERS_TIMEOUT
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
    """Return the store of a master that this node has not joined yet, and a connection that closes when it exits.

    file: stores the generation id that was last joined. Returns None if no such master was found in time.
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
        except RuntimeError:  # the master exited between the two calls
            link.close()
            continue
        run = generation.partition(" ")[0]
        if run != os.environ["LAUNCHER_RUN"]:
            store.set(REFUSED_KEY, f"{os.environ['LAUNCHER_NODE']} of the run {os.environ['LAUNCHER_RUN']}")
            sys.exit(f"launcher: {address}:{port} belongs to the run {run}: refusing to join it")
        if generation != before and not _closed(link):  # the link is still open: link and store have the same master
            file.write_text(generation)
            return store, link
        if not announced:
            print("launcher: waiting for the other nodes to restart", file=sys.stderr, flush=True)
            announced = True
        _leave(store, rank)
        _wait_closed(link)  # the ranks of the previous master may notice only at their own timeouts
        deadline = time.monotonic() + RENDEZVOUS_TIMEOUT
    return None


@contextlib.contextmanager
def _refusals_reported(store: Any) -> Iterator[None]:
    """Report nodes of other runs that tried to join, until the block exits: no thread may be in a torch call then."""
    done = threading.Event()

    def report() -> None:
        while not done.wait(1.0):
            if store.check([REFUSED_KEY]):
                node = store.get(REFUSED_KEY).decode()
                store.delete_key(REFUSED_KEY)
                print(f"launcher: rejected a connection to this run's port from {node}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _leave(store: Any, rank: int) -> None:
    with contextlib.suppress(RuntimeError):  # the master has already exited
        store.set(LEFT_KEY + str(rank), "")


def _watch(link: socket.socket) -> None:
    """Wait for the master to exit, then terminate this node: a successful master waits for this node, so it has failed.

    Does not call torch: a thread in a torch call while Python exits would abort the process.
    """
    _wait_closed(link)
    time.sleep(GRACE)
    what = "the master exited, but this node is still running; stacks of its ranks:"
    print(f"launcher: {what}", file=sys.stderr, flush=True)
    entry = os.environ.get("LAUNCHER_ENTRY")
    if entry:
        os.kill(int(entry), signal.SIGQUIT)
        time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


def _link(address: str, port: int) -> socket.socket:
    """Open an idle connection. Its keepalives detect a rebooted master within 15 s, an unreachable one only after two
    minutes, because the network may recover."""
    link = socket.create_connection((address, port), timeout=10)
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 8)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link


def _closed(link: socket.socket) -> bool:
    """The connection is readable only at its end: the store sends data only in response to requests."""
    return bool(select.select([link], [], [], 0)[0])


def _wait_closed(link: socket.socket) -> None:
    with contextlib.suppress(OSError):  # reset, or keepalive timeout
        while link.recv(1):
            pass
    link.close()


def _store(address: str, port: int, *, is_master: bool) -> Any:
    """Open the store. With multi_tenant, torchrun's own store in this process uses the same server."""
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
    """Return whether torch can share torchrun's store (multi_tenant, since 1.10). All nodes have the same image."""
    release = version.split(".")
    return (int(release[0]), int(release[1])) >= (1, 10)


def _option(name: str) -> str:
    return sys.argv[sys.argv.index(f"--{name}") + 1]


if __name__ == "__main__":
    main()
