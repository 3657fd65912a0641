"""python3 bench_node.py SPEC: one node's part of `launcher doctor --bench`; prints a line of MARK and JSON a measure.

SPEC is a JSON object: rounds (of pairs of ranks), times (seconds of each phase, launcher/health/rounds.py), paths to
read, precision, gpus (whether the job computes on them). The nodes agree once, through a store of rank 0, on who is
there and on a start; from then on each keeps to the timetable by its own clock, so that the loss of any node, rank 0
too, costs nothing but its own measures. In the job's image: torch and Python 3.8.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

BEGAN = time.monotonic()  # torch takes seconds to import
os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi counts them
if TYPE_CHECKING:
    from launcher.container_scripts import bench_links as links
    from launcher.container_scripts import bench_parts as parts
else:
    import bench_links as links
    import bench_parts as parts

import torch  # noqa: E402 - after the clock was read

MARK = "launcher-measured "
SLACK = 8.0  # seconds after the last phase until a process that still runs is ended
_out = threading.Lock()


def tell(**said: Any) -> None:
    with _out:
        sys.stdout.write(f"{MARK}{json.dumps(said)}\n")
        sys.stdout.flush()


class Meeting:
    """Who is there, and where each hosts the pairs in which it is the lower rank."""

    def __init__(self, seconds: float) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._until = time.monotonic() + seconds
        address = os.environ["MASTER_ADDR"]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: it chooses the route
            self._own = address if self.rank == 0 else probe.getsockname()[0]
        self.store, self._port = self._hosted()
        self.places = {self.rank: (self._own, self._port)}
        if self.size > 1:
            self.places = self._meet(address, int(os.environ["MASTER_PORT"]))

    def _left(self) -> float:
        return max(self._until - time.monotonic(), 0.5)

    def _hosted(self) -> tuple[Any, int]:
        for left in range(10, 0, -1):
            with socket.socket() as free:
                free.bind(("", 0))
                port = free.getsockname()[1]
            try:
                return links.store(self._own, port, hosts=True, seconds=self._left()), port
            except RuntimeError:  # another program has taken it meanwhile
                if left == 1:
                    raise
        raise AssertionError

    def _meet(self, address: str, port: int) -> dict[int, tuple[str, int]]:
        store = links.store(address, port, hosts=self.rank == 0, seconds=self._left())
        store.set(f"at-{self.rank}", json.dumps([self._own, self._port]))
        self._kept = store  # rank 0's serves the others
        if self.rank == 0:
            found = {}
            for rank in range(self.size):
                with contextlib.suppress(RuntimeError):  # it is not here in time
                    store.wait([f"at-{rank}"], timedelta(seconds=self._left()))
                    found[rank] = json.loads(store.get(f"at-{rank}"))
            store.set("go", json.dumps(found))
        store.wait(["go"], timedelta(seconds=self._left() + 5))
        return {int(rank): tuple(place) for rank, place in json.loads(store.get("go")).items()}

    def place(self, *ranks: int) -> links.Place:
        """Of a process group of these ranks, this one among them."""
        address, port = self.places[ranks[0]]
        return links.Place(address, port, ranks[0] == self.rank, ranks.index(self.rank), len(ranks))


def main() -> None:
    spec = json.loads(sys.argv[1])
    times, rounds = spec["times"], spec["rounds"]
    rest = sum(times.values()) - times["pair"] + times["pair"] * len(rounds) + SLACK
    threading.Thread(target=_end_after, args=(rest,), daemon=True).start()
    try:
        meeting = Meeting(times["join"] - (time.monotonic() - BEGAN))
    except RuntimeError as error:
        tell(kind="failed", part="meeting", what=f"did not reach the first node: {_words(error)}")
        meeting = None  # its own parts are measured all the same
    at = time.monotonic()
    tell(kind="begun", ranks=sorted(meeting.places) if meeting else [])
    cuda = spec["gpus"] and torch.cuda.is_available()
    if spec["gpus"] and not cuda:
        tell(kind="failed", part="GPUs", what="torch sees none in the container")
    if cuda:
        parts.gpus(times["local"], spec["precision"], tell)
    else:
        parts.processor(times["local"], tell)
    at = _until(at + times["local"])
    tell(kind="phase", name="read")
    for path in spec["paths"]:
        parts.read(path, times["read"] / len(spec["paths"]), tell)
    at = _until(at + times["read"])
    tell(kind="phase", name="pairs")
    if meeting is not None and meeting.rank in meeting.places:
        _links(meeting, rounds, times, "cuda" if cuda else "cpu", at)
    tell(kind="end")
    os._exit(0)  # whatever a library still waits for


def _links(meeting: Meeting, rounds: list[list[list[int]]], times: dict[str, float], device: str, at: float) -> None:
    for number, pairs in enumerate(rounds):
        mine = next((pair for pair in pairs if meeting.rank in pair), None)
        if mine and all(rank in meeting.places for rank in mine):
            other = mine[0] if mine[1] == meeting.rank else mine[1]

            def told(other: int = other, **said: Any) -> None:
                tell(to=other, **said)

            try:
                place = meeting.place(*mine)
                links.pair(place, f"round-{number}", device, meeting.store, at, times["pair"], told)
            except RuntimeError as error:
                tell(kind="failed", to=other, what=_words(error))
        at = _until(at + times["pair"])
    if len(meeting.places) > 1:
        tell(kind="phase", name="together")
        try:
            place = meeting.place(*sorted(meeting.places))
            links.together(place, device, meeting.store, at, times["together"], tell)
        except RuntimeError as error:
            tell(kind="failed", part="all-reduce", what=_words(error))


def _until(moment: float) -> float:
    time.sleep(max(moment - time.monotonic(), 0))
    return moment


def _end_after(seconds: float) -> None:
    """A library may wait for ever; Docker's own limit would come later."""
    time.sleep(seconds)
    tell(kind="failed", part="time", what="it did not end in time")
    os._exit(75)


def _words(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


if __name__ == "__main__":
    main()
