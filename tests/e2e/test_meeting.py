"""Two runs on the same nodes never join: each has locked a port on the master before anything starts."""

from __future__ import annotations

import re

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job

pytestmark = [pytest.mark.bed, pytest.mark.timeout(300)]


def test_two_runs_that_start_together_have_different_ports(bed_cli: Cli, bed: Bed) -> None:
    job = bed_cli.job("twins", **bed_job(run={"command": ["sh", "-c", "sleep 2; echo $MASTER_PORT"]}))
    both = [bed_cli.start("up", job) for _ in range(2)]
    ended = [(*process.communicate(timeout=200), process.returncode) for process in both]
    assert [code for _, _, code in ended] == [0, 0], ended
    assert sorted(out for out, _, _ in ended) == ["29500\n", "29501\n"]
    bed_cli("down", "--all")
    assert bed.wait_clean() == []


def test_of_two_runs_with_the_same_port_one_is_refused(bed_cli: Cli, bed: Bed) -> None:
    job = bed_cli.job("twins", **bed_job(run={"command": ["sh", "-c", "sleep 2; echo over"]}, port=29500))
    both = [bed_cli.start("up", job) for _ in range(2)]
    ended = [(*process.communicate(timeout=200), process.returncode) for process in both]
    assert sorted(code for _, _, code in ended) == [0, 3], ended
    [refused] = [err for _, err, code in ended if code]
    [done] = [out for out, _, code in ended if not code]
    assert re.search(r"node1: rendezvous port 29500 is (locked by run twins-|in use)", refused)
    assert "--set port=29501" in refused
    assert done == "over\n"
    bed_cli("up", job)  # an ended run does not hold its port
    bed_cli("down", "--all")
    assert bed.wait_clean() == []
