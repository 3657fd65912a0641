"""`launcher report` as a user calls it."""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.features.report.contents import LINES
from launcher.job.dump import dump_job
from launcher.job.loader import parse_job
from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job
from tests.unit.test_record_fuzz import ID, JOB, call, fuzz, project

__all__ = ["project"]

COMMANDS = [["report", "--offline"], ["report", ID, "--offline", "--json"]]


def contents(folder: Path) -> dict[str, str]:
    """The files of the newest archive in a folder, by name. Its bytes are read as a whole, too."""
    archive = max(folder.glob("launcher-report-*.tar.gz"), key=os.path.getmtime)
    assert archive.stat().st_mode & 0o777 == 0o600
    with tarfile.open(archive) as tar:
        members = {member.name.partition("/")[2]: tar.extractfile(member) for member in tar}
        assert {(member.uname, member.gname, member.uid) for member in tar} == {("", "", 0)}
        return {name: file.read().decode() for name, file in members.items() if file}


def test_a_report_of_a_run_has_its_evidence_without_secrets_and_names(home_cli: Cli, tmp_path: Path) -> None:
    home = tmp_path / "home" / "erika"
    home.mkdir()
    (home_cli.cwd / "secret.txt").write_text("from-a-file-7\n")
    (home_cli.cwd / "secret.txt").chmod(0o600)
    env = {
        "HOME": str(home),
        "USER": "erika",
        "LOGNAME": "erika",
        "SUDO_USER": "trainer",
        "TOKEN": "declared-123",
        "OWN_API_KEY": "undeclared-9",
    }
    cli = Cli(home_cli.cwd, {**home_cli.env, **env})
    program = (
        "echo $TOKEN $FROM_FILE $HF_TOKEN $OWN_API_KEY erika@$(hostname) $HOME $1; seq 1000; echo at 10.1.2.3; exit 3"
    )
    job = cli.job(
        "erika-job",
        runtime="process",
        nodes=["local"],
        run={"command": ["sh", "-c", program, "sh", "--password=in-an-argument"]},
        env={"HF_TOKEN": "in-the-job-5", "WHO": "erika"},
        secrets=["TOKEN", {"FROM_FILE": "secret.txt"}],
    )
    cli("up", job, code=1)

    done = cli("report")
    found = contents(cli.cwd)
    listed = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert listed == [*found]
    assert "nothing was sent; look at it with: tar tzvf launcher-report-user-2-job-" in done.stderr
    assert "erika is user-2" in done.stderr
    kept = "a name that is a word of the launcher, too, is replaced only where it looks like one (login, home): trainer"
    assert f"warning: {kept}\n" in done.stderr
    assert f"Note: {kept}\n" in found["about.txt"]
    everything = "\n".join([*found, *found.values(), *(path.name for path in cli.cwd.glob("launcher-report*"))])
    private = ["erika", "declared-123", "from-a-file-7", "in-the-job-5", "undeclared-9", "in-an-argument", "10.1.2.3"]
    assert [word for word in (*private, str(tmp_path / "home")) if word in everything] == []
    log = found["logs/local.log"].splitlines()
    assert len(log) == LINES
    assert log[-2:] == ["1000", "at address-1"]
    assert json.loads(found["result.json"])["failure"]["exit_code"] == 3
    assert json.loads(found["plan.json"])["nodes"][0]["container"]["env"]["WHO"] == "user-2"
    assert "ok   local        reachable" in found["doctor.txt"]
    assert "torch" in json.loads(found["versions.json"])["packages"]
    assert "secret.txt" in found["files.txt"] or "secret.txt" in found["left_out.json"]
    assert "from-a-file" not in everything


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    secret=st.text(st.sampled_from("abAB01:@.+-_'\"\\ é"), min_size=8, max_size=20).filter(
        lambda text: text == text.strip()
    ),
    user=st.text(st.sampled_from("kqvwxyzäß"), min_size=5, max_size=12),
)
def test_no_secret_and_no_user_is_in_any_file(
    project: Path, monkeypatch: pytest.MonkeyPatch, secret: str, user: str
) -> None:
    """In the job, the plan, the events, the metrics, a log, a path, the name of a file."""
    monkeypatch.setenv("USER", user)
    monkeypatch.setenv("TOKEN", secret)
    root = project / "runs" / ID
    both = f"{user}/{secret} {user}@host x{secret}"
    job = {**yaml.safe_load(JOB), "env": {"A": both}, "secrets": ["TOKEN"]}
    (root / "job.yaml").write_text(dump_job(parse_job(yaml.safe_dump(job), "job.yaml")))
    plan = json.loads((root / "plan.json").read_text())
    plan["nodes"][0]["container"] |= {"env": {"A": both}, "argv": [both, "--x", secret]}
    (root / "plan.json").write_text(json.dumps(plan))
    for name in ("events.jsonl", "metrics.jsonl", "left_out.json"):
        (root / name).write_text(json.dumps({"event": "x", both: [both]}) + "\n")
    shutil.rmtree(root / "logs")
    (root / "logs").mkdir()
    (root / "logs" / f"{user}-{secret}.log").write_text(f"{both}\n{json.dumps(both)}\n")
    assert call("report", ID, "--offline")[0] == 0
    found = contents(project)
    assert [text for text in (*found, *found.values()) if secret in text or user in text.lower()] == []
    assert {"job.yaml", "plan.json", "events.jsonl", "files.txt"} <= found.keys()
    assert "left out: a secret" not in found["about.txt"]


def test_a_run_that_continues_is_read_on_its_nodes(home_cli: Cli) -> None:
    run = {"command": ["sh", "-c", "echo it is alive; exec sleep 1000"]}
    job = home_cli.job(runtime="process", nodes=["local"], run=run)
    home_cli("up", job, "-d")
    home_cli.until_logged("it is alive")
    home_cli("report")
    found = contents(home_cli.cwd)
    assert found["logs/local.log"] == "it is alive\n"
    assert json.loads(found["status.json"])["state"] == "running"
    home_cli("report", "--offline")
    assert not {"status.json", "doctor.txt"} & contents(home_cli.cwd).keys()
    home_cli("down")


def test_without_a_run_it_has_versions_and_why(cli: Cli) -> None:
    assert "no run is recorded in runs/" in cli("report").stderr
    assert [*contents(cli.cwd)] == ["about.txt", "versions.json"]
    assert "no run is recorded" in contents(cli.cwd)["about.txt"]
    cli("report", "nonsense", code=2)


def test_a_node_that_does_not_respond_is_in_the_report(cli: Cli) -> None:
    cli("report", "--nodes", "erika@gpu-a.invalid")
    found = contents(cli.cwd)
    assert "FAIL" in found["doctor.txt"].upper()
    assert "could not resolve host name node-1" in found["doctor.txt"]
    assert not [name for name, text in found.items() if "gpu-a" in text or "erika" in text]


def test_a_report_of_any_record_ends_with_a_message(project: Path) -> None:
    assert fuzz(project, 20, 1, COMMANDS) == 20


@pytest.mark.slow
def test_reports_of_many_records_end_with_a_message(project: Path) -> None:
    assert fuzz(project, 480, 2, COMMANDS) == 480


def test_long_logs_and_many_files_are_cut(project: Path) -> None:
    logs = project / "runs" / ID / "logs"
    (logs / "rank-0.log").write_text("x" * (1 << 20) + "\nend")
    for rank in range(1, 100):
        (logs / f"rank-{rank}.log").write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert call("report", ID, "--offline")[0] == 0
    found = contents(project)
    assert found["logs/rank-0.log"] == "end\n"
    assert len([name for name in found if name.startswith("logs/")]) == 50
    assert found["logs/rank-1.log"].endswith("line 99999\n")
    assert sum(map(len, found.values())) < 1 << 20


def test_an_earlier_archive_is_not_replaced_without_a_word(project: Path) -> None:
    printed = [call("report", ID, "--offline")[1] for _ in range(2)]
    assert [", in place of an earlier one; nothing was sent" in text for text in printed] == [False, True]
    assert len([*project.glob("launcher-report-*")]) == 1


@pytest.mark.timeout(300)
def test_names_and_addresses_of_nodes_are_replaced(bed_cli: Cli, bed: Bed) -> None:
    job = bed_cli.job(**bed_job(run={"command": ["sh", "-c", "hostname; cat /etc/hosts"]}))
    bed_cli("up", job)
    done = bed_cli("report")
    found = contents(bed_cli.cwd)
    plan = json.loads(found["plan.json"])
    assert [node["host"] for node in plan["nodes"]] == ["node-1", "node-2"]
    assert plan["rendezvous"]["address"] == "node-1-address"
    assert "reachable" in found["doctor.txt"]
    assert "Docker" in json.loads(found["versions.json"])["nodes"]["node-1"]["engine"]
    private = [name for node in bed.nodes[:2] for name in (node.alias, node.address)]
    everything = "\n".join([*found, *found.values()])
    assert [word for word in private if re.search(rf"\b{re.escape(word)}\b", everything)] == []
    assert "node1 is node-1" in done.stderr
