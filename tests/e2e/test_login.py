"""Faults of sshd and the login shell of a node: reported with a fix, or harmless."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator

import pytest

from launcher.node.facts import collect
from launcher.node.ssh.connection import SshPool
from launcher.node.ssh.machine import SshMachine
from tests.bed import faults
from tests.bed.bed import Bed, Node
from tests.e2e.cli import Cli, bed_job
from tests.e2e.test_doctor import examined

pytestmark = [pytest.mark.bed, pytest.mark.timeout(120)]

SPECIAL = [
    "two words",
    "it's",
    "a\\b",
    "a\\\\b",
    "end\\",
    "\\'",
    "a\nb",
    "hey!you !!",
    '$HOME `x` "q"',
    "*?[a]{b}~",
    "",
]


@contextlib.contextmanager
def bashrc(bed: Bed, node: Node, line: str) -> Iterator[None]:
    bed.sh(node, f"echo '{line}' > /home/trainer/.bashrc")
    try:
        yield
    finally:
        bed.sh(node, "rm /home/trainer/.bashrc")


# fault of the node's login: how to cause it, part of the message, part of the fix
BROKEN = {
    "bashrc": (bashrc, "echo Welcome, $USER", "adds 'Welcome, trainer'", "~/.bashrc"),
    "nologin": (faults.login_shell, "/usr/sbin/nologin", "'This account is currently not available.'", "login shell"),
    "sftp": (faults.sshd_setting, "ForceCommand internal-sftp", "'This service allows sftp", "ForceCommand"),
    "silent": (faults.sshd_setting, "ForceCommand /bin/false", "'' (exit code 1)", "ForceCommand"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_login_that_breaks_commands_is_reported_with_its_cause(bed_cli: Cli, bed: Bed, case: str) -> None:
    fault, argument, message, fix = BROKEN[case]
    bed_cli.program("plain.py")
    with fault(bed, bed.nodes[0], argument):
        seen = examined(bed_cli, "node1", code=3)["node1", "login shell"]
        failed = bed_cli("up", bed_cli.job("spoilt", **bed_job(run={"script": "plain.py"})), code=3).stderr
    assert message in seen["what"]
    assert fix in seen["fix"]
    assert message in failed
    assert fix in failed
    assert not bed_cli.runs()


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_every_login_shell_runs_commands_the_same_way(bed: Bed, shell: str) -> None:
    with faults.login_shell(bed, bed.nodes[0], shell), contextlib.closing(SshPool(str(bed.ssh_config))) as pool:
        node = SshMachine("a", "node1", pool)
        for text in SPECIAL:
            assert node.run(["printf", "%s|", text, "."]).out == f"{text}|.|".encode(), text
        assert collect(node, "node1").complete


def test_doctor_tests_connections_even_if_sshd_forbids_forwarding(bed_cli: Cli, bed: Bed) -> None:
    bed_cli.program("plain.py")
    job = bed_cli.job("closed", **bed_job(run={"script": "plain.py"}))
    with contextlib.ExitStack() as closed:
        for node in bed.nodes[:2]:
            closed.enter_context(faults.sshd_setting(bed, node, "AllowTcpForwarding no"))
        network = examined(bed_cli, job, code=0)["node2", "network"]
        assert (network["level"], network["what"].split()[0]) == ("ok", "node1"), network
        assert json.loads(bed_cli("plan", job, "--json").stdout)["rendezvous"]["probed"]


def test_a_run_works_with_few_sessions_and_other_login_shells_and_doctor_warns(bed_cli: Cli, bed: Bed) -> None:
    one, two = bed.nodes[:2]
    job = bed_cli.job("odd", **bed_job(run={"command": ["echo", "works"]}))
    with (
        faults.login_shell(bed, one, "tcsh"),
        faults.login_shell(bed, two, "fish"),
        faults.sshd_setting(bed, one, "MaxSessions 2"),
    ):
        seen = examined(bed_cli, "node1", "node2", code=0)
        assert seen["node1", "ssh sessions"]["level"] == "warn"
        assert "2 concurrent sessions" in seen["node1", "ssh sessions"]["what"]
        assert ("node2", "ssh sessions") not in seen
        assert bed_cli("up", job).stdout == "works\n"
    assert bed_cli.result()["state"] == "done"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("exec sh", "its login shell starts another shell that reads the input of our commands"),
        ("read x", "its login shell reads the input of our commands"),
    ],
)
def test_a_login_shell_that_consumes_the_input_of_commands_is_reported_soon(
    bed_cli: Cli, bed: Bed, line: str, message: str
) -> None:
    bed_cli.program("plain.py")
    job = bed_cli.job("eaten", **bed_job(run={"script": "plain.py"}))
    with bashrc(bed, bed.nodes[0], line):
        for command in ("doctor", "up", "status"):
            began = time.monotonic()
            arguments = ("--nodes", "node1") if command == "status" else (job,)
            seen = bed_cli(command, *arguments, code=3)
            assert time.monotonic() - began < 20
            said = " ".join((seen.stdout + seen.stderr).split())
            assert message in said
            assert "~/.bashrc" in said
            assert "overloaded" not in said
