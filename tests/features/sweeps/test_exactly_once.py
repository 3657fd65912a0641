"""A sweep whose launcher is killed at any moment runs each variant exactly once."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from tests.e2e.cli import Cli

KILLS = 100
VARIANTS = 12
PROGRAM = 'echo "$2" >>LOG; sleep 0.$((($2 * 7) % 10))'  # each start is counted by the program itself


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [61])
def test_each_variant_runs_once_whenever_the_launcher_is_killed(home_cli: Cli, seed: int) -> None:
    rand, kills, sweeps = random.Random(seed), 0, 0
    while kills < KILLS:
        log = home_cli.cwd / f"log-{sweeps}"
        run = {"command": ["sh", "-c", PROGRAM.replace("LOG", str(log)), "sh"]}
        keys = {"runtime": "process", "nodes": {"pool": ["local"] * 3}, "run": run}
        killed = until_done(home_cli, f"night{sweeps}", keys, rand, KILLS - kills)
        assert Counter(log.read_text().split()) == Counter(map(str, range(VARIANTS))), (seed, sweeps)
        kills, sweeps = kills + killed, sweeps + 1
    print(f"{kills} kills in {sweeps} sweeps")


def until_done(cli: Cli, name: str, keys: Mapping[str, Any], rand: random.Random, most: int) -> int:
    """Run a sweep, and kill its launcher at random moments. Return how often. keys: of the job, without its sweep."""
    job = cli.job(name, **keys, sweep={"grid": {"x": list(range(VARIANTS))}})
    killed = 0
    while True:
        begun = any(folder.name.startswith(f"{name}-") and (folder / "plan.json").exists() for folder in cli.runs())
        up = cli.start("up", job, *(["--resume", name] if begun else []))
        until = time.monotonic() + rand.uniform(0.2, 4) if killed < most else float("inf")
        while up.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        if up.poll() is None:
            up.send_signal(rand.choice((signal.SIGKILL, signal.SIGTERM)))
            up.communicate(timeout=60)
            killed += 1
            continue
        messages = up.communicate(timeout=60)[1]
        assert up.returncode == 0, messages
        return killed
