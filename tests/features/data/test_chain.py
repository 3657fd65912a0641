"""A chain of real processes on the loopback interface: copies over TLS, interruptions, repairs, unknown peers."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import LauncherError
from launcher.features.data import container_scripts, worker
from launcher.features.data.certificates import certificates
from launcher.node.machine import LocalMachine
from tests.ports import free_port

sys.path.insert(0, str(Path(container_scripts.__file__).parent))  # as its modules find one another on a node
import data_node as node
import data_store as store
import data_tree as tree
import data_wire as wire

MIB = 1 << 20
SIZE = 96 * MIB
MOST_TWICE = 10 * MIB  # 2 % of 512 MiB


class Chain:
    """A source and several sinks, each with its own folder."""

    def __init__(self, folder: Path, sinks: int) -> None:
        self.folder = folder
        self.names = [f"node-{rank}" for rank in range(sinks + 1)]
        self.roots = [folder / name for name in self.names]
        for root in self.roots:
            root.mkdir(parents=True)
        self.through: Callable[[int, int], int] = lambda sink, port: port  # returns the port of a proxy

    def start(self, source: Path, on_listed: Callable[[], object] = lambda: None) -> list[worker.Worker]:
        """on_listed: called once the source has listed its files, before any data is sent."""
        keys = self.keys = certificates(self.names)
        common: dict[str, Any] = {"label": f"test:{source}", "about": {"source": f"test:{source}", "image": ""}}
        workers = []
        for rank, (name, root) in enumerate(zip(self.names, self.roots, strict=True)):
            role = (
                {"role": "sink", "upstream": self.names[rank - 1]} if rank else {"role": "source", "path": str(source)}
            )
            order = {**common, **role, "root": str(root), "tls": keys[name]}
            workers.append(worker.Worker(name, LocalMachine(name, "me").open(worker.local_argv()), order))
        workers[0].until("bytes")
        on_listed()
        ports = [self.through(sink, each.until("port")) for sink, each in enumerate(workers[1:])]
        following = [
            {"addresses": [["127.0.0.1", port]], "name": name} for port, name in zip(ports, self.names[1:], strict=True)
        ]
        for each, order in zip(workers, [*following, None], strict=True):
            each.send(order)
        return workers

    def run(self, source: Path) -> list[dict[str, Any]]:
        """Return the final messages of all workers."""
        workers = self.start(source)
        ends = [last(each) for each in workers]
        self.received = [each.counted["received"] for each in workers[1:]]
        for each in workers:
            each.close()
        return ends

    def copies(self) -> list[Path]:
        return [path for root in self.roots[1:] for path in (root / "copies").glob("*/files")]


def last(each: worker.Worker) -> dict[str, Any]:
    while True:
        message = each.report(60)
        assert message is not None
        if "end" in message:
            return dict(message)


def equal(one: Path, other: Path) -> bool:
    return subprocess.run(["diff", "-r", "--no-dereference", one, other], check=False).returncode == 0


def fill(folder: Path, seed: int = 0) -> Path:
    """Create large, small and empty files, files with arbitrary bytes in their names, and links."""
    rand = random.Random(seed)
    (folder / "a" / "deep").mkdir(parents=True)
    (folder / "empty folder").mkdir()
    (folder / "big").write_bytes(rand.randbytes(3 * MIB + 17))
    (folder / "zeros").write_bytes(bytes(2 * MIB))
    (folder / "empty").touch()
    for number in range(50):
        (folder / "a" / f"{number}.jpg").write_bytes(rand.randbytes(rand.randrange(20000)))
    Path(os.fsdecode(bytes(folder / "a") + b"/\xff\n\x01 name")).write_bytes(b"odd")
    (folder / "a" / "link").symlink_to("../big")
    (folder / "a" / "deep" / "run").write_bytes(b"#!/bin/sh\n")
    (folder / "a" / "deep" / "run").chmod(0o755)
    return folder


def test_all_nodes_get_identical_files_and_a_second_push_sends_nothing(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    chain = Chain(tmp_path / "nodes", 3)
    ends = chain.run(source)
    assert [end["end"] for end in ends] == ["whole"] * 4, ends
    assert len({end["content"] for end in ends}) == 1
    assert len(chain.copies()) == 3
    assert all(equal(source, copy) for copy in chain.copies())
    assert (chain.copies()[0] / "a/deep/run").stat().st_mode & 0o777 == 0o755
    assert all(3 * MIB < each < 5 * MIB for each in chain.received), "zeros are not sent"
    assert [end["end"] for end in chain.run(source)] == ["whole"] * 4
    assert chain.received == [0, 0, 0]


def test_only_changed_data_is_sent(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    chain = Chain(tmp_path / "nodes", 2)
    chain.run(source)
    (source / "a" / "7.jpg").write_bytes(b"new" * 1000)
    shutil.rmtree(source / "empty folder")
    ends = chain.run(source)
    assert [end["end"] for end in ends] == ["whole"] * 3, ends
    assert chain.received == [3000 + 4, 3000 + 4]
    newest = [root / "copies" / ends[0]["content"] / "files" for root in chain.roots[1:]]
    assert all(equal(source, copy) for copy in newest)
    assert len(chain.copies()) == 4, "older copies are kept until they are removed"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["source", "between", "last", "launcher"])
def test_a_kill_at_any_moment_resends_only_data_in_flight(tmp_path: Path, victim: str) -> None:
    """At ten moments each. Only the content of connections and queues is sent twice, independent of the total size."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "big").write_bytes(random.Random(1).randbytes(SIZE * 3 // 4))
    for number in range(200):
        (source / f"{number:03d}").write_bytes(random.Random(number).randbytes(SIZE // 800))
    whole = sum(path.stat().st_size for path in source.iterdir())
    for moment in range(1, 11):
        chain = Chain(tmp_path / "nodes", 2)
        with metered(chain) as sent:
            kill_at(chain.start(source), victim, moment * whole // 11)
            assert [end["end"] for end in chain.run(source)] == ["whole"] * 3
        assert all(equal(source, copy) for copy in chain.copies())
        assert max(sent) - whole <= MOST_TWICE, f"{victim}, moment {moment}: {sent} of {whole}"
        shutil.rmtree(tmp_path / "nodes")


def kill_at(workers: list[worker.Worker], victim: str, done: int) -> None:
    """Kill once the last node has `done` bytes."""
    while (message := workers[2].report(30)) is not None and message.get("done", 0) < done and "end" not in message:
        pass
    victims = {"source": workers[:1], "between": workers[1:2], "last": workers[2:], "launcher": workers}[victim]
    for each in victims:
        each._stream._process.kill()  # type: ignore[attr-defined]  # noqa: SLF001
    for each in workers:
        with contextlib.suppress(LauncherError):
            while (message := each.report(1.0)) is not None and "end" not in message:
                pass
        each.close()


@contextlib.contextmanager
def metered(chain: Chain) -> Iterator[list[int]]:
    """Count the bytes sent to each node, in a proxy."""
    sent = [0] * len(chain.names[1:])

    def through(sink: int, port: int) -> int:
        listener = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            near = listener.accept()[0]
            far = socket.create_connection(("127.0.0.1", port))
            back = threading.Thread(target=pump, args=(far, near, lambda _: None), daemon=True)
            back.start()

            def count(size: int) -> None:
                sent[sink] += size

            pump(near, far, count)
            back.join(30)
            near.close()
            far.close()
            listener.close()

        threading.Thread(target=serve, daemon=True).start()
        return int(listener.getsockname()[1])

    chain.through = through
    yield sent
    chain.through = lambda sink, port: port


def pump(source: socket.socket, target: socket.socket, count: Callable[[int], None]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            count(len(data))
            target.sendall(data)
    for each, how in ((source, socket.SHUT_RD), (target, socket.SHUT_WR)):
        with contextlib.suppress(OSError):
            each.shutdown(how)


def test_after_a_reboot_the_journal_is_verified(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    entries = tree.walk(os.fsencode(source))
    pieces = tree.Pieces(entries)
    partial = store.Partial(tmp_path / "root", "0" * 64, entries, {"source": "test"})
    files = store.StoredFiles(os.fsencode(source), pieces)
    for number, index, offset, size in pieces:
        partial.put(number, index, offset, files.read(index, offset, size))
    partial.flush()
    os.close(partial._lock)  # noqa: SLF001 - as the end of its process does
    (partial.folder / "boot").write_bytes(b"another boot")
    with (partial.folder / "files" / "big").open("r+b") as file:
        file.seek(2 * MIB)
        file.write(bytes(8))
    again = store.Partial(tmp_path / "root", "0" * 64, entries, {"source": "test"})
    lost = [number for number in range(pieces.count) if not again.has(number)]
    assert [pieces.files[index].path for number, index, *_ in pieces if number in lost] == [b"big"]


def test_a_kill_before_a_copy_is_moved_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fill(tmp_path / "source")
    entries = tree.walk(os.fsencode(source))
    pieces, digests = tree.Pieces(entries), b""
    partial = store.Partial(tmp_path / "root", "0" * 64, entries, {"source": "test"})
    files = store.StoredFiles(os.fsencode(source), pieces)
    for number, index, offset, size in pieces:
        partial.put(number, index, offset, files.read(index, offset, size))
        digests += partial.digest(number)
    monkeypatch.setattr(os, "sync", interrupted)
    with pytest.raises(InterruptedError):
        partial.finish(digests)
    monkeypatch.undo()
    os.close(partial._lock)  # noqa: SLF001 - as the end of its process does
    again = store.Partial(tmp_path / "root", "0" * 64, entries, {"source": "test"})
    assert all(again.has(number) for number in range(pieces.count))
    assert again.finish(digests) == 0
    assert equal(source, tmp_path / "root" / "copies" / tree.content(entries, digests) / "files")


def interrupted() -> None:
    raise InterruptedError


def test_a_damaged_file_is_reported_and_repaired_and_the_cache_is_not_used(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    chain = Chain(tmp_path / "nodes", 1)
    content = chain.run(source)[1]["content"]
    folder = chain.roots[1] / "copies" / content
    assert list(store.damages(folder)) == []
    before = (folder / "files" / "big").stat()
    with (folder / "files" / "big").open("r+b") as file:
        file.write(b"?")
    os.utime(folder / "files" / "big", ns=(before.st_atime_ns, before.st_mtime_ns))
    (folder / "files" / "a" / "new").write_text("of another user")
    (folder / "files" / "a" / "link").unlink()
    damaged = dict(store.damages(folder))
    assert set(damaged) == {"big", "a/new (not part of the data)", "a/link"}
    store.demote(folder, {0, *(number for numbers in damaged.values() for number in numbers)})
    assert chain.run(source)[1]["end"] == "whole"
    assert chain.received[0] < 2 * MIB
    assert equal(source, folder / "files")


def harm(files: Path) -> set[str]:
    """Change a copy in ways that its metadata shows; return what `damages` reports."""
    (files / "a" / "1.jpg").unlink()
    (files / "a" / "1.jpg").symlink_to("/etc/passwd")
    (files / "a" / "2.jpg").unlink()
    (files / "a" / "2.jpg").mkdir()
    (files / "a" / "3.jpg").open("ab").write(b"more")
    (files / "a" / "4.jpg").chmod(0o777)
    os.mkfifo(files / "a" / "pipe")
    (files / "a" / "link").unlink()
    (files / "a" / "link").symlink_to("../zeros")
    (files / "empty").write_bytes(b"not empty")
    (files / "empty folder").rmdir()
    (files / "empty folder").symlink_to("/tmp")
    (files / "a" / "deep").chmod(0o777)
    changed = {"a/1.jpg", "a/2.jpg", "a/3.jpg", "a/4.jpg", "a/link", "empty", "empty folder", "a/deep"}
    return {*changed, "a/pipe (not part of the data)"}


def test_any_difference_is_found_by_verify_and_by_the_next_push_which_repairs_it(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    chain = Chain(tmp_path / "nodes", 1)
    folder = chain.roots[1] / "copies" / chain.run(source)[1]["content"]
    for verified in (True, False):
        different = harm(folder / "files")
        if verified:
            (folder / "files" / "big").open("r+b").write(b"?")
            damaged = dict(store.damages(folder))
            assert set(damaged) == {*different, "big"}
            store.demote(folder, {number for numbers in damaged.values() for number in numbers})
        ends = chain.run(source)
        assert [end["end"] for end in ends] == ["whole"] * 2, ends
        assert 0 < chain.received[0] < 2 * MIB
        assert equal(source, folder / "files")
        assert not list(store.damages(folder))


def test_a_hash_is_known_only_for_an_unchanged_ctime(tmp_path: Path) -> None:
    """A program may restore the size and the time of a file that it rewrites, as `touch -r` and rsync do."""
    source = fill(tmp_path / "source")
    chain = Chain(tmp_path / "nodes", 1)
    before, first = (source / "big").stat(), chain.run(source)[1]["content"]
    (source / "big").write_bytes(b"?" * before.st_size)
    os.utime(source / "big", ns=(before.st_atime_ns, before.st_mtime_ns))
    last = chain.run(source)[1]
    assert (last["end"], last["content"] != first) == ("whole", True)
    assert equal(source, chain.roots[1] / "copies" / last["content"] / "files")


def test_a_transfer_waits_for_another_one_while_that_progresses(tmp_path: Path) -> None:
    held = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(store.BusyError):
        store._locked(tmp_path, 0.1)  # noqa: SLF001

    def transfer() -> None:
        for _ in range(10):
            (tmp_path / "journal").open("ab").write(b"piece")
            time.sleep(0.1)
        (tmp_path / "lock").rename(tmp_path / "completed")
        os.close(held)

    thread = threading.Thread(target=transfer)
    thread.start()
    with pytest.raises(store.MovedError):  # not "the lock", which is now part of a whole copy
        store._locked(tmp_path, 0.9)  # noqa: SLF001
    thread.join()


@pytest.mark.parametrize("change", ["append", "replace", "remove", "add"])
def test_a_source_that_changes_is_refused_with_the_name_of_the_file(tmp_path: Path, change: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a", "b", "c"):
        (source / name).write_bytes(random.Random(name).randbytes(MIB))
    changes: dict[str, Callable[[], object]] = {
        "append": lambda: (source / "b").open("ab").write(b"x"),
        "replace": lambda: (source / "a").write_bytes(bytes(MIB)),
        "remove": (source / "c").unlink,
        "add": (source / "d").touch,
    }
    chain = Chain(tmp_path / "nodes", 1)
    workers = chain.start(source, changes[change])
    end = last(workers[0])
    for each in workers:
        each.close()
    name = {"append": "b", "replace": "a", "remove": "c", "add": "d"}[change]
    assert (end["end"], end["why"][:2]) == ("changed", f"{name} "), end
    assert chain.copies() == [], "no copy is visible"


def test_an_unknown_peer_gets_no_data_and_does_not_block_others(tmp_path: Path) -> None:
    """Silent peers, endless noise, TLS without a certificate, with one of another authority, and with another name."""
    source = fill(tmp_path / "source")
    chain = Chain(tmp_path / "nodes", 1)
    chain.names.append("node-2")  # a certificate of the same transfer, but not the neighbour's
    chain.roots.append(tmp_path / "nodes" / "node-2")
    chain.roots[2].mkdir()
    keys, others = certificates(chain.names), certificates(chain.names)
    order = {"label": "test", "about": {"source": "test", "image": ""}, "role": "sink", "upstream": "node-0"}
    order |= {"root": str(chain.roots[1]), "tls": keys["node-1"]}
    sink = worker.Worker("node-1", LocalMachine("node-1", "me").open(worker.local_argv()), order)
    port = sink.until("port")
    sink.send(None)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    noisy = socket.create_connection(("127.0.0.1", port))
    noisy.settimeout(10)
    noise = bytes(1 << 26)
    with pytest.raises(ConnectionError):
        noisy.sendall(noise)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    false = ({**others["node-0"], "authority": keys["node-0"]["authority"]}, keys["node-2"])
    certified = [wire.context({**tls, "private": str(tmp_path)}, server=False) for tls in false]
    assert [answer(port, secure) for secure in (bare, *certified)] == [b""] * 3, "rejected without an answer"
    true = wire.dial(
        [["127.0.0.1", port]], wire.context({**keys["node-0"], "private": str(tmp_path)}, server=False), "node-1"
    )
    send_all(true, tree.walk(os.fsencode(source)), source)
    assert last(sink)["end"] == "whole"
    for connection in (*silent, noisy):
        connection.close()
    sink.close()


def answer(port: int, secure: ssl.SSLContext) -> bytes:
    """Return the answer to a client with these certificates."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain, contextlib.suppress(OSError):
        secured = secure.wrap_socket(plain)
        secured.sendall(b"x" * 100)
        return secured.recv(100)
    return b""


def send_all(link: wire.Link, entries: list[tree.DataEntry], source: Path) -> None:
    """Send all data as a correct source does."""
    pieces = tree.Pieces(entries)
    files = store.StoredFiles(os.fsencode(source), pieces)
    link.send(wire.LIST, json.dumps(tree.rows(entries)).encode())
    link.send(wire.KNOWN, bytes(pieces.count * tree.DIGEST))
    link.send(wire.START)
    while link.receive(wire.NEED, wire.ALL_NEED)[0] != wire.ALL_NEED:
        pass
    digests = b""
    for number, index, offset, size in pieces:
        data = files.read(index, offset, size)
        digests += store.digest(data)
        link.send(wire.DATA, struct.pack(">I", number) + data)
    link.send(wire.DIGESTS, digests)
    link.send(wire.END)
    link.receive(wire.DONE)


def row(path: str, kind: str = "f", size: int = 4, target: str = "") -> list[Any]:
    return [path, kind, 0o600, size, target, 0, 0]


LIST, KNOWN, START, DATA, END = wire.LIST, wire.KNOWN, wire.START, wire.DATA, wire.END
FOUR = struct.pack(">I", 0) + b"data"
ONE = json.dumps([row("a")]).encode()
OPEN = [(KNOWN, bytes(32)), (START, b"")]
HOSTILE: dict[str, list[tuple[int, bytes]]] = {
    "parent": [(LIST, json.dumps([row("../out")]).encode()), *OPEN, (DATA, FOUR)],
    "absolute": [(LIST, json.dumps([row("/tmp/launcher-out")]).encode()), *OPEN],
    "link": [(LIST, json.dumps([row("a", "l", 0, "/etc"), row("a/b")]).encode()), *OPEN],
    "device": [(LIST, json.dumps([row("a", "c")]).encode()), *OPEN],
    "no JSON": [(LIST, b"[[")],
    "no list": [(LIST, b'{"a": 1}')],
    "negative": [(LIST, json.dumps([row("a", "f", -1)]).encode())],
    "hashes without an end": [(LIST, ONE), *[(KNOWN, bytes(32))] * 3],
    "another piece": [(LIST, ONE), *OPEN, (DATA, b"\0\0\0\7data")],
    "a longer piece": [(LIST, ONE), *OPEN, (DATA, FOUR + b"more")],
    "a piece twice": [(LIST, ONE), *OPEN, (DATA, FOUR), (DATA, FOUR)],
    "the end at once": [(END, b"")],
    "an unknown kind": [(77, b"")],
}  # fmt: skip


@pytest.mark.parametrize("messages", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_source_writes_nothing_outside(tmp_path: Path, messages: list[tuple[int, bytes]]) -> None:
    """A compromised node has a valid certificate. Runs in this process to save time."""
    keys = certificates(["node-0", "node-1"])
    tls = {name: {**key, "private": str(tmp_path)} for name, key in keys.items()}
    root = tmp_path / "nodes" / "root"
    root.mkdir(parents=True)
    listener = wire.listen()
    port = listener.getsockname()[1]
    errors: list[Exception] = []

    def receive() -> None:
        try:
            link = wire.accept(listener, wire.context(tls["node-1"], server=True), "node-0")
            node.Sink({"root": str(root), "label": "x", "about": {"source": "x"}}, Quiet()).run(link, None)
        except Exception as error:  # noqa: BLE001 - checked below
            errors.append(error)

    sink = threading.Thread(target=receive)
    sink.start()
    link = wire.dial([["127.0.0.1", port]], wire.context(tls["node-0"], server=False), "node-1")
    for kind, data in messages:
        link.send(kind, data)
    link.close()
    link._connection._connection.shutdown(socket.SHUT_RDWR)  # noqa: SLF001 - the node is lost
    sink.join(30)
    assert [type(error) for error in errors] == [tree.RefusedError], errors
    assert not list(root.glob("copies/*"))
    assert {path.name for path in tmp_path.iterdir()} == {"nodes"}
    assert [path.name for path in (tmp_path / "nodes").iterdir()] == ["root"]


class Quiet:
    """A stand-in for Progress, which would write to stdout of this process."""

    done = total = received = 0
    down = None


Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


@pytest.fixture
def contexts(tmp_path: Path) -> Contexts:
    """Contexts of node-0, which connects, and of node-1."""
    keys = certificates(["node-0", "node-1"])
    tls = [{**keys[name], "private": str(tmp_path)} for name in ("node-0", "node-1")]
    return wire.context(tls[0], server=False), wire.context(tls[1], server=True)


def neighbours(contexts: Contexts) -> tuple[wire.Link, wire.Link]:
    """Connect two nodes; return the link of the first node and that of the node downstream."""
    listener, accepted = wire.listen(), list[wire.Link]()
    thread = threading.Thread(target=lambda: accepted.append(wire.accept(listener, contexts[1], "node-0")))
    thread.start()
    dialled = wire.dial([["127.0.0.1", listener.getsockname()[1]]], contexts[0], "node-1")
    thread.join(30)
    return dialled, accepted[0]


def test_a_message_that_is_too_long_ends_the_connection(contexts: Contexts) -> None:
    one, reader = neighbours(contexts)
    one._connection.sendall(struct.pack(">BI", wire.LIST, wire.LONGEST + 1))  # noqa: SLF001
    with pytest.raises(tree.RefusedError):
        reader.receive(wire.LIST)
    one._connection.sendall(struct.pack(">BI", wire.LIST, 100) + b"half")  # noqa: SLF001
    one._connection._connection.close()  # noqa: SLF001
    with pytest.raises(wire.LostError):
        reader.receive(wire.LIST)


def test_a_node_sends_and_receives_concurrently(contexts: Contexts) -> None:
    """As a source does. When two threads called OpenSSL concurrently, one connection in seven hung at its start."""
    for number in range(60):
        listener, sizes = wire.listen(), list[int]()

        def sink(listener: socket.socket = listener, sizes: list[int] = sizes) -> None:
            link = wire.accept(listener, contexts[1], "node-0")
            sizes.extend(len(link.receive(wire.LIST)[1]) for _ in range(3))
            link.send(wire.NEED, bytes(10))
            link.close()

        thread = threading.Thread(target=sink, daemon=True)
        thread.start()
        link = wire.dial([["127.0.0.1", listener.getsockname()[1]]], contexts[0], "node-1")
        for _ in range(3):
            link.send(wire.LIST, bytes(50))
        link.receive(wire.NEED)
        thread.join(30)
        assert sizes == [50, 50, 50], f"hung at connection {number}"
        link.close()


def test_each_address_has_its_own_error(contexts: Contexts) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        addresses = [["127.0.0.1", stranger.getsockname()[1]], ["127.0.0.1", free_port()]]
        threading.Thread(target=lambda: [stranger.accept()[0].close()]).start()
        with pytest.raises(wire.LostError) as lost:
            wire.dial(addresses, contexts[0], "node-1")
    assert re.search(rf"127.0.0.1 port {addresses[0][1]}: .+; 127.0.0.1 port \d+: .*refused", str(lost.value))


def test_a_disk_without_space_is_reported_before_the_first_byte(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    size = ((shutil.disk_usage(tmp_path).total >> 30) + 64) << 30  # bytes
    with (source / "huge").open("wb") as file:
        file.truncate(size)
    chain = Chain(tmp_path / "nodes", 1)
    workers = chain.start(source)
    end = last(workers[1])
    for each in workers:
        each.close()
    assert end["end"] == "room"
    assert re.fullmatch(rf"[\d,]+ MiB free; {size >> 20:,} MiB and a reserve of 64 MiB are needed", end["why"])
    assert workers[1].counted["received"] == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_large_file_takes_little_memory(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (source / "sparse").open("wb") as file:
        file.truncate(20 << 30)
        file.seek(3 << 30)
        file.write(os.urandom(40 * MIB))
    chain = Chain(tmp_path / "nodes", 2)
    workers = chain.start(source)
    with ThreadPoolExecutor(len(workers)) as pool:
        assert list(pool.map(until_end, workers)) == ["whole"] * 3
    copy = chain.copies()[0] / "sparse"
    assert copy.stat().st_size == 20 << 30
    assert copy.stat().st_blocks * 512 < 50 * MIB, "holes are preserved"
    for each in workers:
        each.close()


def until_end(each: worker.Worker) -> str:
    """Return how the worker ended; its memory must stay small."""
    status = Path(f"/proc/{each._stream._process.pid}/status")  # type: ignore[attr-defined]  # noqa: SLF001
    most = 0
    while (message := each.report(60)) is not None and "end" not in message:
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        most = max(most, int(found[1]) << 10 if found else 0)
    assert message is not None
    assert 10 * MIB < most < 200 * MIB, most
    print(f"{most >> 20} MiB")
    return str(message["end"])
