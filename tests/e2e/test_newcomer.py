"""A new user's first run, from an installed wheel and an empty folder: the job that `launcher init` writes trains."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from launcher.cli.init import Example
from tests.bed.bed import Bed
from tests.e2e.cli import ROOT, Cli, bed_job
from tests.e2e.newcomer import bare, installed, newcomer, settings, wheel
from tests.ports import free_port

__all__ = ["bare", "installed", "wheel"]

pytestmark = pytest.mark.xdist_group("newcomer")  # the wheel and the environment are made once
PROCESS = settings(runtime="process", nodes="[local]", port=str(free_port()))


@pytest.mark.ci
def test_the_wheel_has_every_file_of_its_packages(wheel: Path) -> None:
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "launcher").rglob("*.*")}
    bundled = [path for name in ("train", "images") for path in (ROOT / name).rglob("*.*")]
    bundled += [ROOT / name for name in ("images/Dockerfile", "docs/agents.md", *Example.quickstart.files)]
    there |= {f"launcher/bundled/{path.relative_to(ROOT).as_posix()}" for path in bundled}
    listed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert listed == {name for name in there if "__pycache__" not in name}


@pytest.mark.ci
def test_folders_of_the_user_are_not_hidden_by_the_wheel(installed: Path, tmp_path: Path) -> None:
    """Without __init__.py, a package of the same name anywhere on the path would come first."""
    for name in ("train", "images"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__main__.py").write_text(f"print('my own {name}')\n")
        shown = subprocess.run([installed, "-m", name], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert shown.stdout == f"my own {name}\n"
    helped = [installed, "-m", "launcher.trainer", "--help"]
    assert "--arch" in subprocess.run(helped, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    helped = [installed, "-m", "launcher", "image", "list", "--help"]
    subprocess.run(helped, cwd=tmp_path, capture_output=True, check=True)


@pytest.mark.ci
def test_the_example_runs_from_an_empty_folder(installed: Path, home_cli: Cli) -> None:
    cli = Cli(home_cli.cwd, {**home_cli.env, "PYTHONPATH": ""}, (str(installed.with_name("launcher")),))
    said = cli("init", "--example", "quickstart").stdout
    assert said.endswith("to run it: launcher up jobs/quickstart.yaml\n")
    done = cli("up", "jobs/quickstart.yaml", "--set", "run.args.epochs=1", "--set", f"port={free_port()}")
    assert "Epoch: [1] val" in done.stdout
    assert "already exists" in cli("init", "--example", "quickstart", code=2).stderr
    assert "omit job.yaml" in cli("init", "job.yaml", "--example", "quickstart", code=2).stderr
    assert "# For coding assistants" in cli("init", "--skill").stdout


@pytest.mark.ci
def test_the_job_that_init_writes_trains_in_processes(installed: Path, home_cli: Cli) -> None:
    cli = newcomer(installed, home_cli.cwd, home_cli.env)
    done = cli("up", "job.yaml", *PROCESS)
    assert "using the launcher's trainer" in done.stderr
    assert "Epoch: [1] val" in done.stdout
    run = cli.runs()[-1].name
    code = Path(cli.env["HOME"], ".launcher", run, "workdir", "local")
    assert (code / "train" / "data" / "roi.c").read_bytes() == (ROOT / "train" / "data" / "roi.c").read_bytes()
    planned = json.loads((cli.runs()[-1] / "plan.json").read_text())
    digest, trainer = planned["code"].split(" with train ")
    assert {node["container"]["labels"]["launcher.code"] for node in planned["nodes"]} == {planned["code"]}
    shown = cli("plan", "job.yaml", *PROCESS, "--offline").stdout
    assert f"code {digest} with train {trainer}" in shown
    # the source tree of the wheel gives the same
    assert f"with train {trainer}" in home_cli("plan", "job.yaml", *PROCESS, "--offline").stdout


@pytest.mark.bed
@pytest.mark.timeout(400)
def test_the_job_that_init_writes_trains_in_containers(installed: Path, bed_cli: Cli, bed: Bed) -> None:
    cli, keys = newcomer(installed, bed_cli.cwd, bed_cli.env), bed_job()
    given = {key: json.dumps(keys[key]) for key in ("image", "mounts", "env")}
    done = cli("up", "job.yaml", *settings(**given), "--nodes", "node1,node2", timeout=300)
    assert "Epoch: [1] val" in done.stdout
    assert cli.result()["state"] == "done"


@pytest.mark.ci
@pytest.mark.parametrize("command", [("up",), ("plan", "--offline"), ("export", "--to", "slurm")])
def test_without_the_trainer_installed_the_job_is_refused_with_its_line(
    command: tuple[str, ...], home_cli: Cli, tmp_path: Path
) -> None:
    for name in ("launcher", "images"):
        shutil.copytree(ROOT / name, tmp_path / "partly" / name, ignore=shutil.ignore_patterns("__pycache__"))
    cli = Cli(home_cli.cwd, {**home_cli.env, "PYTHONPATH": str(tmp_path / "partly")})
    cli("init")
    refused = cli(command[0], "job.yaml", *command[1:], *PROCESS, code=2)
    line = (cli.cwd / "job.yaml").read_text().splitlines().index("  module: train") + 1
    assert f"job.yaml:{line}: run.module" in refused.stderr
    assert "the launcher's trainer is not installed" in refused.stderr
    assert not cli.runs()


@pytest.mark.ci
def test_an_exported_script_comes_with_the_command_that_adds_the_trainer(
    installed: Path, bare: Path, home_cli: Cli
) -> None:
    """After this command the code folder contains everything that the script runs."""
    cli = newcomer(installed, home_cli.cwd, home_cli.env)
    done = cli("export", "job.yaml", *PROCESS, "--to", "slurm")
    (copy,) = (line.partition("manually: ")[2] for line in done.stderr.splitlines() if "manually: " in line)
    subprocess.run(["sh", "-c", copy], check=True)
    assert "manually" not in cli("export", "job.yaml", *PROCESS, "--to", "slurm").stderr
    helped = [str(bare), "-m", "train", "--help"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run(helped, cwd=cli.cwd, env=environment, capture_output=True, text=True, check=True)
    assert "--arch" in shown.stdout
