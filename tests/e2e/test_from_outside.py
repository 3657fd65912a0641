"""External events while `up` is attached to a run: another terminal stops it, a container is removed."""

from __future__ import annotations

import getpass
import socket
import time

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job
from tests.e2e.drill import Drill
from tests.e2e.figures import Figures

pytestmark = [pytest.mark.bed, pytest.mark.timeout(300)]

TICKS = (
    "trap 'sleep 6; echo saved; exit 0' TERM; i=0; while [ $i -lt 900 ]; do i=$((i+1)); echo tick $i; sleep 0.2; done"
)


def begin(cli: Cli, name: str) -> Drill:
    drill = Drill.follow(cli, "up", cli.job(name, **bed_job(run={"command": ["sh", "-c", TICKS]})))
    drill.sees("^tick 5$")
    return drill


@pytest.mark.parametrize("options", [(), pytest.param(("--purge",), marks=pytest.mark.slow)], ids=["down", "purge"])
def test_up_reports_who_stopped_the_run_in_another_terminal(bed_cli: Cli, bed: Bed, options: tuple[str, ...]) -> None:
    drill = begin(bed_cli, "stopped")
    called = time.monotonic()
    bed_cli("down", *options)
    over = drill.end(5) - called
    me = f"{getpass.getuser()}@{socket.gethostname()}"
    assert drill.first(f"stopped stopped-.* by {me} from another terminal", called) is not None, str(drill)
    result = bed_cli.result()
    assert (result["state"], result["exit_code"]) == ("stopped", 5)
    assert any(line == "saved" for _, line in drill.lines)  # the run gets the full time to save a checkpoint
    assert bed.wait_clean() == []
    if not options:
        reported, wrong = drill.first(f"node1: {me} is stopping the run", called), drill.lines_lost(bed, 2)
        Figures("`down` in another terminal", 2, "stopped, exit 5", reported, over, 0, wrong, 0).publish()
        assert wrong == 0


def test_up_reports_that_a_container_was_removed(bed_cli: Cli, bed: Bed) -> None:
    drill = begin(bed_cli, "removed")
    removed = time.monotonic()
    bed.docker(bed.nodes[1], "rm", "-f", f"launcher-{bed_cli.runs()[-1].name}-1")
    over = drill.end(1) - removed
    assert drill.first("failed node2 lost its container: it was removed by another process", removed) is not None, str(
        drill
    )
    result = bed_cli.result()
    assert (result["state"], result["failure"]["node"]) == ("failed", "node2")
    assert bed.wait_clean() == []
    reported = drill.first("node2: its container was removed by another process", removed)
    Figures(
        "`docker rm -f` of a container", 2, "failed, exit 1", reported, over, 0, drill.lines_lost(bed, 2), 0
    ).publish()
