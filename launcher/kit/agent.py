"""python agent.py OPTIONS...: torchrun with these options, on nodes that are started again one by one, by nobody.

Started before its peers, torchrun cannot tell the master that is coming up from the one that is about to end because a
node of it has died: it meets the old one, and the new one waits for it in vain. So every master leaves a word of its
own in its store, and a node that is started again waits until it finds another word than before. And as long as it
runs, a node watches the master: when that has failed, nobody will ever wait for this node's ranks again.

Runs in the image's own Python, 3.7 or newer, with its torch, 1.10 or newer (1.9: it is plain torchrun). Keeps the word
in LAUNCHER_OUTPUT, in state/NODE.master.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

WORD = "launcher/master"
LEFT = "launcher/left/"
PATIENCE = 900.0  # seconds for the master to come up: torchrun's own limit of a static rendezvous
# Of torch's Python, what an agent has no use for: a quarter of the time that torch takes to load
UNUSED = tuple(
    f"torch.{name}"
    for name in ("_meta_registrations", "distributions", "export", "nested", "nn.intrinsic", "utils.data")
)
PLAINLY = "LAUNCHER_AGENT_PLAINLY"
LOOK = 0.1  # seconds between two tries to find it
LINGER = 600.0  # seconds that a master that has done its part waits for the other nodes
GRACE = 10.0  # seconds for ranks to notice by themselves that their peers are gone, and then again for their stacks


def main() -> None:
    rank, nodes = int(_option("node_rank")), int(_option("nnodes"))
    address, port = _option("master_addr"), int(_option("master_port"))
    torchrun = _torchrun()  # now: from meeting to joining takes no time then
    if nodes == 1 or not _shares_store():
        torchrun()
    elif rank == 0:
        store = _store(address, port, is_master=True)
        store.set(WORD, uuid.uuid4().hex)
        torchrun()
        deadline = time.monotonic() + LINGER
        while not store.check([LEFT + str(other) for other in range(1, nodes)]) and time.monotonic() < deadline:
            time.sleep(LOOK)
    else:
        folder = Path(os.environ["LAUNCHER_OUTPUT"], "state")
        found = meet(address, port, rank, folder / f"{os.environ['LAUNCHER_NODE']}.master")
        if found is None:
            torchrun()  # it says what it thinks of that
            return
        store, link = found
        threading.Thread(target=_watch, args=(link,), daemon=True).start()
        try:
            torchrun()
        finally:
            _leave(store, rank)


def _torchrun() -> Callable[[], None]:
    if PLAINLY not in os.environ:
        sys.modules.update((name, Later(name)) for name in UNUSED)
    gc.disable()  # modules are not garbage: looking for some while torch loads is a seventh of its time
    try:
        torchrun: Callable[[], None] = importlib.import_module("torch.distributed.run").main
    except Exception:
        if PLAINLY in os.environ:
            raise
        os.environ[PLAINLY] = "1"  # a torch that needs one of them to load: half of it is here already, so once more
        os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606 - the very program that runs
    gc.freeze()  # nor ever after
    gc.enable()
    return torchrun


class Later(types.ModuleType):
    """Stands for a module until something is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # what looks through all modules asks every one for these
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def meet(address: str, port: int, rank: int, file: Path) -> tuple[Any, socket.socket] | None:
    """A master that this node has not been with: its store, and a connection that ends with it. None: none in time."""
    before = file.read_text() if file.exists() else ""
    deadline, told = time.monotonic() + PATIENCE, False
    while time.monotonic() < deadline:
        try:
            link = _link(address, port)
        except OSError:
            time.sleep(LOOK)
            continue
        try:
            store = _store(address, port, is_master=False)
            word = store.get(WORD).decode()
        except RuntimeError:  # it went away while we asked: so torch calls that
            link.close()
            continue
        if word != before and not _ended(link):  # it has not ended since: the store is its own
            file.write_text(word)
            return store, link
        if not told:
            print("launcher: waiting for the other nodes to start again", file=sys.stderr, flush=True)
            told = True
        _leave(store, rank)
        _until_it_ends(link)  # it may take them long to notice: their own time limits say how long
        deadline = time.monotonic() + PATIENCE
    return None


def _leave(store: Any, rank: int) -> None:
    with contextlib.suppress(RuntimeError):  # the master has left already
        store.set(LEFT + str(rank), "")


def _watch(link: socket.socket) -> None:
    """Until the master has ended, which waits for us where it ends well: nothing here will end well then.

    No call of torch's in this thread: one that waits while Python ends would abort it.
    """
    _until_it_ends(link)
    time.sleep(GRACE)
    print("launcher: the master has ended and this node has not; where its ranks stand:", file=sys.stderr, flush=True)
    entry = os.environ.get("LAUNCHER_ENTRY")
    if entry:
        os.kill(int(entry), signal.SIGQUIT)
        time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


def _link(address: str, port: int) -> socket.socket:
    """A connection on which nothing is ever said. A master whose machine was started anew is noticed within 15 s, one
    that is cut off only after two minutes: a network may come back."""
    link = socket.create_connection((address, port), timeout=10)
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 8)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link


def _ended(link: socket.socket) -> bool:
    link.setblocking(False)
    try:
        return link.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        link.setblocking(True)


def _until_it_ends(link: socket.socket) -> None:
    try:
        while link.recv(1):
            pass
    except OSError:  # reset, or silent for too long
        pass
    link.close()


def _store(address: str, port: int, *, is_master: bool) -> Any:
    """multi_tenant: torchrun's own store in this process is the same server then."""
    return importlib.import_module("torch.distributed").TCPStore(
        address,
        port,
        is_master=is_master,
        timeout=timedelta(seconds=PATIENCE),
        wait_for_workers=False,
        multi_tenant=is_master,
    )


def _shares_store() -> bool:
    """Whether torchrun's store can be ours, too: since torch 1.10 (multi_tenant). The nodes have the same image."""
    release = importlib.import_module("torch").__version__.split(".")
    return (int(release[0]), int(release[1])) >= (1, 10)


def _option(name: str) -> str:
    return sys.argv[sys.argv.index(f"--{name}") + 1]


if __name__ == "__main__":
    main()
