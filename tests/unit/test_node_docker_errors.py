"""Error messages for an engine's failures."""

from __future__ import annotations

from http.client import LineTooLong

import docker.errors
import pytest
import requests
import urllib3.exceptions

from launcher.errors import (
    EngineFailed,
    EngineForbidden,
    EngineUnavailable,
    LauncherError,
    NameTaken,
    NodeUnfit,
    NodeUnreachable,
)
from launcher.node.docker.channel import DialFailed
from launcher.node.docker.errors import explain, is_lost, unwrap_sdk_error


def wrapped(inner: Exception) -> requests.ConnectionError:
    """An error as raised by requests and urllib3."""
    return requests.ConnectionError(urllib3.exceptions.ProtocolError("Connection aborted.", inner))


def api_error(status: int, message: str) -> docker.errors.APIError:
    response = requests.Response()
    response.status_code = status
    kind = docker.errors.NotFound if status == 404 else docker.errors.APIError
    return kind("failed", response=response, explanation=message)


@pytest.mark.parametrize(
    ("error", "kind", "expected"),
    [
        (DialFailed(127, "bash: docker: command not found"), EngineUnavailable, "install Docker"),
        (DialFailed(1, "docker: 'system dial-stdio' is not a docker command."), EngineUnavailable, "20.10"),
        (
            DialFailed(1, "dial unix /var/run/docker.sock: connect: permission denied"),
            EngineForbidden,
            "usermod",
        ),
        (
            DialFailed(1, "dial unix /var/run/docker.sock: connect: no such file or directory"),
            EngineUnavailable,
            "systemctl start docker",
        ),
        (DialFailed(1, "Cannot connect to the Docker daemon at unix:///x"), EngineUnavailable, "DOCKER_HOST"),
        (
            DialFailed(
                1,
                "WARNING: Error loading config file: open /home/carol/.docker/config.json: permission denied\n"
                "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
            ),
            EngineUnavailable,
            "sudo systemctl start docker",
        ),
        (
            DialFailed(1, "Cannot connect to the Docker daemon at unix:///run/user/1000/docker.sock."),
            EngineUnavailable,
            "on the node: systemctl --user start docker",
        ),
        (
            DialFailed(1, "Cannot connect to the Docker daemon at unix:///run/podman/podman.sock."),
            EngineUnavailable,
            "sudo systemctl start podman.socket",
        ),
        (DialFailed(1, "Cannot connect to the Docker daemon at tcp://b:2375."), EngineUnavailable, "DOCKER_HOST"),
        (
            DialFailed(1, 'context "lab": context not found: open /home/carol/x/meta.json: no such file or directory'),
            EngineUnavailable,
            "docker context ls",
        ),
        (DialFailed(126, "bash: /usr/bin/docker: Permission denied"), EngineUnavailable, "no usable docker command"),
        (DialFailed(1, "Error: unrecognized command `podman system dial-stdio`"), EngineUnavailable, "20.10"),
        (PermissionError(13, "Permission denied"), EngineForbidden, "usermod"),
        (FileNotFoundError(2, "No such file or directory"), EngineUnavailable, "systemctl"),
        (ConnectionRefusedError(111, "Connection refused"), EngineUnavailable, "systemctl"),
        (TimeoutError("timed out"), EngineUnavailable, "did not respond"),
        (NodeUnreachable("n", "gone", ""), NodeUnreachable, "gone"),
        (api_error(409, 'Conflict. The container name "/x" is already in use by container "y".'), NameTaken, "x"),
        (
            api_error(500, 'the container name "x" is already in use by 92fb.'),  # podman 4.3
            NameTaken,
            "x",
        ),
        (
            api_error(400, 'invalid mount config for type "bind": bind source path does not exist: /data/imagenet'),
            NodeUnfit,
            "/data/imagenet",
        ),
        (api_error(500, 'could not select device driver "nvidia" with capabilities: [[gpu]]'), NodeUnfit, "Toolkit"),
        (api_error(500, "write /x: no space left on device"), NodeUnfit, "the container engine's disk is full"),
        (api_error(404, "No such image: x"), NodeUnfit, "launcher image ship"),
        (api_error(500, "something else"), EngineFailed, "something else"),
        (docker.errors.InvalidVersion("too old"), EngineFailed, "could not create a container: too old"),
        (KeyError("Id"), EngineFailed, "unexpected response from the Docker API (KeyError: 'Id')"),
    ],
)
def test_every_failure_has_a_kind_a_node_and_a_fix(error: Exception, kind: type[LauncherError], expected: str) -> None:
    explained = explain("gpu-a", "carol", "create a container", error)
    assert type(explained) is kind
    assert expected in str(explained)
    if kind is not NodeUnreachable:
        assert str(explained).startswith("gpu-a: ")


def test_only_a_broken_connection_is_retried() -> None:
    assert is_lost(ConnectionResetError("reset"))
    assert is_lost(unwrap_sdk_error(EOFError()))
    assert not is_lost(DialFailed(1, "permission denied"))
    assert not is_lost(api_error(500, "x"))
    assert not is_lost(TimeoutError())


@pytest.mark.parametrize(
    ("error", "plain"),
    [
        (wrapped(DialFailed(1, "permission denied")), DialFailed(1, "permission denied")),
        (wrapped(NodeUnreachable("n", "gone", "")), NodeUnreachable("n", "gone", "")),
        (wrapped(PermissionError(13, "Permission denied")), PermissionError(13, "Permission denied")),
        (wrapped(ConnectionResetError("reset")), ConnectionError()),
        (
            requests.exceptions.ChunkedEncodingError(urllib3.exceptions.ProtocolError("broken")),
            ConnectionError(),
        ),
        (requests.ReadTimeout("read timed out"), TimeoutError()),
        (requests.ConnectionError(urllib3.exceptions.ReadTimeoutError(None, "", "timed out")), TimeoutError()),  # type: ignore[arg-type]
        (urllib3.exceptions.EmptyPoolError(None, "full"), TimeoutError()),  # type: ignore[arg-type]
        (wrapped(LineTooLong("header line")), ValueError()),
        (requests.JSONDecodeError("no JSON", "{", 0), requests.JSONDecodeError("no JSON", "{", 0)),
        (docker.errors.InvalidVersion("too old"), docker.errors.InvalidVersion("too old")),
        (api_error(500, "no space left on device"), api_error(500, "no space left on device")),
    ],
)
def test_wrapped_errors_of_docker_py_are_unwrapped(error: Exception, plain: Exception) -> None:
    found = unwrap_sdk_error(error)
    assert type(found) is type(plain)
    assert not plain.args or str(found) == str(plain)
