"""The pods of a JobSet, with the printed command, variables and limits, as containers of Docker that meet."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.bed.fixtures import unavailable
from tests.bed.host import docker
from tests.bed.images import image_id
from tests.bed.settings import TRAIN_IMAGE
from tests.features.kubernetes.test_manifests import pod
from tests.features.kubernetes.test_text import manifests

pytestmark = [pytest.mark.bed, pytest.mark.timeout(300)]
SITE = Path(sys.prefix, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
PROGRAM = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
groups = ("memory.max", "memory/memory.limit_in_bytes")  # of the two versions of cgroups
memory = [path for name in groups if os.path.exists(path := f"/sys/fs/cgroup/{name}")]
print(f"rank {dist.get_rank()} of {total.item():.0f}, {sys.argv[1:]}, {os.environ['WORD']}", flush=True)
print("memory", open(memory[0]).read().strip(), os.getuid(), os.getcwd(), flush=True)
"""


@pytest.fixture
def network() -> Iterator[str]:
    if image_id(TRAIN_IMAGE) is None:
        unavailable(f"no image {TRAIN_IMAGE} on this machine's engine: python -m tests.bed up")
    name = f"launcher-pods-{os.getpid()}"
    docker("network", "create", name)
    yield name
    docker("network", "rm", name)


def expanded(text: str, known: dict[str, str]) -> str:
    """As the kubelet does: $(NAME), and $$ for $."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda found: known.get(found[1], found[0]) if found[1] else "$", text)


def start(made: dict[str, Any], index: int, network: str, output: Path, code: Path) -> str:
    spec = pod(made)
    (container,) = spec["containers"]
    name, known = made["metadata"]["name"], dict[str, str]()
    for each in container["env"]:
        known[each["name"]] = str(index) if "valueFrom" in each else expanded(each["value"], known)
    own = f"{name}-node-0-{index}"
    argv = ["-d", "--network", network, "--hostname", own, "--network-alias", f"{own}.{name}"]
    for key, value in known.items():
        argv += ["--env", f"{key}={value}"]
    limits, user = container["resources"]["limits"], spec["securityContext"]
    argv += ["--memory", limits["memory"], "--cpus", str(int(limits["cpu"].removesuffix("m")) / 1000)]
    argv += ["--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--cap-drop", "ALL"]
    argv += [
        "--security-opt",
        "no-new-privileges",
        "--workdir",
        container["workingDir"],
        "--tmpfs",
        "/dev/shm:size=64m",
    ]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    argv += [
        "-v",
        f"{output}:{mounts['output']}",
        "-v",
        f"{code}:{container['workingDir']}:ro",
        "-v",
        f"{SITE}:/site:ro",
    ]
    entry, *command = [expanded(text, known) for text in (*container["command"], *container["args"])]
    return docker("run", *argv, "--entrypoint", entry, TRAIN_IMAGE, *command)


def test_the_pods_of_a_jobset_meet(network: str, tmp_path: Path) -> None:
    code, output = tmp_path / "code", tmp_path / "output"
    for folder in (code, output, tmp_path, *tmp_path.parents[:2]):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    output.chmod(0o777)  # as with fsGroup
    (code / "meet.py").write_text(PROGRAM)
    data = {
        "name": "meet",
        "image": {"base": TRAIN_IMAGE},
        "nodes": 2,
        "gpus": "none",
        "run": {"script": "meet.py", "args": ["$(HOME)", "1e-4"]},
        "env": {"WORD": "$5 it's", "PYTHONPATH": "/site", "OMP_NUM_THREADS": "1"},
        "resources": {"memory": "768m", "cpus": 0.5},
        "timeout": "5m",
    }
    (made,) = yaml.safe_load_all(manifests(data, jobset=True))
    pods = [start(made, index, network, output, code) for index in range(2)]
    try:
        codes = [docker("wait", each) for each in pods]
        logs = [docker("logs", each) for each in pods]
    finally:
        docker("rm", "-f", *pods)
    assert codes == ["0", "0"], logs
    for rank, log in enumerate(logs):
        assert f"rank {rank} of 2, ['$(HOME)', '1e-4'], $5 it's" in log
        assert f"memory {768 << 20} 1000 /output/{made_run(made)}/workdir/node-{rank}" in log


def made_run(made: dict[str, Any]) -> str:
    (container,) = pod(made)["containers"]
    return next(each["value"] for each in container["env"] if each["name"] == "LAUNCHER_RUN")
