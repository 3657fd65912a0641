"""Input of the caller: secrets and variables of any size, a home folder, a locale, hosts. It is used unchanged, or
refused with its location before anything starts.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import ROOT, Cli, bed_job

pytestmark = pytest.mark.timeout(300)

LONGEST = 131072  # MAX_ARG_STRLEN of Linux, with NAME= and the NUL at the end
WHOLE = {"TOKEN": 70_004, "LARGEST": LONGEST - len("LARGEST=") - 1}  # bytes of the values
VALUE = LONGEST - len("BIG=") - 1
RUN = {"command": ["true"]}
DIGEST = 'for value in "$TOKEN" "$LARGEST" "$BIG" "$1"; do printf %s "$value" | sha256sum; done'


def text(size: int) -> str:
    """Return text of this size, without repetitions."""
    return "".join(f"{number} " for number in range(size))[: size - 1] + "."


def digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def process_job(**keys: Any) -> dict[str, Any]:
    return {"runtime": "process", "nodes": ["local"], "code": "code", "run": RUN, **keys}


@pytest.fixture(autouse=True)
def code(cli: Cli) -> Path:
    (cli.cwd / "code").mkdir()
    return cli.cwd / "code"


def secret(cli: Cli, name: str, value: str) -> dict[str, str]:
    (cli.cwd / name).write_text(value)
    (cli.cwd / name).chmod(0o600)
    return {name: name}


def with_home(cli: Cli, home: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher with this HOME; None: without HOME."""
    env = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CONFIG_HOME")}
    env |= {"PYTHONPATH": str(ROOT)} | ({} if home is None else {"HOME": home})
    argv = [sys.executable, "-m", "launcher", *arguments]
    return subprocess.run(argv, cwd=cli.cwd, env=env, capture_output=True, text=True, check=False)


def refused(cli: Cli, job: Path, *sets: str) -> str:
    """Return the error of a job that every command refuses; nothing was started."""
    said = cli("up", job, *sets, code=2).stderr
    assert cli("plan", job, *sets, "--offline", code=2).stderr == said
    assert not cli.runs()
    return " ".join(said.split())


@pytest.mark.parametrize("runtime", ["process", pytest.param("docker", marks=pytest.mark.bed)])
def test_the_largest_values_arrive_byte_for_byte(request: pytest.FixtureRequest, runtime: str) -> None:
    cli: Cli = request.getfixturevalue("home_cli" if runtime == "process" else "bed_cli")
    secrets = [secret(cli, name, text(size) + "\n") for name, size in WHOLE.items()]
    keys = process_job() if runtime == "process" else bed_job(nodes=["node1"])
    keys["code"], keys["run"] = "code", {"command": ["sh", "-c", DIGEST, "sh", text(LONGEST - 1)]}
    done = cli("up", cli.job("large", **{**keys, "secrets": secrets, "env": {"BIG": text(VALUE)}}))
    received = [line.split()[0] for line in done.stdout.splitlines() if line.endswith(" -")]
    assert received == [digest(text(size)) for size in (*WHOLE.values(), VALUE, LONGEST - 1)]
    cli("down")


def test_a_secret_that_does_not_fit_in_a_variable_is_refused(home_cli: Cli) -> None:
    entry = secret(home_cli, "LARGEST", "x" * (WHOLE["LARGEST"] + 1))
    said = refused(home_cli, home_cli.job("large", **process_job(secrets=["HOME", entry])))
    assert "large.yaml:11: secrets.1: LARGEST is too long" in said
    assert "131,073" in said
    assert "131,072" in said


@pytest.mark.ci
@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"env": {"A": "a", "BIG": "x" * (VALUE + 1)}}, "11: env.BIG"),
        ({"env": {"BIG": "ü" * (VALUE // 2 + 1)}}, "10: env.BIG"),
        ({"nodes": [{"host": "local", "env": {"BIG": "x" * (VALUE + 1)}}]}, "6: nodes.0.env.BIG"),
        ({"run": {"command": ["true", "x" * LONGEST]}}, "9: run.command.1"),
        ({"run": {"module": "m", "args": {"a": "x" * LONGEST}}}, "9: run.args.a"),
        ({"run": {"module": "m", "args": {"a": ["b", "x" * LONGEST]}}}, "11: run.args.a.1"),
        ({"sweep": [{"a": 1}, {"a": "x" * LONGEST}]}, "11: sweep.1.a"),
    ],
)
def test_a_value_too_large_for_a_process_is_refused_with_its_line(
    home_cli: Cli, keys: dict[str, Any], where: str
) -> None:
    said = refused(home_cli, home_cli.job("large", **process_job(**keys)))
    assert f"large.yaml:{where}:" in said
    assert "131,073" in said


def test_values_that_are_too_large_together_are_refused(home_cli: Cli) -> None:
    secrets = [secret(home_cli, f"S{number}", "x" * 100_000) for number in range(12)]
    env = {f"E{number}": "x" * 100_000 for number in range(5)}
    said = refused(home_cli, home_cli.job("many", **process_job(env=env, secrets=secrets)))
    assert "many.yaml:15: secrets: " in said
    assert "1,700," in said


@pytest.mark.ci
@pytest.mark.parametrize("home", ["", "relative", "/proc/../proc"])  # without HOME: test_no_name.py
@pytest.mark.parametrize("argv", [["up", "job.yaml"], ["doctor", "job.yaml"]])
def test_an_unusable_home_is_reported(cli: Cli, argv: list[str], home: str) -> None:
    cli.job(**process_job())
    done = with_home(cli, home, *argv)
    said = done.stdout + done.stderr
    assert done.returncode in (2, 3), said
    assert "HOME is " in said
    assert "absolute path" in said
    assert "shell" not in said
    assert sorted(path.name for path in cli.cwd.iterdir()) == ["code", "job.yaml"]


def test_purge_without_a_home_is_refused_with_the_reason(home_cli: Cli) -> None:
    home_cli("up", home_cli.job(**process_job()))
    done = with_home(home_cli, None, "down", "--purge")  # then it is that of the password database
    assert done.returncode == 6, done.stderr
    assert f"it is not below {pwd.getpwuid(os.getuid()).pw_dir}/.launcher" in done.stderr
    assert "HOME is empty or not set; expected an absolute path" in with_home(home_cli, "", "down", "--purge").stderr
    home_cli("down", "--purge")
    assert not list(Path(home_cli.env["HOME"], ".launcher").glob("job-*"))


@pytest.mark.ci
@pytest.mark.parametrize(("key", "home"), [("code", ""), ("secrets", "relative"), ("run", ""), ("code", None)])
def test_a_path_below_an_unusable_home_is_refused_with_its_line(cli: Cli, key: str, home: str | None) -> None:
    path = "~nobody-of-this-name/x" if home is None else "~/x"
    keys = {"code": path, "secrets": [{"TOKEN": path}], "run": {"script": path}}
    job = cli.job(**process_job(**{key: keys[key]}))
    said = refused(Cli(cli.cwd, {**cli.env, "HOME": home or ""} if home is not None else cli.env), job)
    assert ("HOME is " if home is not None else "no user nobody-of-this-name") in said
    assert "job.yaml:" in said


@pytest.mark.ci
@pytest.mark.parametrize("argv", [["up"], ["plan"], ["doctor"], ["shell"], ["image", "ship"]])
def test_a_number_of_nodes_without_a_cluster_is_refused_with_its_line(home_cli: Cli, argv: list[str]) -> None:
    job = home_cli.job("three", nodes=3, code="code", image={"ref": "x"}, run=RUN)
    said = home_cli(*argv, job, code=2).stderr
    assert "three.yaml:2: nodes: " in said
    assert "--on CLUSTER" in said


@pytest.mark.parametrize("before", [None, "name: mine\n"])
def test_init_on_a_full_disk_keeps_the_old_file(cli: Cli, before: str | None) -> None:
    if before:
        (cli.cwd / "job.yaml").write_text(before)
    script = 'ulimit -f 1; exec "$@"'  # 512 bytes
    argv = ["sh", "-c", script, "sh", sys.executable, "-B", "-m", "launcher", "init", *(["--force"] if before else [])]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=cli.cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "job.yaml" in done.stderr
    assert "File too large" in done.stderr
    left = {path.name: path.read_text() for path in cli.cwd.iterdir() if path.is_file()}
    assert left == ({"job.yaml": before} if before else {})


def test_init_replaces_no_device(cli: Cli) -> None:
    os.mkfifo(cli.cwd / "pipe")
    assert "is not a regular file" in cli("init", "pipe", "--force", code=2).stderr
    assert (cli.cwd / "pipe").is_fifo()


LOCALES = [{"LC_ALL": "POSIX", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}]


@pytest.mark.ci
@pytest.mark.parametrize("locale", LOCALES)
def test_unicode_in_a_locale_without_it(home_cli: Cli, locale: dict[str, str]) -> None:
    (home_cli.cwd / "größe").mkdir()
    (home_cli.cwd / "größe" / "words.txt").write_text("wärme\n", encoding="utf-8")
    command = ["sh", "-c", 'cat *.txt; echo "$WORD" "$TOKEN" "$1"; ls', "sh", "grüß"]
    keys = process_job(code="größe", run={"command": command}, env={"WORD": "日本"}, secrets=["TOKEN"])
    home_cli.job("words", **keys).rename(home_cli.cwd / "wörter.yaml")
    cli = Cli(home_cli.cwd, {**home_cli.env, **locale, "TOKEN": "schön"})
    shown = cli("plan", "wörter.yaml").stdout
    done = cli("up", "wörter.yaml")
    if "LC_ALL" in locale:
        assert "WORD=日本" in shown
        assert done.stdout.split() == ["wärme", "日本", "***", "grüß", "words.txt"]
    for argv in (["logs"], ["status"], ["runs"], ["fetch"], ["plan", "wörter.yaml", "--json"]):
        cli(*argv)
    log = cli.runs()[-1] / "logs" / "local.log"
    assert log.read_text(encoding="utf-8").split() == ["wärme", "日本", "******", "grüß", "words.txt"]
    cli("init", "größe.yaml")
    assert (cli.cwd / "größe.yaml").is_file()
    cli("down")


@pytest.mark.bed
@pytest.mark.parametrize(("first", "then"), [("RUN", ["--nodes", "node1,node2"]), ("--all-projects", [])])
def test_down_names_the_nodes_that_were_left_out(bed_cli: Cli, bed: Bed, first: str, then: list[str]) -> None:
    bed_cli("up", "-d", bed_cli.job("two", **bed_job(code="code", run={"command": ["sleep", "600"]})))
    run = bed_cli.runs()[-1].name
    (bed_cli.cwd / "elsewhere").mkdir()
    elsewhere = Cli(bed_cli.cwd / "elsewhere", bed_cli.env)
    partly = elsewhere("down", first.replace("RUN", run), "--nodes", "node2", "--purge", code=6)
    assert f"{run}: 1 of its 2 nodes was not contacted: node1" in partly.stderr
    assert f"launcher down {run} --nodes node1,node2 --purge" in partly.stderr
    assert f"\ndown {run}" not in partly.stderr
    assert "reachable again" not in partly.stderr
    assert bed.docker(bed.nodes[1], "ps", "-aq") == ""
    assert bed.docker(bed.nodes[0], "ps", "-q") != ""
    assert not (elsewhere.runs()[-1] / "result.json").exists()

    whole = elsewhere("down", run, *then)  # without --nodes, by the record that the first command created
    assert f"\ndown {run}" in whole.stderr
    assert bed.wait_clean(bed.nodes[:2]) == []
    assert f"\ndown {run}" in bed_cli("down", run).stderr


def test_a_job_file_in_a_new_folder(cli: Cli) -> None:
    cli("init", "jobs/new/job.yaml")
    assert (cli.cwd / "jobs/new/job.yaml").is_file()
    (cli.cwd / "file").touch()
    assert "file/job.yaml: could not be written" in cli("init", "file/job.yaml", code=3).stderr
