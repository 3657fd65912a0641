"""A login machine that requires a key and a second factor: a real sshd with PAM, and simulated keyboard input."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from launcher.features.slurm.login import LoginMachine, log_in
from launcher.node.parallel import run_all
from tests.bed.shell import run
from tests.e2e.cli import Cli
from tests.e2e.terminal import Person
from tests.slurm.bed import SlurmBed
from tests.slurm.test_on_slurm import TICKS, job, until

pytestmark = pytest.mark.timeout(240)
SECRET = "open sesame"
SERVICE = Path("/etc/pam.d/launcher-sshd")  # PAM uses the name of sshd's program
ON = ("--on", "asks")


@dataclass(frozen=True)
class Gate:
    """That sshd. `folder` contains its files."""

    folder: Path
    port: int
    client: str  # its Host section of an ssh config

    @property
    def asked(self) -> int:
        """How often it has prompted for the second factor."""
        file = self.folder / "asked"
        return len(file.read_text()) if file.exists() else 0

    def connections(self) -> list[int]:
        """The processes of open connections."""
        pid = int((self.folder / "sshd.pid").read_text())
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def gate(slurm: SlurmBed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    folder = tmp_path_factory.mktemp("gate")
    program, check = folder / "launcher-sshd", folder / "check"
    program.symlink_to("/usr/sbin/sshd")
    check.write_text(f"#!/bin/sh\nprintf x >>{folder}/asked\n[ \"$(tr -d '\\0')\" = '{SECRET}' ]\n")
    check.chmod(0o755)
    rights = [f"auth required pam_exec.so quiet expose_authtok {check}"]
    rights += [f"{kind} required pam_permit.so" for kind in ("auth", "account", "session")]
    SERVICE.write_text("\n".join([*rights, ""]))
    there = dict(line.split(None, 1) for line in slurm.ssh_config.read_text().splitlines())
    port = int(there["Port"]) - 1
    server = {"Port": port, "ListenAddress": "127.0.0.1", "HostKey": slurm.folder / "host_key", "UsePAM": "yes"}
    server |= {"PidFile": folder / "sshd.pid", "AuthorizedKeysFile": slurm.folder / "key.pub", "StrictModes": "no"}
    server |= {"AuthenticationMethods": "publickey,keyboard-interactive", "KbdInteractiveAuthentication": "yes"}
    server |= {"PermitRootLogin": "yes", "SetEnv": slurm.for_logins}
    (folder / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in server.items()))
    known = f"[127.0.0.1]:{port} {(slurm.folder / 'host_key.pub').read_text()}"
    (folder / "known_hosts").write_text(known)
    client = {**there, "Port": port, "UserKnownHostsFile": folder / "known_hosts", "NumberOfPasswordPrompts": 1}
    run([str(program), "-f", str(folder / "sshd_config")])
    try:
        yield Gate(folder, port, "".join(f"{k} {v}\n" for k, v in ({**client, "Host": "gate"}).items()))
    finally:
        os.kill(int((folder / "sshd.pid").read_text()), signal.SIGTERM)
        SERVICE.unlink()


@pytest.fixture
def behind(cli: Cli, gate: Gate, tmp_path: Path) -> Cli:
    """The launcher of a user whose cluster `asks` is behind that sshd, on a machine without Slurm."""
    settings = Path(cli.env["XDG_CONFIG_HOME"], "launcher", "settings.yaml")
    known = yaml.safe_load(settings.read_text())
    known["clusters"]["asks"] = {**known["clusters"]["hpc"], "login": "gate"}
    settings.write_text(yaml.safe_dump(known))
    config = tmp_path / "ssh_config"
    config.write_text(gate.client)
    env = {name: value for name, value in cli.env.items() if name != "SLURM_CONF"}
    (gate.folder / "asked").unlink(missing_ok=True)
    return Cli(cli.cwd, {**env, "LAUNCHER_SSH_CONFIG": str(config)})


def enter(cli: Cli, *args: object) -> Person:
    """Start a command and enter the second factor; before that, it may only say which run it is about."""
    person = Person(cli, *args)
    asked = person.sees(r"(\(root@127.0.0.1\) )?Password: ")
    before = [line for line in asked.string[: asked.start()].splitlines() if "the latest run is" not in line]
    assert not "".join(before).strip(), "there was output before the prompt"
    person.type(f"{SECRET}\r")
    return person


def test_the_second_factor_is_requested_once_and_before_any_output(gate: Gate, behind: Cli) -> None:
    person = enter(behind, "up", job(behind, "echo hello from $LAUNCHER_NODE"), *ON)
    person.sees("hello from node-0")
    assert person.end() == 0, person.seen
    assert gate.asked == 1
    assert behind.result()["state"] == "done"
    until(lambda: not gate.connections(), "a connection stays", 5)


def test_a_mistake_in_the_job_is_told_before_the_prompt(gate: Gate, behind: Cli) -> None:
    run = {"command": ["true"]}
    file = behind.job(runtime="process", nodes=1, gpus="none", run=run, secrets=[{"TOKEN": "no-such-file"}])
    assert "no-such-file" in behind("up", file, *ON, code=2).stderr
    assert gate.asked == 0


def test_a_sweep_prompts_once(gate: Gate, behind: Cli) -> None:
    file = behind.job(
        runtime="process", nodes=1, gpus="none", run={"command": ["echo", "word"]}, sweep=[["one"], ["two"]]
    )
    person = enter(behind, "up", file, *ON)
    person.sees("word two", timeout=120)
    assert person.end() == 0, person.seen
    assert gate.asked == 1


def test_a_wrong_answer_is_an_error_with_a_fix(gate: Gate, behind: Cli) -> None:
    person = Person(behind, "runs", *ON)
    person.sees(r"Password: ")
    person.type("wrong\r")
    person.sees(r"gate: ssh could not log in")
    person.sees(r"ssh -F .*ssh_config\s+gate\s+true")
    assert person.end() == 3
    assert not gate.connections()


def test_without_a_terminal_it_is_an_error(behind: Cli) -> None:
    assert "gate: ssh could not log in" in behind("runs", *ON, code=3).stderr


def test_ctrl_c_reaches_the_launcher_and_not_its_connection(slurm: SlurmBed, gate: Gate, behind: Cli) -> None:
    person = enter(behind, "up", job(behind, TICKS), *ON)
    person.sees("tick 2")
    person.type("\x03")
    person.sees("Ctrl-C again")
    person.type("\x03")
    person.sees("stopped; only the output folders remain")
    assert person.end() == 5, person.seen
    assert not slurm.jobs()
    until(lambda: not gate.connections(), "a connection stays", 5)


def test_a_lost_connection_ends_the_command_with_a_hint_to_resume(slurm: SlurmBed, gate: Gate, behind: Cli) -> None:
    person = enter(behind, "up", job(behind, TICKS), *ON)
    person.sees("tick 2")
    for process in gate.connections():
        os.kill(process, signal.SIGKILL)
    name = behind.runs()[-1].name
    person.sees(rf"launcher logs {name}")
    assert person.end() == 3
    assert " RUNNING " in slurm.jobs()[0]
    assert gate.asked == 1
    again = enter(behind, "logs")
    again.sees("tick 3")
    again.type("\x03")
    assert again.end() == 0, again.seen
    assert enter(behind, "down").end() == 0
    assert not slurm.jobs()


def test_a_killed_launcher_leaves_no_connection_and_runs_does_not_prompt(
    slurm: SlurmBed, gate: Gate, behind: Cli
) -> None:
    person = enter(behind, "up", job(behind, TICKS), *ON)
    person.sees("tick 1")
    person.kill()
    until(lambda: not gate.connections(), "a connection stays", 40)
    person = Person(behind, "runs")
    person.sees("unreachable")
    assert person.end() == 0
    assert gate.asked == 1
    slurm("scancel", slurm.jobs()[0].split()[0])
    until(lambda: not slurm.jobs(), "it is not cancelled")


def test_an_open_connection_of_the_user_is_used_and_stays_open(gate: Gate, behind: Cli, tmp_path: Path) -> None:
    config, answer = Path(behind.env["LAUNCHER_SSH_CONFIG"]), tmp_path / "answer"
    config.write_text(f"{gate.client}ControlPath {tmp_path}/own\n")
    answer.write_text(f"#!/bin/sh\necho '{SECRET}'\n")
    answer.chmod(0o755)
    ssh, env = ["ssh", "-F", str(config)], {**os.environ, "SSH_ASKPASS": str(answer), "SSH_ASKPASS_REQUIRE": "force"}
    subprocess.run([*ssh, "-fNM", "gate"], env=env, check=True, stderr=subprocess.DEVNULL)
    try:
        assert "hello" in behind("up", job(behind, "echo hello"), *ON).stdout
        done = behind("exec", "--", "true", code=3)
        assert "its container is not running" in done.stderr
        assert gate.asked == 1
        subprocess.run([*ssh, "-O", "check", "gate"], check=True, stderr=subprocess.DEVNULL)
    finally:
        subprocess.run([*ssh, "-O", "exit", "gate"], check=True, stderr=subprocess.DEVNULL)


def test_many_commands_and_followers_stay_within_the_limit_of_sshd(slurm: SlurmBed) -> None:
    """With a key alone, and the default MaxSessions, 10."""
    machine = LoginMachine("hpc", log_in("login", str(slurm.ssh_config), 10))
    streams = [machine.open(["cat"], lasting=True) for _ in range(4)]
    done = run_all([lambda: machine.run(["sh", "-c", 'sleep 0.2; printf %s "$0"', "it's\na b"]) for _ in range(30)])
    assert {(one.code, one.out) for one in done} == {(0, b"it's\na b")}
    for stream in streams:
        stream.close()
