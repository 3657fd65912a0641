"""Caches of containers on the bed: a second run finds what the first one has compiled."""

from __future__ import annotations

import json

import pytest

from tests.bed.bed import Bed
from tests.bed.settings import TRAIN_IMAGE, TRAINER
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


WHOSE = """
import os, pathlib
file = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "whose")
file.parent.mkdir(parents=True, exist_ok=True)
if not file.exists():
    file.write_text(os.environ["WHOSE"])
print("cache of", file.read_text(), flush=True)
"""


def test_another_user_image_or_machine_has_a_cache_of_its_own(bed_cli: Cli, bed: Bed) -> None:
    """machine: the home folder is on both, as on NFS."""
    (bed_cli.cwd / "whose.py").write_text(WHOSE)
    other = bed.docker(bed.nodes[0], "create", TRAIN_IMAGE)
    bed.docker(bed.nodes[0], "commit", "--change", "LABEL other=1", other, "launcher-bed-other")

    def cache(mine: str, node: str = "node1", image: str = TRAIN_IMAGE) -> str:
        keys = bed_job(nodes=[node], run={"command": ["python3", "whose.py"]}, image={"ref": image})
        job = bed_cli.job("whose", **{**keys, "env": {"WHOSE": mine}})
        [found] = [line for line in bed_cli("up", job).stdout.splitlines() if line.startswith("cache of ")]
        return found.removeprefix("cache of ")

    try:
        assert cache("first") == "first"
        home = bed.sh(bed.nodes[0], "tar -C /home/trainer -c .launcher/cache | base64 -w 0", user=TRAINER)
        bed.sh(bed.nodes[1], f"umask 077; echo {home} | base64 -d | tar -C /home/trainer -x", user=TRAINER)
        assert cache("other user", "node1-root") == "other user"
        assert cache("other image", image="launcher-bed-other") == "other image"
        assert cache("other machine", "node2") == "other machine"
        assert cache("again") == "first"
        files = ".launcher/cache/*/torchinductor/whose"
        assert bed.sh(bed.nodes[0], f"cd /home/trainer && stat -c %U {files}") == "trainer\ntrainer\n"
        assert bed.sh(bed.nodes[0], f"cd /root && stat -c %U {files}") == "root\n"
        found = bed.sh(bed.nodes[1], f"cd /home/trainer && for file in {files}; do cat $file; echo; done")
        assert sorted(found.splitlines()) == ["first", "other machine"]
    finally:
        bed.sweep(bed.nodes[0])
        bed.docker(bed.nodes[0], "rmi", "launcher-bed-other")
