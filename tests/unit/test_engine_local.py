"""The engine of this machine: its socket, or the one that Docker's context selects."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import launcher
from launcher.api.history import recorded_runs, runs_on
from launcher.errors import EngineAbsent, EngineForbidden, EngineUnavailable, RunUnknown
from launcher.model.progress import silent
from launcher.node.docker.channel import DialFailed, dial_local
from launcher.node.docker.client import DockerClient
from launcher.records.store import NodeOfRun, Record
from launcher.run.end.stop import remaining, remaining_on


def test_no_engine_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(FileNotFoundError):
        dial_local("a")


@pytest.mark.parametrize(
    ("socket", "fix"),
    [
        ("/no/such/docker.sock", "`docker context ls` and DOCKER_HOST name the engine that is asked"),
        ("/run/user/4711/docker.sock", "systemctl --user start docker"),
    ],
)
def test_which_engine_is_to_be_started_is_said_only_if_it_is_known(
    socket: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{socket}")
    with pytest.raises(EngineUnavailable) as failed:
        DockerClient("a", "me", lambda: dial_local("a")).ping()
    assert f"unix://{socket}" in failed.value.what
    assert failed.value.next_step.removeprefix("on the node: ").startswith(fix)


def test_the_engine_of_another_machine_is_not_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "ssh://gpu-b")
    with pytest.raises(EngineUnavailable, match="name the node gpu-b instead"):
        dial_local("a")


@pytest.fixture
def docker_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces `docker` on this machine by a shell script, for a context other than the default."""
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("DOCKER_CONTEXT", "other")

    def be(script: str) -> None:
        path = tmp_path / "bin" / "docker"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(path.parent), prepend=":")

    return be


HEAR = "while read -r line && [ ${#line} -gt 1 ]; do :; done\n"
DIAL = '[ "$*" = "system dial-stdio" ] || exit 9\n'


@pytest.mark.parametrize("how", ["DOCKER_CONTEXT", "settings", "DOCKER_HOST"])
def test_docker_resolves_another_context(
    how: str, tmp_path: Path, docker_here: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    docker_here(
        f"{DIAL}echo x >>{tmp_path}/calls\n{HEAR}"
        "printf 'HTTP/1.1 200 OK\\r\\nApi-Version: 1.41\\r\\nContent-Length: 2\\r\\n\\r\\nOK'\n"
        f"{HEAR}printf 'HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n[]'; read -r rest"
    )
    monkeypatch.delenv("DOCKER_CONTEXT")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    if how == "settings":
        (tmp_path / "config.json").write_text('{"currentContext": "desktop"}')
    else:
        monkeypatch.setenv(how, "tcp://10.1.2.3:2376" if how == "DOCKER_HOST" else "desktop")
    client = DockerClient("a", "me", lambda: dial_local("a"))
    assert client.ask("list", lambda api: api.containers()) == []
    assert (tmp_path / "calls").read_text() == "x\n"
    client.close()


def test_errors_of_the_docker_command_are_reported(docker_here: Callable[[str], None]) -> None:
    docker_here("echo permission denied >&2; exit 1")
    client = DockerClient("a", "me", lambda: dial_local("a"))
    with pytest.raises(EngineForbidden, match="usermod -aG docker me"):
        client.ping()


def test_an_engine_lost_after_a_response_is_a_lost_connection(
    tmp_path: Path, docker_here: Callable[[str], None]
) -> None:
    docker_here(
        f"cd {tmp_path}; echo x >>calls; {HEAR}[ $(wc -l <calls) = 1 ] || exit 3\n"
        "printf 'HTTP/1.1 200 OK\\r\\nApi-Version: 1.41\\r\\nContent-Length: 2\\r\\n\\r\\nOK'\n"
        f"{HEAR}echo gone >&2; exit 1"
    )
    client = DockerClient("a", "me", lambda: dial_local("a"))
    client.ping()
    with pytest.raises(EngineUnavailable, match="does not answer"):  # from the second dial-stdio
        client.ask("ask", lambda api: api.info())
    assert (tmp_path / "calls").read_text() == "x\n" * 2


def test_no_docker_command_for_a_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("DOCKER_CONTEXT", "other")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DialFailed) as failed:
        dial_local("a")
    assert failed.value.code == 127


@pytest.mark.parametrize("settings_", ["{}", "no json", "[]", '{"currentContext": "default"}', None])
def test_without_a_context_the_default_socket_is_used(
    settings_: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if settings_ is not None:
        (tmp_path / "config.json").write_text(settings_)
    without_an_engine(tmp_path, monkeypatch)
    (tmp_path / "docker").touch(0o755)  # installed
    with pytest.raises(FileNotFoundError):
        dial_local("a")


def without_an_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this be a machine that has neither the default socket nor `docker`, which would be in this folder."""
    for program in ("sh", "cat", "id", "ls", "uname"):
        (folder / program).symlink_to(str(shutil.which(program)))
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "DOCKER_CONFIG", "PATH"):
        monkeypatch.setenv(name, str(folder))
    monkeypatch.setattr("launcher.node.docker.channel.SOCKET", str(folder / "usual.sock"))


@pytest.mark.parametrize("context", [None, "rootless"])  # its settings may be those of another machine with this home
def test_a_machine_without_docker_is_not_told_to_start_it(
    context: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_an_engine(tmp_path, monkeypatch)
    if context:
        (tmp_path / "config.json").write_text(json.dumps({"currentContext": context}))
    with pytest.raises(EngineAbsent, match="no container engine is installed on this machine\n  -> install Docker"):
        DockerClient("a", "me", lambda: dial_local("a")).ping()
    monkeypatch.setenv("DOCKER_CONTEXT", "asked-for")
    with pytest.raises(EngineUnavailable) as failed:
        DockerClient("a", "me", lambda: dial_local("a")).ping()
    assert type(failed.value) is EngineUnavailable


def test_only_who_has_used_docker_here_is_told_that_it_was_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_an_engine(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    assert runs_on(["local"], said.append) == ([], [])
    assert remaining_on(["local"], [], None, said.append).no_engine is None
    assert said == []

    record("job-20260101-000000-aaaa", "process")
    runs_on(["local"], said.append)
    assert said == []

    used = record("job-20260101-000000-bbbb", "docker")
    absent = "local: no container engine is installed on this machine\n  -> "
    runs_on(["local"], said.append)
    with pytest.raises(RunUnknown):
        launcher.find(used.run, nodes=["local"], log=said.append)
    assert [text.partition("install Docker")[0] for text in said] == [
        f"warning: containers were not searched: {absent}"
    ] * 2
    assert str(remaining_on(["local"], [used], None, silent).no_engine).startswith(absent)


def test_an_engine_whose_socket_refuses_is_expected_to_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_an_engine(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "usual.sock").touch()
    said: list[str] = []
    runs_on(["local"], said.append)
    (text,) = said
    assert "local: its container engine does not answer (" in text
    assert "\n  -> on the node: " in text


def record(run: str, runtime: str) -> Record:
    """Of a run on this machine, in runs/."""
    node = NodeOfRun("local", "local", 0, f"launcher-{run}-0", f"{Path.home()}/.launcher/{run}", range(1))
    return Record.rebuild(run, runtime, [node])


def test_a_waiting_program_is_idle(docker_here: Callable[[str], None]) -> None:
    docker_here("read -r line; echo early; sleep 60")
    wire = dial_local("a")
    assert wire.idle
    wire.sendall(b"x\n")
    deadline = time.monotonic() + 60
    while wire.idle and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not wire.idle
    wire.close()


def test_a_run_in_an_engine_that_does_not_answer_is_not_taken_for_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another run of this machine makes `runs` and `down --all` ask for its processes too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")

    contained = record("job-20260101-000000-aaaa", "docker")
    plain = record("job-20260101-000000-bbbb", "process")
    states = {row.run: row.state for row in recorded_runs(silent)}
    assert states[contained.run] == "unreachable" != states[plain.run]

    said: list[str] = []
    left = remaining([contained, plain], None, said.append, purge=False)
    assert said == [f"{contained.run} may still be running on local"]
    assert ["its container engine does not answer" in error.what for error in left.errors] == [True]
    assert left.skipped == 1
    assert contained.result() is None
    assert (plain.result() or {})["state"] == "stopped"
