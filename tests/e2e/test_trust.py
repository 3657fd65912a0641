"""Permissions: users who share nodes and their docker group; forged labels and records.

docs/internals/security.md has a table that refers to these tests.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job

pytestmark = pytest.mark.timeout(300)

RUN = "theirs-20260101-000000-aaaa"
HOME = "/home/trainer"
NEIGHBOUR = """
id neighbour >/dev/null 2>&1 || useradd -m -s /bin/bash -u 1003 -p '*' -G docker neighbour
install -d -m 700 -o neighbour -g neighbour /home/neighbour/.ssh
install -m 600 -o neighbour -g neighbour /etc/bed/authorized_keys /home/neighbour/.ssh/authorized_keys
"""
LABELS = {
    "launcher.run": RUN,
    "launcher.job": "theirs",
    "launcher.node": "node1",
    "launcher.host": "node1",
    "launcher.node_rank": "0",
    "launcher.ranks": "0+1",
    "launcher.nodes": "node1",
    "launcher.gpus": "",
    "launcher.output": f"{HOME}/.launcher/{RUN}",
    "launcher.owner": "ada@laptop",
    "launcher.uid": "1001",
    "launcher.created": "1769860800",
    "launcher.runtime": "docker",
    "launcher.purpose": "run",
}


@pytest.fixture
def neighbour(bed_cli: Cli, bed: Bed, tmp_path: Path) -> Cli:
    """The launcher of a second user, who is in the docker group of every node, in a separate empty project."""
    for node in bed.nodes:
        bed.sh(node, NEIGHBOUR)
    config = tmp_path / "ssh_config"
    config.write_text("Host node1 node2\n    User neighbour\n" + bed.ssh_config.read_text())
    project = tmp_path / "neighbour"
    project.mkdir()
    return Cli(project, {**bed_cli.env, "LAUNCHER_SSH_CONFIG": str(config), "LOGNAME": "neighbour"})


@pytest.fixture
def home_cli(cli: Cli, tmp_path: Path) -> Iterator[Cli]:
    """The launcher with a temporary home folder, for plain processes."""
    (tmp_path / "home").mkdir()
    local = Cli(cli.cwd, {**cli.env, "HOME": str(tmp_path / "home")})
    yield local
    local("down", "--all", code=None)


def container(bed: Bed, **changes: str | None) -> str:
    """Create a container on node1 with the launcher's labels, changed (None: removed), and return its name."""
    labels = LABELS | {f"launcher.{name}": value for name, value in changes.items()}
    options = [word for name, value in labels.items() if value is not None for word in ("--label", f"{name}={value}")]
    return bed.docker(bed.nodes[0], "run", "-d", "--init", *options, "launcher-bed-train", "sleep", "600")


def running(bed: Bed) -> int:
    return len(bed.docker(bed.nodes[0], "ps", "-q").split())


def sleeper(**keys: Any) -> dict[str, Any]:
    return bed_job(**{"nodes": ["node1"], "run": {"command": ["sh", "-c", "echo begun; sleep 600"]}, **keys})


@pytest.mark.bed
def test_another_users_run_is_shown_but_not_stopped_or_purged_unasked(bed_cli: Cli, neighbour: Cli, bed: Bed) -> None:
    bed_cli("up", "-d", bed_cli.job("mine", **sleeper()))
    run = bed_cli.runs()[-1].name
    output = f"{HOME}/.launcher/{run}"

    (row,) = json.loads(neighbour("runs", "--nodes", "node1", "--json").stdout)
    assert (row["run"], row["state"], row["started_by"].partition(" ")[2]) == (run, "running", "(uid 1001)")
    assert row["started_by"] in neighbour("runs", "--nodes", "node1").stdout
    seen = neighbour("status", "--nodes", "node1")
    assert "running" in seen.stdout
    assert "Permission denied" in seen.stdout
    assert f"{run} belongs to another user, {row['started_by']}" in seen.stderr
    refused = neighbour("fetch", "--nodes", "node1", code=3)
    assert "Permission denied" in refused.stderr
    refused = neighbour("logs", "--no-follow", "--nodes", "node1", code=3)
    assert "Permission denied" in refused.stderr

    for arguments in ([], [run], ["mine"], [run, "--purge"]):
        refused = neighbour("down", *arguments, "--nodes", "node1", code=2)
        assert "another user" in refused.stderr
        assert "--any-owner" in refused.stderr
    left = neighbour("down", "--all", "--nodes", "node1").stderr
    assert f"skipped: {run}" in left
    neighbour("clean", "--yes", "--nodes", "node1")
    assert running(bed) == 1

    kept = neighbour("down", run, "--any-owner", "--purge", "--nodes", "node1", code=6)
    assert output in kept.stderr
    assert bed.wait_clean() == []
    bed.sh(bed.nodes[0], f"test -d {output}")
    kept = bed_cli("clean", "--yes", "--nodes", "node1").stdout  # nobody could download the log
    assert re.search(f"{output} .*NOT FETCHED: 1 file, 6 B, such as logs/node1.log", kept)
    bed_cli("clean", "--yes", "--unfetched", "--nodes", "node1")
    bed.sh(bed.nodes[0], f"test ! -e {output}")


@pytest.mark.bed
@pytest.mark.slow
def test_following_another_users_run_stops_nothing(bed_cli: Cli, neighbour: Cli, bed: Bed) -> None:
    """The owner's launcher would stop the peer of the failed rank after 3 s."""
    command = ["sh", "-c", 'if [ "$RANK" = 1 ]; then sleep 8; exit 3; fi; sleep 600']
    bed_cli("up", "-d", bed_cli.job("mine", **bed_job(run={"command": command})))
    follower = neighbour.start("logs", "--nodes", "node1,node2")
    while bed.docker(bed.nodes[1], "ps", "-q"):
        time.sleep(0.5)
    time.sleep(8)
    assert running(bed) == 1
    follower.send_signal(signal.SIGINT)
    _, stderr = follower.communicate(timeout=30)
    assert "another user" in stderr
    assert "Traceback" not in stderr
    bed_cli("down")


@pytest.mark.ci
def test_a_run_of_another_caller_with_the_same_account_is_stopped_only_if_named(home_cli: Cli) -> None:
    keys = {"runtime": "process", "nodes": ["local"], "run": {"command": ["sleep", "600"]}}
    home_cli("up", "-d", home_cli.job("mine", **keys))
    (run,) = [path.name for path in home_cli.runs()]
    other = Cli(home_cli.cwd, {**home_cli.env, "LOGNAME": "other"})
    for nodes in ([], ["--nodes", "local"]):
        refused = other("down", *nodes, code=2)
        assert f"launcher down {run}" in refused.stderr
        assert f"skipped: {run}" in other("down", "--all", *nodes).stderr
    assert json.loads(other("status", "--json").stdout)["state"] == "running"
    assert "(stopped)" in other("down", run).stderr


@pytest.mark.bed
def test_labels_that_are_not_the_launchers_block_nothing_and_are_no_paths(bed_cli: Cli, bed: Bed) -> None:
    evil = f"{HOME}/evil"
    bed.sh(bed.nodes[0], f"mkdir -p {evil}/tensorboard && echo evil >{evil}/tensorboard/__init__.py", user="trainer")
    outside = bed_cli.cwd / "elsewhere"
    foreign = [
        container(bed, run=str(outside), output=evil),
        container(bed, run="../elsewhere", output=evil),
        container(bed, run="..", output=evil),
        container(bed, output=evil),
        container(bed, output=f"{evil}/../.launcher/{RUN}"),
        container(bed, node="../../elsewhere"),
        container(bed, ranks="0+999999999999", created="soon"),
        container(bed, ranks=None, node=None),
    ]
    before = {path.name for path in bed_cli.cwd.iterdir()}
    assert json.loads(bed_cli("runs", "--nodes", "node1", "--json").stdout) == []
    noted = bed_cli("fetch", "--nodes", "node1", code=2).stderr
    assert "no runs" in noted
    assert all(f"container {name[:12]}" in noted or "invalid labels" in noted for name in foreign)

    bed_cli("up", "-d", bed_cli.job("mine", **sleeper()))
    run = bed_cli.runs()[-1].name
    assert [row["run"] for row in json.loads(bed_cli("runs", "--nodes", "node1", "--json").stdout)] == [run]
    bed_cli("fetch", "--nodes", "node1")
    assert json.loads(bed_cli("status", "--nodes", "node1", "--json").stdout)["run"] == run
    bed_cli("down", "--all", "--purge", "--nodes", "node1")
    assert {path.name for path in bed_cli.cwd.iterdir()} - before == {"runs", "mine.yaml"}
    assert [path.name for path in (bed_cli.cwd / "runs").iterdir()] == [run]
    assert running(bed) == len(foreign)
    assert bed.sh(bed.nodes[0], f"cat {evil}/tensorboard/__init__.py").strip() == "evil"


@pytest.mark.bed
def test_a_folder_that_a_label_names_is_not_purged(bed_cli: Cli, bed: Bed) -> None:
    """A folder named like a run's in another location; one without the run's marker; a link to another run's folder."""
    elsewhere = f"{HOME}/precious/.launcher/{RUN}"
    bed.sh(bed.nodes[0], f"mkdir -p {elsewhere} && echo 1 >{elsewhere}/model.pt", user="trainer")
    container(bed, output=elsewhere)
    kept = bed_cli("down", RUN, "--purge", "--unfetched", "--nodes", "node1", code=6)
    assert f"could not remove {elsewhere}: it is not below {HOME}/.launcher" in kept.stderr
    assert bed.docker(bed.nodes[0], "ps", "-aq") == ""
    for make in (f"mkdir -p .launcher/{RUN}", f"ln -s {elsewhere} .launcher/{RUN}"):
        own = f"cd {HOME} && mkdir -p .launcher && rm -rf .launcher/{RUN} && {make} && echo 1 >.launcher/{RUN}/model.pt"
        bed.sh(bed.nodes[0], own, user="trainer")
        container(bed)
        assert "could not remove" in bed_cli("down", RUN, "--purge", "--unfetched", "--nodes", "node1", code=6).stderr
        bed_cli("clean", "--yes", "--nodes", "node1")
        bed.sh(bed.nodes[0], f"test -s {HOME}/.launcher/{RUN}/model.pt && test -s {elsewhere}/model.pt")


@pytest.mark.ci
def test_a_record_that_was_edited_removes_no_other_folder(home_cli: Cli) -> None:
    keys = {"runtime": "process", "nodes": ["local"], "run": {"command": ["true"]}}
    home_cli("up", home_cli.job("mine", **keys))
    record = home_cli.runs()[-1] / "plan.json"
    plan = json.loads(record.read_text())
    container = plan["nodes"][0]["container"]
    own, home = Path(container["output_dir"]), Path(home_cli.env["HOME"])
    other_run = home / ".launcher/mine-20260101-000000-aaaa"
    for other in (home / "precious", other_run, home / ".launcher", home):
        other.mkdir(exist_ok=True)
        (other / "model.pt").write_text("1")
        container["output_dir"] = str(other)
        record.write_text(json.dumps(plan))
        assert "no runs" in home_cli("down", "--purge", code=2).stderr
        assert (other / "model.pt").exists()
    home_cli("down", "--all", "--purge")
    container["output_dir"] = str(own)
    record.write_text(json.dumps(plan))
    home_cli("down", "--purge")
    assert not own.exists()
    assert other_run.exists()
