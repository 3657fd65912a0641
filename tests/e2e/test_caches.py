"""Caches of containers on the bed: a second run finds what the first one has compiled."""

from __future__ import annotations

import json

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job

pytestmark = [pytest.mark.bed, pytest.mark.timeout(300)]

PROGRAM = """
import os, pathlib
for name in ("TORCHINDUCTOR_CACHE_DIR", "HF_HOME"):
    folder = pathlib.Path(os.environ[name])
    file = folder / "made"
    print(name, "found" if file.exists() else "made", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text("it")
"""


def test_a_second_run_finds_what_the_first_one_has_left(bed_cli: Cli, bed: Bed) -> None:
    (bed_cli.cwd / "make.py").write_text(PROGRAM)
    job = bed_cli.job("make", **bed_job(run={"command": ["python3", "make.py"]}, models=True))
    first = bed_cli("up", job).stdout
    again = bed_cli("up", job).stdout
    without = bed_cli("up", job, "--set", "cache=false", "--set", "models=false", code=1)
    assert "TORCHINDUCTOR_CACHE_DIR made" in first
    assert "HF_HOME made" in first
    assert "TORCHINDUCTOR_CACHE_DIR found" in again
    assert "HF_HOME found" in again
    assert "TORCHINDUCTOR_CACHE_DIR made" in without.stdout
    assert "KeyError: 'HF_HOME'" in without.stdout
    modes = bed.sh(bed.nodes[1], "stat -c '%a %U' /home/trainer/.launcher/cache /home/trainer/.launcher/cache/*")
    assert modes.splitlines() == ["700 trainer"] * 3
    bed.sh(
        bed.nodes[0],
        "cd /home/trainer/.launcher/cache && cp -rp [0-9a-f]*-* 0123456789ab-$(ls | grep -o -- '[^-]*$' | head -n 1)",
    )
    listed = bed_cli("clean").stdout
    assert listed.count("kept: its image is there") == 2
    assert listed.count("to remove them: --models") == 2
    bed_cli("clean", "--yes", "--unfetched")
    left = {
        row["node"]: row["caches"] for row in json.loads(bed_cli("clean", "--nodes", "node1,node2", "--json").stdout)
    }
    assert [cache["kept"] for cache in left["node1"]] == ["its image is there", "models"]
    bed_cli("clean", "--nodes", "node1,node2", "--yes", "--models")
    (one, two) = json.loads(bed_cli("clean", "--nodes", "node1,node2", "--json").stdout)
    assert [cache["kept"] for cache in (*one["caches"], *two["caches"])] == ["its image is there"] * 2
