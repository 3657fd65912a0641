"""`launcher exec` and `launcher shell`: a real terminal in a real container; nothing is left when the launcher dies."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import ROOT, Cli, bed_job
from tests.e2e.terminal import Person

BED = [pytest.mark.bed, pytest.mark.timeout(300), pytest.mark.xdist_group("exec")]


def start(cli: Cli, name: str, **keys: object) -> Path:
    """Start a long run in the background; return its job file."""
    cli.program("ticks.py")
    job = cli.job(name, **bed_job(run={"command": ["python3", "ticks.py", "6000"]}, **keys))
    cli("up", "-d", job)
    return job


@pytest.fixture(scope="module")
def running(bed: Bed, caches: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """With a run, which the last tests stop."""
    bed.sweep()
    folder = tmp_path_factory.mktemp("running")
    own = {"XDG_CACHE_HOME": str(caches), "COLUMNS": "200", "TOKEN_OF_MINE": "hush-hush"}
    cli = Cli(folder, {**own, "LAUNCHER_SSH_CONFIG": str(bed.ssh_config)})
    start(cli, "enter", secrets=["TOKEN_OF_MINE"])
    yield cli
    cli("down", code=None)


def pipe(cli: Cli, text: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run the launcher in a pipeline."""
    import os

    return subprocess.run(
        [sys.executable, "-m", "launcher", *map(str, args)],
        cwd=cli.cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **cli.env},
        input=text,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def page(port: int) -> str:
    """Return the page served at this port, waiting until it is available."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
                return str(answer.read(), "utf-8")
        except OSError:  # not listening yet, here or on the node
            assert time.monotonic() < deadline
            time.sleep(0.1)


class TestOnTheBed:
    pytestmark = BED

    def test_exec_has_the_jobs_variables_pipes_and_the_exit_code(self, running: Cli) -> None:
        script = 'echo "$TOKEN_OF_MINE $LAUNCHER_NODE $PWD $(id -u)"; test -w "$HOME" && cat; echo oops >&2; exit 7'
        done = pipe(running, "from a pipe\n", "exec", "--", "sh", "-c", script)
        assert done.stdout == "hush-hush node1 /workspace/code 1001\nfrom a pipe\n"
        assert (done.stderr.splitlines()[-1], done.returncode) == ("oops", 7)
        other = pipe(
            running, "", "exec", "enter", "--node", "node2", "--", "sh", "-c", "echo $LAUNCHER_NODE 'a  b' \"$0\""
        )
        assert other.stdout == "node2 a  b sh\n"
        unknown = running("exec", "--node", "node7", "--", "true", code=2)
        assert "the run's nodes are node1, node2" in unknown.stderr
        missing = pipe(running, "", "exec", "--", "no-such-program")
        assert missing.returncode == 127
        assert "no-such-program" in missing.stderr

    def test_a_terminal_resizes_passes_ctrl_c_and_returns_the_exit_code(self, running: Cli) -> None:
        person = Person(running, "exec", "--", "bash", "--norc")
        person.sees(r"\$ ")
        person.type("stty size\r")
        person.sees(r"30 100")
        person.resize(120, 40)
        person.type("until stty size | grep 40; do sleep 0.1; done\r")
        person.sees(r"40 120")
        person.type("sleep 1000\r")
        person.sees("sleep 1000")
        time.sleep(0.5)
        person.type("\x03")  # interrupts the sleep, but not the shell or the launcher
        person.sees(r"\^C")
        person.type("echo code $?; exit 9\r")
        person.sees(r"code 130")
        assert person.end() == 9

    def test_ctrl_c_without_a_terminal_reaches_the_program(self, running: Cli) -> None:
        script = "trap 'echo caught; exit 5' INT; echo ready; while :; do sleep 0.1; done"
        process = running.start("exec", "--", "sh", "-c", script)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert (out, process.returncode) == ("caught\n", 5), err

    @pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipes"])
    def test_a_killed_launcher_leaves_no_command_behind(self, running: Cli, bed: Bed, terminal: bool) -> None:
        command = ("exec", "--", "sh", "-c", "echo ready; exec sleep 54321")
        if terminal:
            person = Person(running, *command)
            person.sees("ready")
            assert "sleep 54321" in str(bed.leftovers(bed.nodes[0]).processes)
            person.kill()
        else:
            process = running.start(*command)
            assert process.stdout is not None
            process.stdout.readline()
            process.kill()
            process.communicate()
        started = time.monotonic()
        while "sleep 54321" in str(bed.leftovers(bed.nodes[0]).processes):
            assert time.monotonic() - started < 60
        print(f"removed {time.monotonic() - started:.1f} s after its launcher was killed")

    def test_a_port_of_a_node_is_forwarded_while_the_command_runs(self, running: Cli) -> None:
        server = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8123, bind='127.0.0.1')"
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            busy = pipe(running, "", "exec", "-L", f"{port}:8123", "--", "echo", "not run")
            assert (busy.returncode, busy.stdout) == (2, "")
            assert f"cannot listen on port {port}" in busy.stderr
        process = running.start("exec", "--node", "node2", "-L", f"{port}:8123", "--", "python3", "-c", server)
        try:
            assert "ticks.py" in page(port)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))

    def test_shell_runs_next_to_the_job_and_leaves_nothing(self, running: Cli, bed: Bed) -> None:
        job = running.cwd / "enter.yaml"
        commands = "pwd; ls; echo $TOKEN_OF_MINE; python3 -c 'import torch; print(torch.ones(2).sum())'; exit 3\n"
        done = pipe(running, commands, "shell", job, "--node", "node1")
        assert done.returncode == 3, done.stderr
        assert done.stdout.split("\n")[0] == "/workspace/code"
        assert {"ticks.py", "hush-hush", "tensor(2.)"} <= set(done.stdout.splitlines())
        seen = json.loads(running("status", "--json").stdout)
        assert seen["run"].startswith("enter-")
        assert seen["state"] == "running"
        assert [r["run"] for r in json.loads(running("runs", "--nodes", "node1", "--json").stdout)] == [seen["run"]]
        running("down")
        assert bed.wait_clean() == []
        kept = pipe(running, "echo work > /output/own\n", "shell", job)
        assert "1 file kept in" in kept.stderr
        assert bed.sh(bed.nodes[0], "cat /home/trainer/.launcher/*/own").strip() == "work"

    def test_exec_without_a_running_container_is_an_error(self, running: Cli) -> None:
        running("down")
        refused = running("exec", "--", "true", code=3)
        assert "its container is not running" in refused.stderr
        assert "launcher shell" in refused.stderr

    def test_a_killed_shell_removes_its_container(self, running: Cli, bed: Bed) -> None:
        running("down")
        person = Person(running, "shell", running.cwd / "enter.yaml")
        person.sees(r"[$#] ")
        assert len(bed.leftovers(bed.nodes[0]).containers) == 1
        person.kill()
        started = time.monotonic()
        assert bed.wait_clean() == []
        print(f"removed {time.monotonic() - started:.1f} s after its launcher was killed")


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_exec_and_shell_work_for_plain_processes(cli: Cli, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    own = Cli(cli.cwd, {**cli.env, "HOME": str(home), "PS1": "$ "})  # the prompt is inherited
    own.program("ticks.py")
    run = {"command": ["python3", "ticks.py", "3000"]}
    job = own.job("plain", runtime="process", nodes=["local", "local"], run=run, budget="1h")
    own("up", "-d", job)
    try:
        done = pipe(own, "", "exec", "--node", "local-1", "--", "sh", "-c", "echo $LAUNCHER_NODE; pwd; exit 6")
        assert done.returncode == 6, done.stderr
        assert done.stdout.split()[0] == "local-1"
        assert done.stdout.split()[1].endswith("/workdir/local-1")
        ranked = pipe(
            own, "", "exec", "--rank", "1", "-L", "8888", "--", "sh", "-c", "echo $RANK $WORLD_SIZE $LAUNCHER_NODE"
        )
        assert ranked.stdout == "1 2 local-1\n"
        assert "port not forwarded: the node is this machine; open 127.0.0.1:8888" in ranked.stderr
        assert "ranks 0 to 1" in own("exec", "--rank", "2", "--", "true", code=2).stderr
        person = Person(own, "exec", "--", "sh")
        person.sees(r"[$#] ")
        person.type("sleep 1000\r")
        time.sleep(0.5)
        person.type("\x03")
        person.type("echo co''de; exit 4\r")
        person.sees("code")
        assert person.end() == 4
        shell = pipe(own, "ls\necho mine >notes\necho ${LAUNCHER_BUDGET-unlimited}\nexit 2\n", "shell", job)
        assert (shell.stdout.split(), shell.returncode) == (["plain.yaml", "ticks.py", "unlimited"], 2)
        (kept,) = re.findall(r"1 file kept in (\S+) on local-0", shell.stderr)
        assert [path.name for path in Path(kept, "workdir", "local-0").iterdir()] == ["notes"]
        assert f"; to copy: cp -r {kept} ." in shell.stderr
    finally:
        own("down")
    assert not list((home / ".launcher").glob("*/.node"))


@pytest.mark.bed
@pytest.mark.timeout(300)
def test_shell_uses_the_image_that_the_lock_file_pins(bed_cli: Cli) -> None:
    job = bed_cli.job("pinned", **bed_job(image={"base": "launcher-bed-train"}, run={"command": ["true"]}))
    job.with_suffix(".lock.json").write_text("{}")
    refused = pipe(bed_cli, "", "shell", job)
    assert refused.returncode == 2, refused.stderr
    assert "pinned.lock.json" in refused.stderr
