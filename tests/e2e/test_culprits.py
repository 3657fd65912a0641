"""Find the rank at fault if no rank prints an error: one that exited early, or one that is suspended."""

from __future__ import annotations

import re

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job

pytestmark = [pytest.mark.bed, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("how", "keys", "pattern"),
    [
        pytest.param(
            "quit",
            {"leaver": 0},
            "exited with code 0 while others still waited",
            id="master",
            marks=pytest.mark.slow,
        ),
        pytest.param(  # torch may abort such a program at its end: "terminate called without an active exception"
            "plain",
            {"processes": 2, "leaver": 3},
            "exited with code 0 while others still waited|was killed by SIGABRT",
            id="undestroyed",
            marks=pytest.mark.slow,
        ),
        pytest.param("exit", {}, "exited with code 0 while others still waited", id="leaves"),
        pytest.param("stop", {}, "was suspended", id="suspended"),
        pytest.param("stop", {"hang_timeout": "8s"}, "was suspended", id="hang", marks=pytest.mark.slow),
        pytest.param(  # torchrun kills a rank that is still shutting down, and then cannot report who exited
            "quit",
            {"nodes": ["node1"], "processes": 2},
            "exited with code 0 while others still waited",
            id="one-node",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_rank_that_the_others_waited_for_is_reported(
    bed_cli: Cli, bed: Bed, how: str, keys: dict[str, object], pattern: str
) -> None:
    bed_cli.program("leaves.py")
    seconds = "60" if "hang_timeout" in keys else "8"
    leaver = keys.get("leaver", 1)
    run = {"script": "leaves.py", "args": [how, seconds, str(leaver)]}
    job = bed_cli.job("waits", **bed_job(run=run, **{key: keys[key] for key in keys if key != "leaver"}))
    failed = bed_cli("up", job, code=1)
    failure = bed_cli.result()["failure"]
    print(failure)
    assert failure["rank"] == leaver, failed.stderr
    assert re.search(pattern, failure["what"])
    assert f"failed rank {leaver} on node" in failed.stderr
    assert bed.wait_clean() == []
