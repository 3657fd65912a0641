"""Every line is shown exactly once, even if connections fail; logs can be limited to a part of the output."""

from __future__ import annotations

import re
import time
from datetime import datetime

import pytest

from tests.bed import faults
from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job

pytestmark = [pytest.mark.bed, pytest.mark.timeout(500)]


@pytest.mark.parametrize(
    ("lines", "cuts"),
    [pytest.param(60_000, 4, id="60-thousand"), pytest.param(1_000_000, 20, id="a-million", marks=pytest.mark.slow)],
)
def test_no_line_is_lost_or_repeated_when_connections_are_lost(bed_cli: Cli, bed: Bed, lines: int, cuts: int) -> None:
    bed_cli.program("flood.py")
    bursts = cuts * 3
    args = [str(lines), str(lines // bursts), "1"]
    command = ["python3", "flood.py", *args]
    bed_cli("up", "-d", bed_cli.job("flood", **bed_job(nodes=["node1"], run={"command": command})))
    target = bed_cli.cwd / "seen"
    with target.open("wb") as file:
        process = bed_cli.start("logs", stdout=file)
        done = 0
        began = time.monotonic()
        while done < cuts and process.poll() is None:
            time.sleep(2)
            faults.kill_ssh_sessions(bed, bed.nodes[0])
            done += 1
        _, err = process.communicate(timeout=300)
    took = time.monotonic() - began
    assert process.returncode == 0, err
    assert done == cuts, f"only {done} lost connections during the run"
    numbers = [int(line.split()[1]) for line in target.read_text().splitlines()]
    lost, doubled = lines - len(set(numbers)), len(numbers) - len(set(numbers))
    print(f"{lines:,} lines, {cuts} cuts in {took:.0f} s: {lost} lost, {doubled} doubled")
    assert (lost, doubled) == (0, 0)
    assert numbers == list(range(lines))


def test_killing_the_launcher_while_it_follows_loses_nothing(bed_cli: Cli, bed: Bed) -> None:
    bed_cli.program("flood.py")
    command = ["python3", "flood.py", "4000", "100", "0.2"]
    process = bed_cli.start("up", bed_cli.job("killed", **bed_job(nodes=["node1"], run={"command": command})))
    assert process.stdout is not None
    for line in process.stdout:
        if line == "line 700\n":
            break
    process.kill()
    process.communicate()
    again = bed_cli("logs")
    assert again.stdout.splitlines() == [f"line {i}" for i in range(4000)]
    assert (bed_cli.runs()[-1] / "logs" / "node1.log").read_text().splitlines() == [f"line {i}" for i in range(4000)]
    assert bed_cli.result()["state"] == "done"


def test_logs_can_be_limited(bed_cli: Cli) -> None:
    bed_cli.program("nasty.py")
    script = bed_cli.job("nasty", **bed_job(run={"script": "nasty.py"}))
    followed = bed_cli("up", script).stdout
    assert "100%\n" in followed
    assert "50%" not in followed
    assert "grün \ufffd broken\n" in followed
    assert "x" * (1 << 20) + "\n" in followed
    assert followed.endswith("the last line has no end\n")

    def logs(*options: object) -> list[str]:
        return bed_cli("logs", "--no-follow", *options).stdout.splitlines()

    everything = logs()
    assert everything == followed.splitlines()
    assert logs("--tail", 2) == everything[-2:]
    assert logs("--tail", 0) == []
    other = logs("--rank", 1)
    assert len(other) == 12
    assert all(line.startswith("rank 1 at ") for line in other)
    assert logs("--node", "node2") == other
    together = logs("--all")
    assert len(together) == len(everything) + len(other)
    assert all(line.startswith(("node1 | ", "node2 | ")) for line in together)

    for line in logs("--timestamps"):
        if match := re.search(r"^(\S+) rank 0 at ([\d.]+)$", line):
            assert abs(datetime.fromisoformat(match.group(1)).timestamp() - float(match.group(2))) < 2.5
    times = [float(line.split()[-1]) for line in everything if line.startswith("rank 0 at")]
    since = logs("--since", datetime.fromtimestamp(times[6]).isoformat())
    shown = [float(line.split()[-1]) for line in since if line.startswith("rank 0 at")]
    assert 4 <= len(shown) <= 8, "about the second half"
    assert shown == times[-len(shown) :]
    assert logs("--since", "1h") == everything
    refused = bed_cli("logs", "--rank", 7, code=2)
    assert "the run has ranks 0 to 1" in refused.stderr
