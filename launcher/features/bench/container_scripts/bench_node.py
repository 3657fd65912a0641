"""python3 bench_node.py SPEC: `launcher doctor --bench` on one node; prints a line with MARK and JSON per measurement.

SPEC is a JSON object: rounds (of pairs of ranks), times (seconds of each phase, health/rounds.py), paths to read,
precision, gpus (whether the job uses GPUs), model (the trainer's options, or null). The nodes agree once, through a
store on rank 0, on the participants and a start time; then each follows the timetable by its own clock, so that the
loss of any node, including rank 0, affects only its own measurements. Runs in the job's image with torch and Python
3.8.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

BEGAN = time.monotonic()  # torch takes seconds to import
os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of nvidia-smi
if TYPE_CHECKING:
    from launcher.features.bench.container_scripts import bench_links as links
    from launcher.features.bench.container_scripts import bench_parts as parts
else:
    import bench_links as links
    import bench_parts as parts

import torch  # noqa: E402 - after the clock was read

MARK = "launcher-measured "
PAUSED = 10.0  # seconds without a beat after which the process was paused with its machine or container
SLACK = 8.0  # seconds after the last phase until a process that is still running exits
_out = threading.Lock()
_reported = threading.Event()  # what the node is judged by


class Pulse:
    """Ends the process if it was paused: its values say nothing then, and its peers have gone on without it."""

    last = time.monotonic()

    @classmethod
    def beat(cls) -> None:
        now = time.monotonic()
        if now - cls.last > PAUSED:
            sys.stdout.write(f"paused for {now - cls.last:.0f} s\n")
            sys.stdout.flush()
            os._exit(75)
        cls.last = now


def report(**fields: Any) -> None:
    Pulse.beat()
    with _out:
        sys.stdout.write(f"{MARK}{json.dumps(fields)}\n")
        sys.stdout.flush()


class Participants:
    """The participants, and the address of each one's store for the pairs in which it is the lower rank."""

    def __init__(self, seconds: float) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._until = time.monotonic() + seconds
        address = os.environ["MASTER_ADDR"]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing; selects the route
            self._own = address if self.rank == 0 else probe.getsockname()[0]
        self.store, self._port = self._hosted()
        self.addresses = {self.rank: (self._own, self._port)}
        if self.size > 1:
            self.addresses = self._meet(address, int(os.environ["MASTER_PORT"]))

    def _left(self) -> float:
        return max(self._until - time.monotonic(), 0.5)

    def _hosted(self) -> tuple[Any, int]:
        for left in range(10, 0, -1):
            with socket.socket() as free:
                free.bind(("", 0))
                port = free.getsockname()[1]
            try:
                return links.store(self._own, port, hosts=True, seconds=self._left()), port
            except RuntimeError:  # another program has bound the port in the meantime
                if left == 1:
                    raise
        raise AssertionError

    def _meet(self, address: str, port: int) -> dict[int, tuple[str, int]]:
        store = links.store(address, port, hosts=self.rank == 0, seconds=self._left())
        store.set(f"at-{self.rank}", json.dumps([self._own, self._port]))
        self._kept = store  # the store of rank 0 must stay open for the others
        if self.rank == 0:
            found = {}
            for rank in range(self.size):
                with contextlib.suppress(RuntimeError):  # it did not arrive in time
                    store.wait([f"at-{rank}"], timedelta(seconds=self._left()))
                    found[rank] = json.loads(store.get(f"at-{rank}"))
            store.set("go", json.dumps(found))
        store.wait(["go"], timedelta(seconds=self._left() + 5))
        return {int(rank): tuple(address) for rank, address in json.loads(store.get("go")).items()}

    def group(self, *ranks: int) -> links.ProcessGroup:
        """Return the process group of these ranks, which include this one."""
        address, port = self.addresses[ranks[0]]
        return links.ProcessGroup(address, port, ranks[0] == self.rank, ranks.index(self.rank), len(ranks))


def main() -> None:
    spec = json.loads(sys.argv[1])
    times, rounds = spec["times"], spec["rounds"]
    rest = sum(times.values()) - times["pair"] + times["pair"] * len(rounds) + SLACK
    Pulse.last = time.monotonic()  # torch has been imported
    threading.Thread(target=_end_after, args=(rest,), daemon=True).start()
    try:
        meeting = Participants(times["join"] - (time.monotonic() - BEGAN))
    except RuntimeError as error:
        report(kind="failed", part="meeting", what=f"could not reach the first node: {_first_line(error)}")
        meeting = None  # the node's own parts are measured anyway
    at = time.monotonic()
    report(kind="begun", ranks=sorted(meeting.addresses) if meeting else [])
    cuda = spec["gpus"] and torch.cuda.is_available()
    if spec["gpus"] and not cuda:
        report(kind="failed", part="GPUs", what="torch found no GPUs in the container")
    usable = True
    if cuda:
        usable = parts.gpus(times["local"], spec["precision"], report)
    else:
        parts.processor(times["local"], report)
    at = _until(at + times["local"])
    report(kind="phase", name="read")
    for path in spec["paths"]:
        parts.read(path, times["read"] / len(spec["paths"]), report)
    at = _until(at + times["read"])
    report(kind="phase", name="pairs")
    if usable and meeting is not None and meeting.rank in meeting.addresses:
        _links(meeting, rounds, times, "cuda" if cuda else "cpu", at)
    report(kind="end")
    _reported.set()
    if usable and spec["model"] is not None:  # last, as it may take any time without harm to the others
        _model(spec["model"], times["model"])
    os._exit(0)  # even if a library is still waiting


def _links(
    meeting: Participants, rounds: list[list[list[int]]], times: dict[str, float], device: str, at: float
) -> None:
    for number, pairs in enumerate(rounds):
        mine = next((pair for pair in pairs if meeting.rank in pair), None)
        if mine and all(rank in meeting.addresses for rank in mine):
            other = mine[0] if mine[1] == meeting.rank else mine[1]

            def report_pair(other: int = other, **fields: Any) -> None:
                report(to=other, **fields)

            try:
                group = meeting.group(*mine)
                links.pair(group, f"round-{number}", device, meeting.store, at, times["pair"], report_pair)
            except RuntimeError as error:
                report(kind="failed", to=other, what=_first_line(error))
        at = _until(at + times["pair"])
    if len(meeting.addresses) > 1:
        report(kind="phase", name="together")
        try:
            group = meeting.group(*sorted(meeting.addresses))
            links.together(group, device, meeting.store, at, times["together"], report)
        except RuntimeError as error:
            report(kind="failed", part="all-reduce", what=_first_line(error))


def _model(options: list[str], seconds: float) -> None:
    """Measure the trainer's model in a process of its own, which ends in time whatever the model does."""
    why = ""
    try:
        done = subprocess.run(
            [sys.executable, "bench_model.py", *options],
            env={**os.environ, "BENCH_UNTIL": str(time.monotonic() + 0.7 * seconds)},
            stderr=subprocess.PIPE,
            timeout=seconds,
            check=False,
        )
        if done.returncode:
            why = (done.stderr.decode(errors="replace").strip().splitlines() or ["it crashed"])[-1][:200]
    except subprocess.TimeoutExpired:
        why = f"it took longer than {seconds:.0f} s; for more time raise --minutes"
    if why:
        report(kind="note", what=f"the trainer's model was not measured: {why}")


def _until(moment: float) -> float:
    time.sleep(max(moment - time.monotonic(), 0))
    return moment


def _end_after(seconds: float) -> None:
    """Exit after a timeout: a library may wait forever, and Docker's own limit is longer."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(1.0)
        Pulse.beat()
    if not _reported.is_set():
        report(kind="failed", part="time", what="timed out")
    os._exit(75)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


if __name__ == "__main__":
    main()
