"""What a program writes to its working directory, as most scripts do: kept with the output, named, and fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job

NAMED = "the program wrote {files} files to its working directory ({size} kB): checkpoints/last.pt, "
BRINGS = "; launcher fetch --checkpoints brings them"


def job(cli: Cli, code: int, **keys: Any) -> Path:
    (cli.cwd / "helper.py").write_text("WORD = 'code'\n")
    (cli.cwd / "config.yaml").write_text("lr: 1\n")
    return cli.job("writes", restarts=1, run={"command": ["python3", cli.program("writes.py"), code]}, **keys)


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("code", [0, 3])
def test_on_plain_processes_nothing_is_lost(home_cli: Cli, code: int) -> None:
    done = home_cli("up", job(home_cli, code, runtime="process", nodes=["local", "local"]), code=min(code, 1))
    assert "found its checkpoint" in done.stdout
    run = home_cli.runs()[-1]
    assert NAMED.format(files=6, size="14") in done.stderr
    assert BRINGS in done.stderr
    if code == 0:
        assert f"logs and curves in runs/{run.name}/" in done.stderr
    wrote = {"checkpoints/last.pt", "config.yaml", "runs/mine/events.out.tfevents.1.host"}
    for node in ("local-0", "local-1"):
        assert (run / f"tensorboard/workdir/{node}/runs/mine/events.out.tfevents.1.host").is_file()
    assert not (run / "workdir").exists()
    down = home_cli("down").stderr
    assert BRINGS in down
    for node in ("local-0", "local-1"):
        assert tree(Path(home_cli.env["HOME"], ".launcher", run.name, "workdir", node)) == wrote
    assert BRINGS in home_cli("fetch").stderr
    assert BRINGS not in home_cli("fetch", "--checkpoints").stderr
    for node in ("local-0", "local-1"):
        assert (run / "workdir" / node / "checkpoints/last.pt").read_text() == node * 1000
        assert tree(run / "workdir" / node) == {"checkpoints/last.pt", "config.yaml"}
    home_cli("up", home_cli.job("later", runtime="process", nodes=["local"], run={"command": ["true"]}))
    (run / "workdir/local-0/config.yaml").unlink()
    assert f"launcher fetch {run.name} --checkpoints brings them" in home_cli("down", run.name).stderr
    assert "wrote" not in home_cli("down", "--purge", "--unfetched", "--all").stderr
    assert list(Path(home_cli.env["HOME"], ".launcher").iterdir()) == []


def test_a_program_that_writes_nothing_leaves_nothing_and_has_no_curves(home_cli: Cli) -> None:
    job = home_cli.job("quiet", runtime="process", nodes=["local"], run={"command": ["true"]})
    done = home_cli("up", job).stderr
    run = home_cli.runs()[-1].name
    assert f"done {run}; logs in runs/{run}/" in done
    assert "wrote" not in done + home_cli("down").stderr
    assert not Path(home_cli.env["HOME"], ".launcher", run, "workdir").exists()


def test_without_a_record_of_the_code_nothing_is_removed(home_cli: Cli) -> None:
    job = home_cli.job("elsewhere", runtime="process", nodes=["local"], run={"command": ["true"]})
    home_cli("up", job)
    run = home_cli.runs()[-1]
    (run / "code.tar.gz").unlink()
    down = home_cli("down", "--nodes", "local").stderr
    assert f"the working directories were kept as they are: runs/{run.name}/code.tar.gz is missing" in down
    assert Path(home_cli.env["HOME"], ".launcher", run.name, "workdir/local/elsewhere.yaml").exists()


@pytest.mark.bed
@pytest.mark.timeout(300)
def test_in_a_container_nothing_is_lost(bed_cli: Cli, bed: Bed, tmp_path: Path) -> None:
    """Its failure removes the container. A data set and the output are mounted below the code, where nothing is."""
    mounts = {"/opt/venv": "/opt/venv:ro", "/etc/ssh": "/workspace/code/data/ssh:ro"}
    failed = bed_cli("up", job(bed_cli, 3, **bed_job(mounts=mounts, output="/workspace/code/out")), code=1)
    assert "found its checkpoint" in failed.stdout
    assert NAMED.format(files=6, size="10") in failed.stderr
    run = bed_cli.runs()[-1]
    bed_cli("fetch", "--checkpoints")
    for node, alias in zip(bed.nodes, ("node1", "node2"), strict=False):
        assert bed.docker(node, "ps", "-aq") == ""
        workdir = f"/home/trainer/.launcher/{run.name}/workdir/{alias}"
        left = bed.sh(node, f"cd {workdir} && find . ! -user trainer -o -type f")
        expected = {"./checkpoints/last.pt", "./config.yaml", "./runs/mine/events.out.tfevents.1.host"}
        assert set(left.split()) == expected
        assert (run / "workdir" / alias / "checkpoints/last.pt").read_text() == alias * 1000
        assert (run / f"tensorboard/workdir/{alias}/runs/mine/events.out.tfevents.1.host").is_file()


@pytest.mark.bed
@pytest.mark.timeout(200)
def test_a_program_in_a_container_may_write_beside_its_code(bed_cli: Cli, bed: Bed) -> None:
    write = "mkdir ../data && echo here >../data/set && cat ../data/set && stat -c '%U %a' .. ."
    keys = bed_job(nodes=["node1"], run={"command": ["sh", "-c", write]})
    assert bed_cli("up", bed_cli.job("beside", **keys)).stdout.splitlines()[0] == "here"
    bed_cli("down")


@pytest.mark.bed
@pytest.mark.timeout(200)
def test_the_plan_names_an_images_own_files_that_the_code_hides(bed_cli: Cli, bed: Bed) -> None:
    node = bed.nodes[0]
    add = "mkdir -p /workspace/code && touch /workspace/code/own.py"
    bed.sh(node, f"docker run --name own launcher-bed-train sh -c '{add}'")
    bed.sh(node, "docker commit own launcher-bed-own && docker rm own")
    mounts = {"/opt/venv": "/opt/venv:ro", "/etc/ssh": "/workspace/code/data/ssh:ro"}
    keys = bed_job(nodes=["node1"], image={"ref": "launcher-bed-own"}, run={"command": ["true"]}, mounts=mounts)
    try:
        shown = bed_cli("plan", bed_cli.job("own", **keys)).stdout
    finally:
        bed.sh(node, "docker rmi -f launcher-bed-own")
    assert "the job's code at /workspace/code hides the image's own files there: own.py\n" in shown
