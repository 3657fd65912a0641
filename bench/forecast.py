"""How right the forecast of `launcher doctor --bench` is, where the link is the limit: `python -m bench.forecast`.

    python -m tests.bed up -n 4
    python -m bench.forecast [--nodes 2 4] [--sizes 8M 40M] [--rate 100] [--json FILE]

Each node of the test bed sends at most --rate Mb/s (tc tbf inside the node). For each number of nodes and size of
gradients: the time of a step of one node, measured by bench/programs/ddp_steps.py on the first node; the forecast from
that time and the links as doctor measures them; and a step of the same program on all nodes, with
DistributedDataParallel over gloo. The nodes share this machine's processors, which gloo's sums and TCP need: the
fastest step counts, as doctor's bandwidth is that of the fastest message.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import report
from launcher.features.bench.forecast import TrainingStep, forecasts, gradient_bytes
from launcher.features.bench.health.measures import BANDWIDTH, Measure
from tests.bed.bed import Bed, Node
from tests.bed.settings import Settings
from tests.e2e.cli import Cli, bed_job

PROGRAM = Path(__file__).parent / "programs" / "ddp_steps.py"
TARGET = 0.25  # largest error, as a share of the measured time


@dataclass(frozen=True)
class Row:
    """alone, forecast, measured: seconds of a step. bandwidth: Gb/s of the slowest link that doctor measured."""

    nodes: int
    gradients: float
    alone: float
    bandwidth: float
    forecast: float
    measured: float

    @property
    def error(self) -> float:
        """Return the difference as a share of the measured time; positive: it took less than forecast."""
        return self.forecast / self.measured - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=gradient_bytes, nargs="+", default=[8e6, 40e6])
    parser.add_argument("--rate", type=float, default=100.0, help="Mb/s that each node sends")
    parser.add_argument("--minutes", type=float, default=1.0, help="time limit of doctor")
    parser.add_argument("--json", type=Path)
    call = parser.parse_args()
    bed = Bed.attach(Settings.from_environment())
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, limited(bed, bed.nodes[: max(call.nodes)], call.rate):
        cli = Cli(Path(folder), {"LAUNCHER_SSH_CONFIG": str(bed.ssh_config)})
        alone = {size: step(cli, bed.nodes[:1], size, 10) for size in call.sizes}
        measures = links(cli, bed.nodes[: max(call.nodes)], call.minutes)
        for count, size in itertools.product(call.nodes, call.sizes):
            rows.append(compare(cli, bed.nodes[:count], measures, TrainingStep(size, alone[size])))
            print(table(rows).splitlines()[-1], flush=True)
    print(table(rows))
    if call.json:
        found = [asdict(row) | {"error": row.error} for row in rows]
        report.write(call.json, report.machine() | {"rate": call.rate, "rows": found})
    worst = max(abs(row.error) for row in rows)
    print(f"largest error {worst:.0%}, target {TARGET:.0%}: {'met' if worst <= TARGET else 'NOT MET'}")


@contextlib.contextmanager
def limited(bed: Bed, nodes: Sequence[Node], rate: float) -> Iterator[None]:
    """Limit what each node sends. rate: Mb/s."""
    try:
        for node in nodes:
            bed.sh(node, f"tc qdisc replace dev eth0 root tbf rate {rate:.0f}mbit burst 64kb latency 50ms")
        yield
    finally:
        for node in nodes:
            bed.run(node, "tc", "qdisc", "del", "dev", "eth0", "root", check=False)


def links(cli: Cli, nodes: Sequence[Node], minutes: float) -> list[Measure]:
    """Return what doctor measures on these nodes."""
    job = cli.job("forecast", **bed_job(nodes=[node.alias for node in nodes], run={"command": ["true"]}))
    examined = cli("doctor", job, "--bench", "--minutes", minutes, "--json", code=None, timeout=900)
    bench = json.loads(examined.stdout)["bench"]
    found = [Measure(**each) for each in bench["measures"]]
    if not any(each.kind == BANDWIDTH for each in found):
        raise SystemExit(f"no link was measured: {bench['findings']} {bench['notes']}")
    return found


def compare(cli: Cli, nodes: Sequence[Node], measures: Sequence[Measure], work: TrainingStep) -> Row:
    """Forecast a step from what was measured, and measure it."""
    last = [each for each in forecasts([node.alias for node in nodes], measures, work) if not each.without][-1]
    assert work.alone is not None
    assert last.step is not None
    took = step(cli, nodes, work.gradients, 5)
    return Row(len(nodes), work.gradients, work.alone, last.bandwidth, last.step, took)


def step(cli: Cli, nodes: Sequence[Node], gradients: float, steps: int) -> float:
    """Return the seconds of a step of the program on these nodes."""
    shutil.copy(PROGRAM, cli.cwd)
    run = {"script": PROGRAM.name, "args": [f"{gradients:.0f}", str(steps)]}
    job = cli.job("steps", **bed_job(nodes=[node.alias for node in nodes], code=".", run=run))
    done = cli("up", job, timeout=900)
    found = re.search(r"seconds-of-a-step (\S+)", done.stdout)
    assert found, done.stdout + done.stderr
    return float(found[1])


def table(rows: Sequence[Row]) -> str:
    """Return the comparison as text."""
    head = ["nodes", "gradients MB", "alone s", "link Gb/s", "forecast s", "measured s", "error"]
    cells = [
        [
            str(row.nodes),
            f"{row.gradients / 1e6:.0f}",
            *(f"{value:.3f}" for value in (row.alone, row.bandwidth, row.forecast, row.measured)),
            f"{row.error:+.0%}",
        ]
        for row in rows
    ]
    return report.table([head, *cells])


if __name__ == "__main__":
    main()
