"""The engine of this machine: its socket, or the one that Docker's context selects."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.api.history import recorded_runs
from launcher.errors import EngineForbidden, EngineUnavailable
from launcher.model.progress import silent
from launcher.node.docker.channel import DialFailed, dial_local
from launcher.node.docker.client import DockerClient
from launcher.records.store import NodeOfRun, Record
from launcher.run.end.stop import remaining


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
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setattr("launcher.node.docker.channel.SOCKET", str(tmp_path / "usual.sock"))
    with pytest.raises(FileNotFoundError):
        dial_local("a")


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

    def recorded(run: str, runtime: str) -> Record:
        node = NodeOfRun("local", "local", 0, f"launcher-{run}-0", f"{tmp_path}/.launcher/{run}", range(1))
        return Record.rebuild(run, runtime, [node])

    contained = recorded("job-20260101-000000-aaaa", "docker")
    plain = recorded("job-20260101-000000-bbbb", "process")
    states = {row.run: row.state for row in recorded_runs(silent)}
    assert states[contained.run] == "unreachable" != states[plain.run]

    said: list[str] = []
    left = remaining([contained, plain], None, said.append, purge=False)
    assert said == [f"{contained.run} may still be running on local"]
    assert ["its container engine does not answer" in error.what for error in left.errors] == [True]
    assert left.skipped == 1
    assert contained.result() is None
    assert (plain.result() or {})["state"] == "stopped"
