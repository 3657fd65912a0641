"""`up --resume`: every node has what the earlier run's nodes wrote, so no rank starts from nothing beside others."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.bed.bed import Bed
from tests.bed.faults import power_off, power_on
from tests.e2e.cli import Cli, bed_job, small_disk
from tests.e2e.test_process_runtime import process_job

STARTS = re.compile(r"starts at epoch (\d+) with weights (\w+)\nshard of epoch (\d+), (\w+) code, config (\w+)\n")


def job(cli: Cli, **keys: Any) -> Path:
    (cli.cwd / "helper.py").write_text("WORD = 'old'\n")
    (cli.cwd / "config.txt").write_text("sent")
    return cli.job("epochs", run={"command": ["python3", cli.program("epochs.py"), "3"]}, **keys)


def starts(cli: Cli, *nodes: str) -> list[tuple[str, ...]]:
    """For each node of the latest run: epoch, digest of the weights, epoch of its shard, code, config."""
    found = [STARTS.match((cli.runs()[-1] / "logs" / f"{node}.log").read_text()) for node in nodes]
    return [match.groups() for match in found if match]


def resume(cli: Cli, file: Path, first: str, *options: str) -> str:
    return cli("up", file, "--resume", first, "--set", "run.command.2='5'", *options).stderr


def test_all_ranks_resume_from_what_rank_0_wrote_to_its_working_directory(home_cli: Cli) -> None:
    file = job(home_cli, **process_job())
    home_cli("up", file)
    first, outputs = home_cli.runs()[-1], Path(home_cli.env["HOME"], ".launcher")
    (home_cli.cwd / "helper.py").write_text("WORD = 'new'\n")  # as large as the old one
    told = resume(home_cli, file, first.name)
    on_0, on_1 = starts(home_cli, "local-0", "local-1")
    assert on_0 == on_1 == ("3", on_0[1], "3", "new", "changed")
    assert re.search(r"local-0: resumes from .*\bits own 3 files \(2(\.\d)? kB\), the newest ", told), told
    assert re.search(r"local-1: resumes from local-0's 3 files .* and its own rank-1.json \(.*, 1 B\)", told), told
    both = f"the code sent now has files that the program of {first.name} had changed"
    assert f"{both}: config.txt is the run's, unchanged here since\n" in told

    home_cli("fetch", first.name, "--checkpoints")
    shutil.rmtree(outputs / first.name)
    told = resume(home_cli, file, first.name, "--set", "nodes=[local, local, local]")
    assert starts(home_cli, "local-0", "local-1", "local-2") == [on_0, on_0, (*on_0[:2], "0", *on_0[3:])]
    assert "local-2: resumes from this machine's " in told  # copies of local-0's


def test_a_node_without_room_is_refused_before_anything_is_written(home_cli: Cli) -> None:
    file = job(home_cli, **process_job())
    home_cli("up", file)
    first, outputs = home_cli.runs()[-1], Path(home_cli.env["HOME"], ".launcher")
    shutil.rmtree(outputs)
    (first / "checkpoints").mkdir()
    (first / "checkpoints" / "last.pt").write_bytes(bytes(1_000_000))
    with small_disk(outputs):
        refused = home_cli("up", file, "--resume", first.name, code=3).stderr
        assert re.search(r"local-0: the files of \S+ need 1 MB \(1,000,000 bytes\), but \S+ has room for", refused)
        assert list(outputs.glob("*/checkpoints")) == []


@pytest.mark.bed
def test_all_ranks_resume_on_other_machines(bed_cli: Cli, bed: Bed) -> None:
    file = job(bed_cli, **bed_job())
    bed_cli("up", file)
    first = bed_cli.runs()[-1].name
    bed_cli("down")
    told = resume(bed_cli, file, first)
    on_1, on_2 = starts(bed_cli, "node1", "node2")
    assert on_1 == on_2 == ("3", on_1[1], "3", "old", "changed")
    bed.sh(bed.nodes[0], f"cd /home/trainer/.launcher/{first}/workdir/node1 && touch -d tomorrow models/last.json")
    told = resume(bed_cli, file, first)
    assert re.search(r"node2: resumes from node1's 3 files .* models/last.json .* and its own rank-1.json", told)
    assert starts(bed_cli, "node1", "node2") == [on_1, on_1]
    alone = resume(bed_cli, file, first, "--nodes", "node2")
    assert "node2: resumes from node1's 3 files (" in alone
    assert starts(bed_cli, "node2")[0][:2] == on_1[:2]
    bed_cli("down", "--all")


@pytest.mark.bed
def test_what_was_fetched_of_a_resumed_run_is_what_its_nodes_wrote(bed_cli: Cli) -> None:
    """Each rank writes a shard, the second one last, so the first node gets a copy of it at the resume."""
    save = "mkdir -p /output/checkpoints; cd /output/checkpoints; r=$LAUNCHER_NODE_RANK; sleep $r; echo $1 >rank-$r.pt"
    last = "[ $r = 1 ] || echo $1 >last.pt"
    file = bed_cli.job("shards", **bed_job(run={"command": ["sh", "-c", f"{save}; {last}", "sh", "30"]}))
    bed_cli("up", file)
    said = bed_cli("up", file, "--resume", bed_cli.runs()[-1].name, "--set", "run.command.4='200'").stderr
    assert "node1: resumes from node2's checkpoints/rank-1.pt" in said
    assert "the program wrote 3 files to its output folder (12 B)" in said
    bed_cli("fetch", "--checkpoints")
    here = bed_cli.runs()[-1]
    written = {path.name: path.read_text() for path in (here / "checkpoints").iterdir()}
    assert written == dict.fromkeys(["last.pt", "rank-0.pt", "rank-1.pt"], "200\n")
    assert not (here / "output").exists()
    assert "NOT FETCHED" not in bed_cli("down", "--purge").stderr
    bed_cli("down", "--all")


def test_a_failure_that_left_a_checkpoint_says_how_to_continue(home_cli: Cli) -> None:
    save = "mkdir -p $1; echo saved >$1/last.pt; exit 3"
    keys = process_job(nodes=["local"])
    file = home_cli.job("saves", run={"command": ["sh", "-c", save, "sh", "models"]}, **keys).name
    failed = home_cli("up", file, code=1).stderr
    first = home_cli.runs()[-1].name
    folder = Path(home_cli.env["HOME"], ".launcher", first, "workdir", "local")
    shown = rf"continue from models/last.pt \(in {folder} on local, .*, 6 B\): launcher up {file} --resume {first}\n"
    assert re.search(shown, failed), failed
    changed = home_cli("up", file, "--set", "run.command.4=$LAUNCHER_OUTPUT/checkpoints", code=1).stderr
    second = home_cli.runs()[-1].name
    command = f"launcher up runs/{second}/job.yaml --resume {second}"
    assert re.search(rf"continue from \S+ \(.*, 6 B\): {command}\n", changed), changed
    home_cli(*command.split()[1:], code=1)
    downloads = 'python3 -c \'open("model_final.pth", "w"); import nothing_such\''
    for program in ("echo 1 >results.csv; exit 3", downloads):
        (home_cli.cwd / "go.sh").write_text(program)
        nothing = home_cli("up", file, "--set", "run.command=[sh, go.sh]", code=1).stderr
        assert "--resume" not in nothing
    refused = home_cli("up", file, "--resume", first, "--set", "run.command=[sh, -c, exit 2]", code=1).stderr
    assert "continue from" not in refused  # what it has inherited would be refused again
    saved = home_cli(
        "up", file, "--set", "run.command.2=mkdir models; echo saved >models/last.pt; exit 2", code=1
    ).stderr
    assert "continue from models/last.pt" in saved


@pytest.mark.slow
@pytest.mark.bed
@pytest.mark.timeout(300)
def test_a_node_that_restarted_is_named_with_the_command_that_continues(bed_cli: Cli, bed: Bed) -> None:
    # the times of both starts are known to a second
    program = "cd /output; mkdir checkpoints; echo saved >checkpoints/last.pt; sleep 4; echo saved; exec sleep 300"
    file = bed_cli.job("saves", **bed_job(run={"command": ["sh", "-c", program]})).name
    up = bed_cli.start("up", file)
    assert up.stdout is not None
    assert up.stdout.readline() == "saved\n"
    power_off(bed.nodes[1])
    power_on(bed, bed.nodes[1])
    _, told = up.communicate(timeout=200)
    assert up.returncode == 1, told
    run = bed_cli.runs()[-1].name
    assert "failed node2 restarted while the run used it\n" in told, told
    assert re.search(rf"continue from checkpoints/last.pt \(.*\): launcher up {file} --resume {run}\n", told), told


@pytest.mark.ci
def test_a_run_goes_on_from_the_mirror_of_another_one(home_cli: Cli, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    args = {"data": "synthetic:32", "arch": "cifar_resnet20", "image_size": 8, "batch_size": 4, "workers": 1}
    args |= {"device": "cpu", "threads": 1, "epochs": 1, "mirror": url}
    file = home_cli.job("mirrored", **process_job(nodes=["local"], run={"module": "train", "args": args}))
    home_cli("up", file, timeout=280)
    shutil.rmtree(Path(home_cli.env["HOME"], ".launcher"))  # the machine is gone
    said = home_cli("up", file, "--resume", url, "--set", "run.args.epochs=2", timeout=280).stdout
    assert re.search(rf"resumed last.pt of {url}/epoch-0001-\S+ at epoch 2, step 0", said), said
    assert len(list((tmp_path / "mirror").iterdir())) == 3  # two checkpoints and latest.json


def test_a_url_is_for_the_trainer_and_for_one_run(home_cli: Cli) -> None:
    file = home_cli.job("own", **process_job(nodes=["local"], run={"command": ["true"]}))
    assert "only the launcher's trainer reads" in home_cli("up", file, "--resume", "s3://b/run", code=2).stderr
    run = {"module": "train", "args": {"data": "synthetic"}}
    file = home_cli.job("own", **process_job(nodes=["local"], run=run, sweep=[{"lr": 1}, {"lr": 2}]))
    assert "the job is a sweep" in home_cli("up", file, "--resume", "s3://b/run", code=2).stderr
    assert home_cli.runs() == []
