"""The hub: greenlets that wait hold up nobody, and threads and greenlets wait for each other."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from launcher.errors import NodesFailed, NodeUnreachable
from launcher.node.hub.loop import HUB, WRITE, Waiter
from launcher.node.hub.sockets import TICK, HubSocket, connect
from launcher.node.hub.waits import Condition, Event, Lock, Semaphore, aside
from launcher.node.parallel import every, together

T = TypeVar("T")
Way = Callable[[Callable[[], Any]], Any]


def in_hub(job: Callable[[], T]) -> T:
    return every([job], [True])[0]


def in_thread(job: Callable[[], T]) -> T:
    return every([job], [False])[0]


ways = pytest.mark.parametrize("way", [in_hub, in_thread])


@pytest.fixture
def pair() -> Any:
    """(a socket of the hub, its other end)"""
    ours, theirs = socket.socketpair()
    hubs = HubSocket(ours)
    yield hubs, theirs
    hubs.close()
    theirs.close()


def test_hundreds_wait_at_once_in_one_thread() -> None:
    never = Event()
    began, threads = time.monotonic(), threading.active_count()
    assert every([lambda: never.wait(0.3)] * 500, [True] * 500) == [False] * 500
    assert time.monotonic() - began < 5  # one after another they would take 150 s
    assert threading.active_count() <= threads + 1


def test_results_and_failures_as_of_threads() -> None:
    def fail(node: str) -> int:
        raise NodeUnreachable(node, "is away", "")

    assert every([lambda: 1, lambda: 2, lambda: 3], [True, False, True]) == [1, 2, 3]
    with pytest.raises(NodesFailed) as caught:
        every([lambda: fail("a"), lambda: 1, lambda: fail("c")], [True] * 3)
    assert [error.where for error in caught.value.errors] == ["a", "c"]
    with pytest.raises(ZeroDivisionError):
        in_hub(lambda: 1 // 0)


def test_what_a_job_raises_does_not_end_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    HUB.spawn(lambda: 1 // 0)
    assert in_hub(lambda: 5) == 5
    assert [about.exc_type for about in told] == [ZeroDivisionError]


def test_a_step_that_fails_does_not_end_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    def fail(*_: object) -> None:
        raise ValueError

    ours, theirs = socket.socketpair()
    HUB.soon(fail)
    HUB.soon(lambda: HUB.later(0.01, fail))
    HUB.soon(lambda: HUB.watch(ours, WRITE, lambda _: (HUB.watch(ours, 0, fail), fail())))
    time.sleep(0.2)
    assert in_hub(lambda: 5) == 5
    assert [about.exc_type for about in told] == [ValueError] * 3
    ours.close()
    theirs.close()


def test_two_at_once_in_a_greenlet_are_greenlets() -> None:
    assert in_hub(lambda: together(lambda: HUB.inside, lambda: HUB.inside)) == (True, True)


@ways
def test_an_event_wakes_all_who_wait(way: Way) -> None:
    event = Event()
    threading.Timer(0.1, event.set).start()
    assert (
        every([lambda: event.wait(5)] * 3 + [lambda: way(lambda: event.wait(5))], [True, True, False, False])
        == [True] * 4
    )
    assert way(event.is_set)
    event.clear()
    began = time.monotonic()
    assert not way(lambda: event.wait(0.1))
    assert 0.1 <= time.monotonic() - began < 3


def test_greenlets_and_threads_wake_each_other() -> None:
    ping, pong = Event(), Event()

    def greenlet() -> int:
        for _ in range(200):
            ping.wait(5)
            ping.clear()
            pong.set()
        return 1

    def thread() -> int:
        for _ in range(200):
            ping.set()
            assert pong.wait(5)
            pong.clear()
        return 2

    assert every([greenlet, thread], [True, False]) == [1, 2]


@ways
def test_a_condition_wakes_as_many_as_it_is_told(way: Way) -> None:
    condition, woken = Condition(), []

    def wait(place: int) -> bool:
        with condition:
            found = condition.wait(1.0 + place)
            woken.append(place)
            return found

    def notify() -> bool:
        time.sleep(0.2)
        with condition:
            condition.notify(2)
        return True

    outcomes = every(
        [lambda: wait(0), lambda: wait(1), lambda: wait(2), lambda: in_thread(notify)], [way is in_hub] * 3 + [False]
    )
    assert sum(outcomes) == 3
    assert len(woken) == 3


@ways
def test_a_semaphore_counts(way: Way) -> None:
    few, at_work, most = Semaphore(3), [0], [0]

    def work() -> bool:
        with few:
            at_work[0] += 1
            most[0] = max(most[0], at_work[0])
            Event().wait(0.02)
            at_work[0] -= 1
        return True

    assert all(every([work] * 20, [way is in_hub] * 20))
    assert most == [3]
    assert few.acquire(blocking=False)
    assert Semaphore(0).acquire(blocking=False) is False
    assert way(lambda: Semaphore(0).acquire(timeout=0.05)) is False


def test_a_lock_held_over_a_wait_keeps_out_threads_and_greenlets() -> None:
    lock, seen = Lock(), [0]

    def work() -> bool:
        for _ in range(10):
            with lock:
                before = seen[0]
                Event().wait(0.001)
                seen[0] = before + 1
        return True

    every([work] * 8, [True, False] * 4)
    assert seen == [80]


@ways
def test_what_stops_a_thread_is_done_aside(way: Way) -> None:
    assert way(lambda: aside(lambda: HUB.inside)) is False
    with pytest.raises(ZeroDivisionError):
        way(lambda: aside(lambda: 1 // 0))
    began = time.monotonic()
    every([lambda: aside(lambda: time.sleep(0.3))] * 10, [True] * 10)
    assert time.monotonic() - began < 2


def test_woken_before_it_waits() -> None:
    def job() -> bool:
        waiter = Waiter(HUB)
        waiter.wake()
        return waiter.wait(5) and Waiter(HUB).wait(0.01) is False

    assert in_hub(job)


def test_what_comes_is_read(pair: tuple[HubSocket, socket.socket]) -> None:
    ours, theirs = pair
    threading.Timer(0.1, lambda: theirs.sendall(b"hello")).start()
    assert in_hub(lambda: ours.recv(100)) == b"hello"
    theirs.sendall(b"there already")
    assert in_hub(lambda: ours.recv(5)) == b"there"
    assert in_hub(lambda: ours.recv(100)) == b" already"


def test_it_is_the_hubs_alone() -> None:
    ours, theirs = socket.socketpair()
    hubs = HubSocket(ours)
    ours.close()  # as whoever opened it may do
    theirs.sendall(b"x")
    assert in_hub(lambda: hubs.recv(1)) == b"x"
    hubs.close()
    theirs.close()


def test_silence_is_told_every_tick(pair: tuple[HubSocket, socket.socket]) -> None:
    ours, theirs = pair
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            in_hub(lambda: ours.recv(1))
    assert 1.5 * TICK < time.monotonic() - began < 10 * TICK
    theirs.sendall(b"x")
    assert in_hub(lambda: ours.recv(1)) == b"x"


def test_its_end_is_told_from_both_sides(pair: tuple[HubSocket, socket.socket]) -> None:
    ours, theirs = pair
    threading.Timer(0.05, theirs.close).start()
    assert in_hub(lambda: ours.recv(1)) == b""
    mine = HubSocket(socket.socketpair()[0])
    threading.Timer(0.05, mine.close).start()
    assert in_hub(lambda: mine.recv(1)) == b""
    with pytest.raises(BrokenPipeError):
        mine.send(b"late")
    assert in_hub(lambda: mine.recv(1)) == b""


@ways
def test_a_peer_that_reads_nothing_holds_up_no_other(way: Way, pair: tuple[HubSocket, socket.socket]) -> None:
    """And gets every byte in order when it reads at last."""
    ours, theirs = pair
    pieces = [bytes([place % 251]) * 100_000 for place in range(200)]
    began = time.monotonic()
    assert way(lambda: [ours.send(piece) for piece in pieces]) == [100_000] * 200
    assert time.monotonic() - began < 5
    other, end = socket.socketpair()
    end.sendall(b"alive")
    assert in_hub(lambda: HubSocket(other).recv(10)) == b"alive"
    end.close()
    wanted, found = b"".join(pieces), bytearray()
    while len(found) < len(wanted):
        found += theirs.recv(1 << 20)
    assert found == wanted


def test_a_reader_that_is_busy_elsewhere_does_not_make_the_hub_spin(pair: tuple[HubSocket, socket.socket]) -> None:
    ours, theirs = pair

    def job() -> bytes:
        first = ours.recv(1)
        before = time.thread_time()
        Event().wait(0.5)  # while the next byte lies there
        assert time.thread_time() - before < 0.25
        return first + ours.recv(1)

    theirs.sendall(b"ab")
    assert in_hub(job) == b"ab"


@ways
def test_connecting(way: Way) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as fresh:
        way(lambda: connect(fresh, server.getsockname(), 5))
        assert fresh.getpeername() == server.getsockname()
        closed = server.getsockname()
    with socket.socket() as fresh, pytest.raises(ConnectionRefusedError):
        way(lambda: connect(fresh, closed, 5))


@ways
def test_connecting_takes_no_longer_than_it_may(way: Way) -> None:
    with socket.socket() as server, socket.socket() as first, socket.socket() as second, socket.socket() as third:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        first.connect(address)  # the queue is full of it, or of the next one: the kernel drops what comes after
        second.setblocking(False)
        second.connect_ex(address)
        time.sleep(0.1)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            way(lambda: connect(third, address, 0.3))
        assert 0.3 <= time.monotonic() - began < 3


def test_a_program_ends_while_greenlets_wait() -> None:
    program = """
import socket, sys, time
from launcher.node.hub.loop import HUB
from launcher.node.hub.sockets import HubSocket
from launcher.node.hub.waits import Event
from launcher.node.parallel import every
ends = [socket.socketpair() for _ in range(20)]
def read(end):
    while True:
        try: end.recv(1)
        except TimeoutError: pass
for ours, theirs in ends:
    HUB.spawn(lambda end=HubSocket(ours): read(end))
    HUB.spawn(lambda: Event().wait())
def busy():  # in the middle of something whenever the program ends
    while True:
        Event().wait(0.0002)
        time.sleep(0.002)
for _ in range(20):
    HUB.spawn(busy)
print(every([lambda: Event().wait(0.05)], [True]))
sys.exit(3)
"""
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (3, "[False]\n", "")
