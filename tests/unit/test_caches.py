"""Caches that outlive containers: where they are, who may read them, and which are left over."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import JobInvalid, NodeUnfit
from launcher.job.loader import parse_job
from launcher.model import caches
from launcher.model.container import Mount
from launcher.node import image_cache
from launcher.node.docker.values import container_request
from launcher.node.files import Files
from launcher.node.machine import LocalMachine
from tests.unit.container_box import Box
from tests.unit.test_plan import job, node, planned

HERE = Files(LocalMachine("here", ""))


def folders(**keys: Any) -> list[tuple[Mount, ...]]:
    facts = [node(rank, machine=f"{rank}fe-0{rank}" * 8) for rank in range(2)]
    return [each.container.caches for each in planned(job(2, **keys), facts).nodes]


def test_each_machine_has_its_own_folder_for_an_image_and_one_for_models() -> None:
    image = planned(job(1), [node(0)]).nodes[0].container.image.rpartition(":")[2][:12]
    (first,), (second,) = folders()
    assert first == Mount(f"/home/ada/.launcher/cache/{image}-0fe000fe000f", "/.launcher/cache")
    assert second.source.endswith(f"/cache/{image}-1fe011fe011f")
    assert folders(cache=False) == [(), ()]
    models = Mount("/home/ada/.launcher/cache/models", "/.launcher/models")
    assert folders(cache=False, models=True) == [(models,), (models,)]


def test_a_launcher_folder_that_is_a_link_is_mounted_by_its_real_path() -> None:
    container = planned(job(1), [node(0, output_root="/disk/launcher", machine="m")]).nodes[0].container
    mounts = {mount["Target"]: mount["Source"] for mount in container_request(container)["HostConfig"]["Mounts"]}
    assert mounts["/.launcher/cache"].startswith("/disk/launcher/cache/")


@pytest.mark.parametrize("value", ["1", '"yes"', "maybe"])
def test_only_a_truth_value_is_one(value: str) -> None:
    with pytest.raises(JobInvalid, match="expected true or false"):
        parse_job(f"name: a\nimage: {{ref: x}}\nnodes: [a]\nrun: {{script: a.py}}\ncache: {value}\n", "job.yaml")


@pytest.mark.parametrize("key", ["cache: false", "models: true"])
def test_plain_processes_use_the_users_own(key: str) -> None:
    with pytest.raises(JobInvalid, match="plain processes use your own caches"):
        parse_job(f"name: a\nruntime: process\nnodes: [local]\nrun: {{script: a.py}}\n{key}\n", "job.yaml")


def test_only_its_user_may_enter_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "0123-4567"
    image_cache.make(HERE, str(folder))
    (folder / "kernel").write_text("code")
    image_cache.make(HERE, str(folder))
    assert [stat.S_IMODE(each.stat().st_mode) for each in (folder.parent, folder)] == [0o700, 0o700]
    assert (folder / "kernel").exists()
    image_cache.make(HERE, str(folder.with_name("models")))
    assert image_cache.names(HERE, str(tmp_path)) == ["0123-4567", "models"]
    image_cache.remove(HERE, str(folder))
    assert image_cache.names(HERE, str(tmp_path)) == ["models"]
    image_cache.remove(HERE, str(folder.with_name("models")))
    assert [*tmp_path.iterdir()] == []
    assert image_cache.names(HERE, str(tmp_path)) == []


@pytest.mark.parametrize("link", ["cache", "cache/models"])
def test_a_link_leads_nowhere(tmp_path: Path, link: str) -> None:
    elsewhere = tmp_path / "elsewhere" / "models"
    elsewhere.mkdir(parents=True, mode=0o755)
    (elsewhere / "mine").write_text("kept")
    root = tmp_path / "root"
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(elsewhere.parent if link == "cache" else elsewhere)
    with pytest.raises(NodeUnfit, match="a folder of its path is a link"):
        image_cache.make(HERE, str(root / "cache" / "models"))
    if link == "cache":
        with pytest.raises(NodeUnfit, match="a folder of its path is a link"):
            image_cache.remove(HERE, str(root / "cache" / "models"))
    else:
        image_cache.remove(HERE, str(root / "cache" / "models"))  # the link itself
        assert not (root / link).is_symlink()
    assert (elsewhere / "mine").read_text() == "kept"
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755


def test_the_name_of_any_id_is_one_step_of_a_path() -> None:
    for image, machine in (("sha256:" + "ab" * 32, "0" * 32), ("", ""), ("../x", "../../etc"), ("a/b:1", "Host.name")):
        assert caches.NAME.fullmatch(caches.name(image, machine))


PRINT = "import os; print([os.environ.get(n) for n in os.environ['NAMES'].split()])"
CODE = "TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR CUDA_CACHE_PATH LAUNCHER_CACHE"
MODELS = "HF_HOME TORCH_HOME"


def test_the_libraries_are_pointed_at_what_is_mounted_unless_the_job_has_its_own(box: Box) -> None:
    (box.kit / "cache").mkdir()
    (box.kit / "models").mkdir()
    code, out = box.run(sys.executable, "-c", PRINT, env={"NAMES": f"{CODE} {MODELS}", "TRITON_CACHE_DIR": "/mine"})
    kit = str(box.kit)
    at = ["cache/torchinductor", "", "cache/cuda", "cache", "models/huggingface", "models/torch"]
    assert (code, out.decode().strip()) == (0, str([f"{kit}/{path}" if path else "/mine" for path in at]))


def test_without_them_nothing_changes(box: Box) -> None:
    out = box.run(sys.executable, "-c", PRINT, env={"NAMES": f"{CODE} {MODELS}"})[1].decode().strip()
    home = f"{box.root}/.cache"
    assert out == str([f"{home}/torchinductor", f"{home}/triton", None, None, None, f"{home}/torch"])


def test_a_disk_without_locks_is_said_and_not_used(one: Box) -> None:
    (one.kit / "cache").mkdir()
    tool = one.root / "tools" / "flock"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'No locks available' >&2\nexit 71\n")
    tool.chmod(0o755)
    env = {"NAMES": CODE, "PATH": f"{tool.parent}:{one.env['PATH']}"}
    out = one.run(sys.executable, "-c", PRINT, env=env)[1].decode()
    assert f"nothing is cached for the next run: the disk of {one.kit}/cache has no locks\n" in out
    assert f"{one.kit}/cache/" not in out.splitlines()[-1]
