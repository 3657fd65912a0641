"""The day of a program's results, wherever it saves: named at the end, kept, resumed from, fetched, purged."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job
from tests.e2e.test_process_runtime import process_job

PLACES = {  # of saves.py, and where fetch puts them
    "hugging face": "checkpoint-500/trainer_state.json",
    "lightning": "lightning_logs/version_0/checkpoints/last.ckpt",
    "the root": "results.csv",
    "checkpoints": "checkpoints/last.pt",
    "beside the code": "workdir/local/models/last.pt",
}


def job(cli: Cli, epochs: int, then: str = "true") -> Path:
    program = f"python3 {cli.program('saves.py')} {epochs}; {then}"
    return cli.job("saves", **process_job(nodes=["local"], run={"command": ["sh", "-c", program]}))


def outputs(cli: Cli) -> list[str]:
    return sorted(path.name for path in Path(cli.env["HOME"], ".launcher").iterdir())


def test_a_run_without_containers_is_not_found_elsewhere_but_its_files_are_named(home_cli: Cli, tmp_path: Path) -> None:
    home_cli("up", job(home_cli, 1))
    run = home_cli.runs()[-1].name
    home_cli("down")
    (tmp_path / "elsewhere").mkdir()
    elsewhere = dataclasses.replace(home_cli, cwd=tmp_path / "elsewhere")
    said = " ".join(elsewhere("fetch", run, "--nodes", "local", "--checkpoints", code=2).stderr.split())
    folder = Path(home_cli.env["HOME"], ".launcher", run)
    assert f"its files are in {folder} on local" in said
    assert f"or by hand: cp -r {folder} ." in said
    other = f"{run[:-4]}0000"
    assert "no runs on local" in elsewhere("fetch", other, "--nodes", "local", code=2).stderr


@pytest.mark.parametrize("code", [0, 1])
def test_what_is_saved_anywhere_is_named_kept_resumed_from_and_fetched(home_cli: Cli, code: int) -> None:
    ended = home_cli("up", job(home_cli, 2, f"exit {code}"), code=code).stderr
    first = home_cli.runs()[-1].name
    assert "the program wrote 5 files to its output folder and its working directory (5 B): " in ended
    assert "; launcher fetch --checkpoints brings them" in ended
    assert ("continue from " in ended) == (code == 1)

    assert (kept := home_cli("down", "--purge").stderr).count("NOT FETCHED: 5 files, 5 B, such as ") == 1
    assert f"launcher fetch {first} --checkpoints; to delete them: launcher down {first} --purge --unfetched" in kept
    assert "NOT FETCHED: 5 files, 5 B, such as " in home_cli("clean", "--yes").stdout
    (removed,) = json.loads(home_cli("down", "--purge", "--json").stdout)
    (folder,) = removed["nodes"][0]["kept"]
    assert (folder["what"].rpartition("/")[2], len(folder["unfetched"])) == (first, 5)

    resumed = home_cli("up", job(home_cli, 4), "--resume", first)
    assert [line for line in resumed.stdout.splitlines() if line.endswith("from epoch 2")] == [
        f"{place} from epoch 2" for place in PLACES
    ]
    assert "local: resumes from its own 5 files (5 B)" in resumed.stderr

    home_cli("fetch", first, "--checkpoints")
    assert [(home_cli.cwd / "runs" / first / path).read_text() for path in PLACES.values()] == ["2"] * 5
    assert "kept" not in home_cli("down", first, "--purge").stderr
    assert first not in outputs(home_cli)
    shutil.rmtree(Path(home_cli.env["HOME"], ".launcher"))
    again = home_cli("up", job(home_cli, 3), "--resume", first)
    assert again.stdout.count("from epoch 2") == 5, "from the copies here"
    assert "local: resumes from this machine's 5 files (5 B)" in again.stderr


def test_what_was_fetched_to_another_place_is_purged_there(home_cli: Cli, tmp_path: Path) -> None:
    file = job(home_cli, 2)
    home_cli("up", file)
    first = home_cli.runs()[-1].name
    home_cli("fetch", first, tmp_path / "results", "--checkpoints")
    assert (tmp_path / "results" / PLACES["hugging face"]).read_text() == "2"
    home_cli("down", first, "--purge")
    assert outputs(home_cli) == []

    home_cli("up", file)
    elsewhere = Cli(tmp_path, home_cli.env)
    second = home_cli.runs()[-1].name
    elsewhere("fetch", "--nodes", "local", "--checkpoints")
    assert (tmp_path / "runs" / second / PLACES["the root"]).read_text() == "2"
    assert not (tmp_path / "runs" / second / "workdir" / "local" / "saves.py").exists()
    elsewhere("down", second, "--nodes", "local", "--purge")
    assert outputs(home_cli) == []

    home_cli("up", file)
    home_cli("down", "--purge", "--unfetched")
    assert outputs(home_cli) == []


def test_a_purged_run_is_not_fetched_and_that_is_said(home_cli: Cli, tmp_path: Path) -> None:
    home_cli("up", job(home_cli, 1))
    run = home_cli.runs()[-1].name
    home_cli("fetch", run, tmp_path / "copies", "--checkpoints")
    home_cli("down", run, "--purge")
    home_cli("down", run, "--purge")
    how = r"on local was deleted by \S+@\S+ on \d\d \w+ at \d\d:\d\d \(launcher down --purge\)"
    for to in ([], [tmp_path / "nothing"]):
        said = home_cli("fetch", run, *to, "--checkpoints").stdout
        assert re.search(rf"{run}: its output folder \S+/{run} {how}; what was fetched before is in ", said), said
        assert said.endswith(f" runs/{run}/, {tmp_path}/copies/\n")
    refused = home_cli("up", job(home_cli, 1), "--resume", run, code=3).stderr
    assert f"`launcher fetch` has copied files of it to {tmp_path}/copies: copy them" in refused
    shutil.rmtree(home_cli.cwd / "runs" / run / "logs")
    (home_cli.cwd / "runs" / run / "events.jsonl").unlink()
    assert "was deleted on the node, or from another folder\n" in home_cli("fetch", run).stdout


def test_what_resumes_from_a_run_that_goes_on_says_so(home_cli: Cli, tmp_path: Path) -> None:
    file = job(home_cli, 1, "sleep 600")
    home_cli("up", "-d", file)
    home_cli.until_logged("the root")
    first = home_cli.runs()[-1].name
    what = f"warning: {first} is still running on local: what it writes from now on is not in the new run"
    stop = f"to stop it first: launcher down {first}"
    assert f"{what}; {stop}\n" in home_cli("up", job(home_cli, 1), "--resume", first).stderr
    elsewhere, third = (Cli(tmp_path / name, home_cli.env) for name in ("elsewhere", "third"))
    elsewhere.cwd.mkdir()
    third.cwd.mkdir()
    assert f"{what}; {stop} --nodes local\n" in elsewhere("up", job(elsewhere, 1), "--resume", first).stderr
    refused = elsewhere("up", file, "--resume", "nothing-such", code=2).stderr
    assert "or give its whole ID: launcher runs --nodes a,b" in refused
    kept = elsewhere("down", first, "--nodes", "local", "--purge").stderr
    assert "is kept: NOT FETCHED: 5 files, 5 B, such as " in kept  # and not the code that was sent
    assert "omit --nodes: it is recorded here" in elsewhere("status", first, "--nodes", "local", code=2).stderr
    elsewhere("down", first, "--purge", "--unfetched")
    unknown = third("up", job(third, 1), "--resume", first, code=3).stderr
    assert "on which nodes it ran is not known here" in unknown


def test_the_quiet_program_is_purged_without_a_question(home_cli: Cli) -> None:
    home_cli("up", home_cli.job("quiet", **process_job(nodes=["local"], run={"command": ["seq", "3"]})))
    assert "kept" not in home_cli("down", "--purge").stderr
    assert outputs(home_cli) == []


def epochs(cli: Cli, number: int) -> Path:
    """A program that goes on from checkpoints/last.txt and config.txt in its working directory, and changes both."""
    program = (
        'mkdir -p models; read e <$0 || e=0; read c <config.txt; echo "from $e, config $c"; echo $1 >$0; echo x >$0.log'
    )
    (cli.cwd / "checkpoints").mkdir(exist_ok=True)
    command = ["sh", "-c", program + "; echo $1 >config.txt", "checkpoints/last.txt", str(number)]
    return cli.job("epochs", **process_job(nodes=["local"], run={"command": command}))


def test_a_run_resumes_from_its_file_and_not_from_an_older_one_that_is_sent_again(home_cli: Cli) -> None:
    file, config, last = epochs(home_cli, 7), home_cli.cwd / "config.txt", home_cli.cwd / "checkpoints" / "last.txt"
    config.write_text("mine\n")
    last.write_text("2\n")
    started = home_cli("up", file)
    assert started.stdout == "from 2, config mine\n"
    assert "with checkpoints/last.txt, from which a program may start\n" in started.stderr
    run = home_cli.runs()[-1].name
    both = f"the code sent now has files that the program of {run} had changed"

    resumed = home_cli("up", epochs(home_cli, 9), "--resume", run)
    assert resumed.stdout == "from 7, config 7\n"
    assert f"{both}: checkpoints/last.txt, config.txt are the run's, unchanged here since\n" in resumed.stderr
    second = home_cli.runs()[-1].name

    config.write_text("edited\n")
    again = home_cli("up", epochs(home_cli, 11), "--resume", second)
    assert again.stdout == "from 9, config edited\n"
    which = "checkpoints/last.txt is the run's, unchanged here since; config.txt is yours, changed here since\n"
    assert which in again.stderr

    last.write_text("3\n")  # of all that the run has, nothing is left to bring
    mine = home_cli("up", epochs(home_cli, 11), "--resume", second)
    assert mine.stdout == "from 3, config edited\n"
    assert "checkpoints/last.txt, config.txt are yours, changed here since\n" in mine.stderr

    last.write_text("2\n")
    (home_cli.cwd / "runs" / second / "code.tar.gz").unlink()
    unknown = home_cli("up", epochs(home_cli, 11), "--resume", second)
    assert unknown.stdout == "from 2, config edited\n"
    assert f"are yours, as the code that was sent to {second} is not recorded here\n" in unknown.stderr


@pytest.mark.bed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("code", [0, 1])
def test_a_container_with_files_of_its_own_is_kept_until_they_are_fetched(bed_cli: Cli, bed: Bed, code: int) -> None:
    save = "mkdir -p /tmp/ckpt ~/ckpt ~/.cache; head -c 2000000 /dev/zero | tee /tmp/ckpt/model.pth >~/.cache/hub"
    program = f"{save}; head -c 1000000 /dev/zero >~/ckpt/model.pth; exit {code}"
    file = bed_cli.job("layer", **bed_job(nodes=["node1"], run={"command": ["sh", "-c", program]}))
    ended = bed_cli("up", file, code=code).stderr
    run, node = bed_cli.runs()[-1], bed.nodes[0]
    container = f"launcher-{run.name}-0"
    names = "/tmp/ckpt/model.pth, /.launcher/home/ckpt/model.pth"
    assert (
        f"2 files, 3 MB, outside the output folder: {names}: they go with the container, which is kept until" in ended
    )
    for command in ("down", "clean --yes", "down --purge"):
        said = bed_cli(*command.split())
        assert f"container {container} is kept: NOT FETCHED: 2 files, 3 MB, such as /tmp/ckpt/model.pth" in (
            said.stdout + said.stderr
        )
        assert bed.docker(node, "ps", "-a", "--format", "{{.Names}}").split() == [container]  # and no lock
    bed_cli("fetch", "--checkpoints")
    copies = {str(path.relative_to(run)): path.stat().st_size for path in run.glob("container/**/*.pth")}
    assert copies == {
        "container/node1/tmp/ckpt/model.pth": 2_000_000,
        "container/node1/.launcher/home/ckpt/model.pth": 1_000_000,
    }
    assert "kept" not in bed_cli("down").stderr
    assert bed.docker(node, "ps", "-aq") == ""
    bed_cli("up", file, code=code)
    bed_cli("down", "--unfetched")
    assert bed.docker(node, "ps", "-aq") == ""


def test_what_a_run_had_inherited_is_not_newer_than_what_it_wrote(home_cli: Cli) -> None:
    """Rank 0 saves for all; every rank also writes a file of the same name, rank 1 last."""
    program = """
        read e <last || e=0; echo "from $e"; r=$LAUNCHER_NODE_RANK
        [ $r = 1 ] || echo $1 >last; [ $r = 0 ] || until [ -e ../local-0/shard-$1 ]; do sleep 0.05; done
        echo $r >shard; touch shard-$1
    """
    file = home_cli.job("chain", **process_job(run={"command": ["sh", "-c", program, "sh", "2"]}))
    home_cli("up", file)
    for epoch in (4, 6):
        run = home_cli.runs()[-1].name
        said = home_cli("up", file, "--resume", run, "--set", f"run.command.4='{epoch}'").stderr
        assert "the program wrote 5 files to its working directory" in said
        for node in ("local-0", "local-1"):
            assert (home_cli.runs()[-1] / "logs" / f"{node}.log").read_text() == f"from {epoch - 2}\n"


@pytest.mark.parametrize("command", ["down", "fetch"])
def test_the_end_of_a_run_that_nobody_followed_is_recorded_with_its_cause(home_cli: Cli, command: str) -> None:
    program = ["sh", "-c", "echo the learning rate is negative; exit 5"]
    home_cli("up", "-d", home_cli.job("alone", **process_job(nodes=["local"], run={"command": program})))
    while json.loads(home_cli("status", "--json").stdout)["state"] != "failed":
        pass
    home_cli(command)
    result = home_cli.result()
    assert (result["state"], result["failure"]["exit_code"]) == ("failed", 5)
    assert "the learning rate is negative" in result["failure"]["words"]
    home_cli("down")
    later = home_cli("logs", code=1)
    assert later.stdout == "the learning rate is negative\n"
    assert later.stderr.splitlines()[-1] == "failed local exited with code 5"


def test_what_down_could_not_download_of_a_run_that_nobody_followed_is_said_once(home_cli: Cli) -> None:
    program = ["sh", "-c", "ln -s /etc/hostname $LAUNCHER_OUTPUT/metrics.jsonl; echo over"]
    home_cli("up", "-d", home_cli.job("links", **process_job(nodes=["local"], run={"command": program})))
    while json.loads(home_cli("status", "--json").stdout)["state"] != "done":
        pass
    said = home_cli("down").stderr
    assert said.count("metrics.jsonl is a link: ignored") == 1, said
    assert home_cli.result()["state"] == "done"
    assert (home_cli.runs()[-1] / "logs" / "local.log").read_text() == "over\n"


def test_the_victim_of_a_node_whose_container_is_gone_is_not_named(home_cli: Cli, tmp_path: Path) -> None:
    """It was removed while nobody followed the run, whose nodes are then found by the containers that they have."""
    error = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    script = f"until [ -e '{tmp_path}/go' ]; do sleep 0.1; done; echo '{error} [127.0.0.1]:12345' >&2; exit 1"
    home_cli(
        "up", "-d", home_cli.job("cut", **process_job(nodes=["local", "local"], run={"command": ["sh", "-c", script]}))
    )
    run = home_cli.runs()[-1].name
    shutil.rmtree(Path(home_cli.env["HOME"], ".launcher", run, ".node", "local-1"))
    (tmp_path / "go").touch()
    while json.loads(home_cli("status", "--json").stdout)["state"] in ("running", "created"):
        pass
    home_cli("down", "--all", "--nodes", "local")
    result = home_cli.result()
    assert (result["state"], result["exit_code"], result["failure"]) == ("failed", 1, None)


def test_a_run_is_not_called_done_by_those_of_its_nodes_that_are_left(home_cli: Cli, tmp_path: Path) -> None:
    """From another folder, which knows the nodes by the containers that they have."""
    nodes = process_job(nodes=["local", "local"], run={"command": ["true"]})
    home_cli("up", "-d", home_cli.job("halved", **nodes))
    while json.loads(home_cli("status", "--json").stdout)["state"] != "done":
        pass
    run = home_cli.runs()[-1].name
    shutil.rmtree(Path(home_cli.env["HOME"], ".launcher", run, ".node", "local-0"))
    (tmp_path / "elsewhere").mkdir()
    elsewhere = dataclasses.replace(home_cli, cwd=tmp_path / "elsewhere")
    assert json.loads(elsewhere("status", run, "--json", "--nodes", "local").stdout)["state"] == "lost"
    ended = elsewhere("logs", run, "--nodes", "local", code=3).stderr
    assert f"lost {run}: local has no container of the run any more" in ended
    elsewhere("down", run, "--nodes", "local")
    assert elsewhere.result()["state"] != "done"
