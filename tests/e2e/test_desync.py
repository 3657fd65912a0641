"""Ranks with mismatching collectives are reported with the collective and its number; with plain processes."""

from __future__ import annotations

import pytest

from tests.e2e.cli import Cli

pytestmark = pytest.mark.timeout(400)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("how", "nodes", "steps", "keys", "messages"),
    [
        pytest.param(
            *("skip", 3, 3, {}),
            (
                "rank 1 on local-1 called broadcast number 7, sizes [2]",
                "rank 0 on local-0, rank 2 on local-2 called all_reduce number 7, sizes [6]",
            ),
            id="skips",
        ),
        pytest.param(
            *("shape", 3, 3, {}),
            ("rank 1 on local-1 called all_reduce number 7, sizes [7]",),
            id="other-shape",
            marks=pytest.mark.slow,
        ),
        pytest.param(  # more collectives than the flight recorder keeps, which at its default takes seconds to write
            *("stuck", 2, 60, {"hang_timeout": "20s"}),
            (
                "the others wait for rank 1 on local-1 at all_reduce number 121, sizes [6]",
                "rank 1 is at ",
                " in waits_forever",
            ),
            id="stuck",
        ),
    ],
)
def test_a_mismatching_rank_is_reported_with_the_collective(
    home_cli: Cli, how: str, nodes: int, steps: int, keys: dict[str, str], messages: tuple[str, ...]
) -> None:
    home_cli.program("desync.py")
    seconds = "600" if "hang_timeout" in keys else "20"
    run = {"script": "desync.py", "args": [how, str(steps), seconds]}
    env = {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "100"}
    job = home_cli.job("odd", runtime="process", nodes=["local"] * nodes, env=env, run=run, **keys)
    failed = home_cli("up", job, code=1)
    print(home_cli.result()["failure"]["what"])
    for expected in messages:
        assert expected in home_cli.result()["failure"]["what"]
        assert expected in " ".join(failed.stderr.split())
