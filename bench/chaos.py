"""Effective training time ratio (ETTR) while machines fail and recover: min_nodes, torchrun and torchft.

    python -m tests.bed up -n 9 && python -m bench.chaos [--minutes 30] [--every 5] [--heal 1] [--json FILE]

All run concurrently on separate nodes, with the same faults at the same times: every EVERY minutes the next fault
(container killed, node killed, paused, disconnected) on the next node, which recovers after HEAL minutes. Baselines:
torchrun with its c10d rendezvous, with the store on its first node, in `docker run --restart on-failure` (otherwise a
killed container or node would never return), and, if installed (`pip install torchft`), torchft with its lighthouse on
the first node. Both detect a lost node within 6 s. All run bench/programs/chaos_steps.py (torchft: chaos_torchft.py):
0.5 s per step, a checkpoint every 20 steps on every node, collectives time out after 30 s.

ETTR: number of distinct steps, times the median duration of an undisturbed step, divided by the time from the first
step to the end. Repeated steps, restarts and waiting do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from bench import report
from bench.environment import Caller, bed_of
from tests.bed import faults
from tests.bed.bed import Bed, Node
from tests.bed.settings import TRAIN_IMAGE
from tests.bed.shell import CommandFailed
from tests.e2e.cli import bed_job

PROGRAM, TORCHFT = (Path(__file__).parent / "programs" / name for name in ("chaos_steps.py", "chaos_torchft.py"))
SECONDS, INTERVAL, TIMEOUT, LOST_AFTER = 0.5, 20, 30, 15
OUTPUT = "/home/trainer/bench-chaos"  # output of torchrun on the nodes
CONTAINER = "bench-chaos"
TARGET = 0.85
STEPS = list[tuple[int, float]]  # number and completion time


@contextlib.contextmanager
def container_killed(bed: Bed, node: Node) -> Iterator[None]:
    bed.sh(node, "docker kill $(docker ps -q)")  # explicitly: the engine does not restart it
    try:
        yield
    finally:
        bed.sh(node, "docker start $(docker ps -aq --filter status=exited)")


def paused(_bed: Bed, node: Node) -> AbstractContextManager[None]:
    return faults.paused(node)


FAULTS: dict[str, Callable[[Bed, Node], AbstractContextManager[None]]] = {
    "container killed": container_killed,
    "node killed": faults.powered_off,
    "paused": paused,
    "cut off": faults.isolated,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=3, help="nodes per system")
    parser.add_argument("--minutes", type=float, default=30, help="minutes of training")
    parser.add_argument("--every", type=float, default=5, help="minutes between faults")
    parser.add_argument("--heal", type=float, default=1, help="minutes that a fault lasts")
    parser.add_argument("--only", choices=["launcher", "torchrun", "torchft"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    call = parser.parse_args()
    machine = report.machine()
    ways = {"launcher": with_launcher, "torchrun": with_torchrun, "torchft": with_torchft}
    known = [name for name in ways if name != "torchft" or importlib.util.find_spec(name)]
    names = [call.only] if call.only else known
    with bed_of(call.nodes * len(names)) as bed, Caller.at(bed.ssh_config) as caller:

        def result(number: int) -> dict[str, float | str]:
            name, nodes = names[number], bed.nodes[call.nodes * number :][: call.nodes]
            with ways[name](bed, nodes, caller) as folder:
                steps = trial(name, bed, nodes, folder, 60 * call.minutes, 60 * call.every, 60 * call.heal)
            return {"who": name, **results_of(steps)}

        with ThreadPoolExecutor() as pool:
            results = list(pool.map(result, range(len(names))))
    rows = [[str(one[key]) for key in results[0]] for one in results]
    print("\n" + report.table([[*results[0]], *rows]))
    for one in results:
        if one["who"] == "launcher":
            print(f"lost share: {report.compared(1 - float(str(one['ettr'])), 1 - TARGET)}")
    if call.json:
        report.write(call.json, {"machine": machine, "call": vars(call) | {"json": str(call.json)}, "results": results})
    return 0


@contextlib.contextmanager
def with_launcher(_bed: Bed, nodes: Sequence[Node], caller: Caller) -> Iterator[str]:
    """Yield the folder of the program's output on each node."""
    (caller.folder / PROGRAM.name).write_bytes(PROGRAM.read_bytes())
    common = {key: value for key, value in bed_job().items() if key in ("mounts", "env")}
    elastic = {"min_nodes": len(nodes) // 2 + 1, "lost_after": f"{LOST_AFTER}s", "restarts": 1000}
    run = {"script": PROGRAM.name, "args": _arguments("/output/chaos")}
    caller.launcher("up", "-d", caller.job("bench-chaos", [node.alias for node in nodes], run, **common, **elastic))
    [run] = caller.folder.glob("runs/*")
    try:
        yield f"/home/trainer/.launcher/{run.name}/chaos"
    finally:
        caller.launcher("down", "--purge", "--unfetched")


@contextlib.contextmanager
def with_torchrun(bed: Bed, nodes: Sequence[Node], _caller: Caller) -> Iterator[str]:
    options = f"--nnodes {len(nodes) // 2 + 1}:{len(nodes)} --nproc_per_node 1 --max_restarts 1000 --rdzv_id chaos"
    conf = "keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=5,join_timeout=600"
    rendezvous = f"--rdzv_backend c10d --rdzv_endpoint {nodes[0].address}:29400 --rdzv_conf {conf}"

    def start(node: Node) -> str:
        program = f"/chaos/{PROGRAM.name} {' '.join(_arguments('/chaos'))}"
        return f"-m torch.distributed.run {options} {rendezvous} --local_addr {node.address} {program}"

    with _by_hand(bed, nodes, PROGRAM, start):
        yield OUTPUT


@contextlib.contextmanager
def with_torchft(bed: Bed, nodes: Sequence[Node], _caller: Caller) -> Iterator[str]:
    least, port = len(nodes) // 2 + 1, 29510
    arguments = " ".join(_arguments("/chaos"))

    def start(node: Node) -> str:
        return f"/chaos/{TORCHFT.name} {arguments} {least} {node.address} http://{nodes[0].address}:{port}"

    with (
        _by_hand(bed, nodes[:1], TORCHFT, lambda _: f"/chaos/{TORCHFT.name} lighthouse {least} {port}", "-lighthouse"),
        _by_hand(bed, nodes, TORCHFT, start),
    ):
        yield OUTPUT


@contextlib.contextmanager
def _by_hand(
    bed: Bed, nodes: Sequence[Node], program: Path, command: Callable[[Node], str], suffix: str = ""
) -> Iterator[None]:
    """Run python3 with `command` in one container per node, with OUTPUT as /chaos and restarts on failure."""
    python = f"/opt/venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"

    def start(node: Node) -> None:
        bed.run(node, "install", "-d", "-o", "trainer", OUTPUT)
        bed.sh(node, f"cat >{OUTPUT}/{program.name} <<'END'\n{program.read_text()}END")
        bed.sh(
            node,
            f"docker run -d --name {CONTAINER}{suffix} --network host --ipc host --init --restart on-failure:1000"
            f" -e PYTHONPATH={python} -e OMP_NUM_THREADS=1 -v /opt/venv:/opt/venv:ro -v {OUTPUT}:/chaos {TRAIN_IMAGE}"
            f" python3 {command(node)}",
        )

    def remove(node: Node) -> None:
        bed.sh(node, f"docker rm -f {CONTAINER}{suffix}; rm -rf {OUTPUT}")

    with ThreadPoolExecutor() as pool:
        list(pool.map(start, nodes))
        try:
            yield
        finally:
            list(pool.map(remove, nodes))


def _arguments(folder: str) -> list[str]:
    return [str(SECONDS), str(INTERVAL), str(TIMEOUT), folder]


def trial(who: str, bed: Bed, nodes: Sequence[Node], folder: str, seconds: float, every: float, heal: float) -> STEPS:
    """Return the steps in order of time, followed by the end of the trial as step 0."""
    while not (first := _steps(bed, nodes, folder)):
        time.sleep(0.5)
    began, end = first[0][1], first[0][1] + seconds
    schedule = zip(itertools.count(1), itertools.cycle(FAULTS.items()), itertools.cycle(nodes), strict=False)
    for number, (name, fault), node in schedule:
        if began + number * every + heal > end:
            break
        _sleep_until(began + number * every)
        print(f"  {number * every / 60:g} min: {who}, {node.alias} {name}", flush=True)
        with fault(bed, node):
            _sleep_until(began + number * every + heal)
    _sleep_until(end)
    return [*(step for step in _steps(bed, nodes, folder) if step[1] <= end), (0, end)]


def _steps(bed: Bed, nodes: Sequence[Node], folder: str) -> STEPS:
    lines: list[str] = []
    for node in nodes:
        with contextlib.suppress(CommandFailed):  # it is powered off
            lines += bed.sh(node, f"cat {folder}/steps.txt 2>/dev/null || true").splitlines()
    return sorted(((int(line.split()[0]), float(line.split()[1])) for line in lines), key=lambda step: step[1])


def _sleep_until(when: float) -> None:
    time.sleep(max(0.0, when - time.time()))


def results_of(steps: STEPS) -> dict[str, float]:
    """Return the results of one trial."""
    *done, (_, end) = steps
    took = [later[1] - one[1] for one, later in itertools.pairwise(done) if later[0] == one[0] + 1]
    step, whole = statistics.median(took), end - done[0][1]
    distinct = len({number for number, _ in done})
    gaps = [later[1] - one[1] for one, later in itertools.pairwise(steps)]
    return {
        "ettr": round(distinct * step / whole, 3),
        "minutes": round(whole / 60, 1),
        "step_s": round(step, 3),
        "steps": distinct,
        "twice": len(done) - distinct,
        "longest_gap_s": round(max(gaps), 1),
        "stopped_s": round(sum(gap for gap in gaps if gap > 3 * step), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
