"""What the home on a node has, on the test bed: ~/.launcher as a link to another disk, Docker's proxies, data."""

from __future__ import annotations

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job

pytestmark = [pytest.mark.bed, pytest.mark.timeout(300)]

SCRIPT = """
cat /data/word
echo "proxy $HTTP_PROXY $http_proxy"
mkdir -p $LAUNCHER_OUTPUT/checkpoints
echo 1 > $LAUNCHER_OUTPUT/checkpoints/a.pt
echo 2 > own
"""
CONFIG = '{"proxies": {"default": {"httpProxy": "http://proxy.invalid:3128"}}}'


def test_a_link_a_source_in_the_home_and_a_proxy(bed_cli: Cli, bed: Bed) -> None:
    make = "rm -rf ~/.launcher ~/disk && mkdir -p ~/disk/runs ~/words ~/.docker && echo word > ~/words/word"
    for node in bed.nodes[:2]:
        bed.sh(node, make, user="trainer")
        bed.sh(node, f"ln -s ~/disk/runs ~/.launcher && echo '{CONFIG}' > ~/.docker/config.json", user="trainer")
    keys = bed_job(run={"command": ["sh", "-c", SCRIPT]})
    job = bed_cli.job("homes", **{**keys, "mounts": {**keys["mounts"], "~/words": "/data:ro"}})
    try:
        assert "0 failures" in bed_cli("doctor", job).stdout
        done = bed_cli("up", job)
        assert done.stdout == "word\nproxy http://proxy.invalid:3128 http://proxy.invalid:3128\n"
        run = bed_cli.runs()[-1]
        for node in bed.nodes[:2]:
            assert run.name in bed.sh(node, "ls ~/disk/runs", user="trainer")
        bed_cli("fetch", "--checkpoints")
        assert len(list(run.rglob("a.pt"))) == 2
        assert len(list(run.rglob("own"))) == 2
        again = bed_cli("up", job, "--resume", run.name)
        assert again.stdout.startswith("word\n")
        bed_cli("down", "--all", "--purge", "--unfetched")
        for node in bed.nodes[:2]:
            assert "homes-" not in bed.sh(node, "ls ~/disk/runs", user="trainer")
    finally:
        for node in bed.nodes[:2]:
            bed.sh(node, "rm -rf ~/.launcher ~/disk ~/words ~/.docker/config.json", user="trainer")
