"""Jobs in containers on a real Slurm: `srun --container` with the bundle of an image that the launcher pushed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bed.debian_registry import forget, need, registry
from tests.bed.settings import TRAIN_IMAGE
from tests.e2e.cli import ROOT, Cli
from tests.ports import free_port
from tests.slurm.bed import SlurmBed

pytestmark = pytest.mark.timeout(600)
SITE = Path(sys.prefix, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """The bed's training image in a registry, by digest, and the environment for skopeo to use that registry."""
    need("skopeo", "umoci", "runc", packages=("skopeo", "umoci", "runc"))
    folder = tmp_path_factory.mktemp("registry")
    cli = Cli(folder, {"XDG_CACHE_HOME": str(folder / "cache")})
    file = cli.job("oci", image={"ref": TRAIN_IMAGE}, nodes=1, run={"command": ["true"]})
    with registry(folder) as address:
        try:
            name = cli("image", "build", file, "--push", f"{address}/team").stdout.splitlines()[-1]
            insecure = folder / ".config" / "containers" / "registries.conf"
            insecure.parent.mkdir(parents=True)
            insecure.write_text(f'[[registry]]\nlocation = "{address}"\ninsecure = true\n')
            yield name, {"HOME": str(folder)}
        finally:
            forget(f"{address}/team/oci")


def in_containers(pushed: tuple[str, dict[str, str]], cli: Cli) -> tuple[Cli, dict[str, Any]]:
    """Return the launcher, and the job keys to run in the image."""
    image, env = pushed
    return Cli(cli.cwd, {**cli.env, **env}), {"image": {"ref": image}, "gpus": "none"}


def test_the_command_that_gets_a_digest_prints_the_name_that_a_job_needs(cli: Cli, tmp_path: Path) -> None:
    need("skopeo", "umoci", packages=("skopeo", "umoci"))
    for argv in (["init", "--layout", "made"], ["new", "--image", "made:it"]):
        subprocess.run(["umoci", *argv], cwd=tmp_path, check=True)
    with registry(tmp_path) as address:
        image = f"{address}/team/tool:1.0"
        push = ["skopeo", "copy", "--dest-tls-verify=false", "oci:made:it", f"docker://{image}"]
        subprocess.run(push, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
        export = ("--to", "slurm", "--on", "oci", "--set", f"image.ref={image}")
        file = cli.job("tool", image={"ref": "other"}, nodes=1, gpus="none", run={"command": ["true"]})
        refused = cli("export", file, *export, code=2).stderr
        command = refused[refused.index("skopeo inspect") :].splitlines()[0]
        insecure = tmp_path / ".config" / "containers" / "registries.conf"
        insecure.parent.mkdir(parents=True)
        insecure.write_text(f'[[registry]]\nlocation = "{address}"\ninsecure = true\n')
        env = {**os.environ, "HOME": str(tmp_path)}
        printed = subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True, check=True).stdout
    assert printed.startswith(f"{address}/team/tool@sha256:")
    assert printed.strip() in cli("export", file, *export[:-1], f"image.ref={printed.strip()}").stdout


@pytest.mark.slow
def test_a_job_in_oci_containers(pushed: tuple[str, dict[str, str]], slurm: SlurmBed, cli: Cli, tmp_path: Path) -> None:
    """Each node has its own rank, the code, the output and the mounts; the rest of the file system is read-only."""
    here, keys = in_containers(pushed, cli)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "word").write_text("mounted\n")
    (cli.cwd / "here.txt").write_text("code\n")
    script = "echo $RANK of $WORLD_SIZE $(cat here.txt /data/word) $PWD; ls /work 2>&1; touch /x 2>&1; df -k /dev/shm"
    mounts = {str(tmp_path / "data"): "/data:ro"}
    done = here("up", cli.job(**keys, nodes=2, mounts=mounts, run={"command": ["sh", "-c", script]}), "--on", "oci")
    logs = {log.name: log.read_text() for log in (cli.runs()[-1] / "logs").glob("node-*.log")}
    for rank in range(2):
        assert f"{rank} of 2 code mounted /workspace/code" in logs[f"node-{rank}.log"], done.stderr
        assert "Read-only file system" in logs[f"node-{rank}.log"]
    images = slurm.shared / ".launcher" / "images"
    assert [path.suffix for path in images.iterdir() if path.is_dir()] == [".bundle"]
    failed = here(
        "up", cli.job(**keys, nodes=2, run={"command": ["sh", "-c", "exit $((RANK * 7))"]}), "--on", "oci", code=1
    )
    assert cli.result()["failure"]["node"] == "node-1", failed.stderr


@pytest.mark.slow
def test_bed_2node_gives_the_same_weights_in_oci_containers(
    pushed: tuple[str, dict[str, str]], cli: Cli, tmp_path: Path
) -> None:
    here, keys = in_containers(pushed, cli)
    sets = [f"code={ROOT}", "gpus=none", "run.args.epochs=1", "run.args.print_digest=true"]
    plain = ["runtime=process", "image=null", "mounts={}", f"port={free_port()}"]
    mounted = {str(SITE): "/site:ro"}
    boxed = [f"image={json.dumps(keys['image'])}", f"mounts={json.dumps(mounted)}", "env.PYTHONPATH=/site", "nodes=2"]
    digests = []
    for where, more in ((("--nodes", "local,local"), plain), (("--on", "oci"), boxed)):
        options = [option for each in [*sets, *more] for option in ("--set", each)]
        here("up", ROOT / "jobs" / "bed_2node.yaml", *options, *where, timeout=400)
        log = (here.runs()[-1] / "logs" / "rank-0.log").read_text()
        digests.append(re.findall(r"\b[0-9a-f]{64}\b", log)[-1])
    assert digests[0] == digests[1]
