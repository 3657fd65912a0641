"""Containers as requests to the Engine API, and the states and failures in its responses."""

from __future__ import annotations

from http.client import LineTooLong
from typing import Any

import docker.errors
import pytest
import requests
import urllib3.exceptions
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import (
    EngineFailed,
    EngineForbidden,
    EngineUnavailable,
    LauncherError,
    NameTaken,
    NodeUnfit,
    NodeUnreachable,
)
from launcher.model.container import ContainerSpec, Layout, Mount, Phase
from launcher.model.facts import Reach
from launcher.node.docker.channel import DialFailed
from launcher.node.docker.errors import explain, is_lost, unwrap_sdk_error
from launcher.node.docker.values import container_request, container_state, device, engine_facts, image_info, timestamp
from launcher.node.ssh.machine import refusal

PLAIN = ContainerSpec(
    name="launcher-run-0",
    image="sha256:abc",
    argv=("/opt/launcher/entry.sh", "python3", "-m", "train"),
    env={"A": "1", "B": "x=y"},
    labels={"launcher.run": "r"},
    layout=Layout("/workspace/code", "/output", "/opt/launcher"),
    output_dir="/home/c/.launcher/r",
    user="1001:1002",
)


def spec(**changes: object) -> ContainerSpec:
    return ContainerSpec(**{**PLAIN.__dict__, **changes})


def test_a_plain_container() -> None:
    assert container_request(PLAIN) == {
        "Image": "sha256:abc",
        "Entrypoint": ["/opt/launcher/entry.sh", "python3", "-m", "train"],
        "Cmd": [],
        "Env": ["A=1", "B=x=y"],
        "Labels": {"launcher.run": "r"},
        "User": "1001:1002",
        "WorkingDir": "/workspace/code",
        "Tty": False,
        "OpenStdin": False,
        "AttachStdin": False,
        "StopSignal": "SIGTERM",
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {
            "NetworkMode": "host",
            "IpcMode": "host",
            "Init": True,
            "Ulimits": [],
            "DeviceRequests": [],
            "Devices": [],
            "CapAdd": [],
            "ExtraHosts": [],
            "GroupAdd": [],
            "Mounts": [
                {"Type": "bind", "Source": "/home/c/.launcher/r", "Target": "/output", "ReadOnly": False},
            ],
            "RestartPolicy": {"Name": "no"},
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "64m", "max-file": "2"}},
        },
    }


def test_a_container_with_every_option() -> None:
    config = container_request(
        spec(
            groups=(27, 102),
            mounts=(Mount("/data", "/data", read_only=True),),
            gpus=("GPU-1", "GPU-2"),
            gpu_driver="nvidia",
            ipc="private",
            ulimits=(("memlock", -1), ("stack", 67108864)),
            devices=("/dev/infiniband", "/dev/fuse:/dev/fuse:r"),
            cap_add=("IPC_LOCK",),
            extra_hosts={"store": "10.0.0.9"},
            shm_size=1 << 30,
            memory=1 << 34,
            cpus=1.5,
            restarts=3,
            init=False,
        )
    )["HostConfig"]
    assert config["GroupAdd"] == ["27", "102"]
    assert config["Mounts"][0] == {"Type": "bind", "Source": "/data", "Target": "/data", "ReadOnly": True}
    assert config["DeviceRequests"] == [
        {"Driver": "nvidia", "DeviceIDs": ["GPU-1", "GPU-2"], "Capabilities": [["gpu"]]}
    ]
    assert config["Ulimits"] == [
        {"Name": "memlock", "Soft": -1, "Hard": -1},
        {"Name": "stack", "Soft": 67108864, "Hard": 67108864},
    ]
    assert config["Devices"][0] == {
        "PathOnHost": "/dev/infiniband",
        "PathInContainer": "/dev/infiniband",
        "CgroupPermissions": "rwm",
    }
    assert config["CapAdd"] == ["IPC_LOCK"]
    assert config["ExtraHosts"] == ["store:10.0.0.9"]
    assert config["ShmSize"] == 1 << 30
    assert (config["Memory"], config["MemorySwap"], config["NanoCpus"]) == (1 << 34, 1 << 34, 1_500_000_000)
    assert config["RestartPolicy"] == {"Name": "on-failure", "MaximumRetryCount": 3}
    assert config["Init"] is False


def test_shm_size_is_ignored_with_the_hosts_ipc() -> None:
    assert "ShmSize" not in container_request(spec(ipc="host", shm_size=1 << 30))["HostConfig"]


def test_gpus_by_cdi() -> None:
    requests_ = container_request(spec(gpus=("GPU-1",), gpu_driver="cdi"))["HostConfig"]["DeviceRequests"]
    assert requests_ == [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=GPU-1"]}]


def test_without_argv_the_images_command_runs() -> None:
    body = container_request(spec(argv=()))
    assert "Entrypoint" not in body
    assert "Cmd" not in body


@pytest.mark.parametrize(
    ("text", "inside", "permissions"),
    [("/dev/a", "/dev/a", "rwm"), ("/dev/a:/dev/b", "/dev/b", "rwm"), ("/dev/a:/dev/b:rw", "/dev/b", "rw")],
)
def test_devices(text: str, inside: str, permissions: str) -> None:
    assert device(text) == {"PathOnHost": "/dev/a", "PathInContainer": inside, "CgroupPermissions": permissions}


def test_a_container_that_has_ended() -> None:
    state = container_state(
        {
            "Id": "1f",
            "Name": "/launcher-run-0",
            "Image": "sha256:abc",
            "RestartCount": 2,
            "Config": {"Labels": {"launcher.run": "r"}},
            "State": {
                "Status": "exited",
                "ExitCode": 137,
                "OOMKilled": True,
                "Error": "",
                "StartedAt": "2026-11-21T11:10:49.5Z",
                "FinishedAt": "2026-11-21T12:10:50.25+01:00",
            },
        }
    )
    assert (state.phase, state.exit_code, state.oom_killed, state.restarts) == (Phase.EXITED, 137, True, 2)
    assert state.finished - state.started == pytest.approx(0.75)
    assert state.name == "launcher-run-0"


@pytest.mark.parametrize("status", ["created", "running", "paused", "restarting"])
def test_a_container_that_has_not_ended_has_no_exit_code(status: str) -> None:
    state = container_state(
        {"Id": "1", "State": {"Status": status, "ExitCode": 1, "StartedAt": "0001-01-01T00:00:00Z"}}
    )
    assert state.exit_code is None
    assert state.started == 0.0
    assert not state.phase.ended


@given(st.one_of(st.text(), st.none(), st.integers(), st.from_regex(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")))
def test_any_time_stamp_can_be_parsed(text: object) -> None:
    assert isinstance(timestamp(text), float)


def test_an_image_without_anything_in_its_config() -> None:
    info = image_info({"Id": "sha256:1", "RepoTags": None, "Config": {"Env": None, "Entrypoint": None, "Labels": None}})
    assert (info.tags, info.entrypoint, info.labels, info.layers) == ((), (), {}, ())


def an_image(**changes: Any) -> dict[str, Any]:
    """Recorded responses of a classic store (engine 20.10) and of containerd's (engine 26.1) for one image."""
    config = {
        "User": "",
        "Env": ["A=b"],
        "Cmd": ["python3"],
        "Labels": {"c": "d"},
        "Volumes": None,
        "Image": "sha256:8b",
    }
    return {
        "Id": "sha256:0d",
        "Created": "2026-11-21T11:02:03.4Z",
        "Os": "linux",
        "Architecture": "amd64",
        "Size": 145074938,
        "RootFS": {"Type": "layers", "Layers": ["sha256:4b"]},
        "Config": config,
        **changes,
    }


def test_an_image_has_the_same_content_in_every_store() -> None:
    classic = image_info(an_image())
    config = {"Env": ["A=b"], "Cmd": ["python3"], "Labels": {"c": "d"}, "Image": "", "Entrypoint": []}
    containerd = image_info(an_image(Id="sha256:00", Size=151001690, Variant="", Config=config))
    assert classic.id != containerd.id
    assert classic.content == containerd.content


@pytest.mark.parametrize(
    "change",
    [
        {"RootFS": {"Layers": ["sha256:4c"]}},
        {"Architecture": "arm64"},
        {"Created": "2026-11-21T11:02:03.5Z"},
        {"Config": {"Env": ["A=c"], "Cmd": ["python3"], "Labels": {"c": "d"}}},
        {"Config": {"Env": ["A=b"], "Cmd": ["python3"], "Labels": {"c": "d"}, "User": "1000"}},
        {"Config": {"Env": ["A=b"], "Cmd": ["python3"], "Labels": {"c": "d"}, "Entrypoint": ["sh"]}},
    ],
)
def test_a_difference_visible_to_a_container_changes_the_content(change: dict[str, Any]) -> None:
    assert image_info(an_image(**change)).content != image_info(an_image()).content


def test_engine_facts_of_old_and_new_engines() -> None:
    new = engine_facts(
        {
            "ID": "x",
            "ServerVersion": "29.0.1",
            "SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless"],
            "Runtimes": {"runc": {}, "nvidia": {}},
            "DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}, {"Source": "other", "ID": "z"}, 3],
        },
        ["sha256:1"],
        7,
    )
    assert new.rootless
    assert new.runtimes == ("nvidia", "runc")
    assert new.cdi_devices == ("nvidia.com/gpu=0",)
    old = engine_facts({"SecurityOptions": None, "Runtimes": None}, [], -1)
    assert not old.rootless


def wrapped(inner: Exception) -> requests.ConnectionError:
    """An error as raised by requests and urllib3."""
    return requests.ConnectionError(urllib3.exceptions.ProtocolError("Connection aborted.", inner))


def api_error(status: int, words: str) -> docker.errors.APIError:
    response = requests.Response()
    response.status_code = status
    kind = docker.errors.NotFound if status == 404 else docker.errors.APIError
    return kind("failed", response=response, explanation=words)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (DialFailed(127, "bash: docker: command not found"), EngineUnavailable, "install Docker"),
        (DialFailed(1, "docker: 'system dial-stdio' is not a docker command."), EngineUnavailable, "18.09"),
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
        (DialFailed(1, "Cannot connect to the Docker daemon at unix:///x"), EngineUnavailable, "systemctl"),
        (PermissionError(13, "Permission denied"), EngineForbidden, "usermod"),
        (FileNotFoundError(2, "No such file or directory"), EngineUnavailable, "systemctl"),
        (ConnectionRefusedError(111, "Connection refused"), EngineUnavailable, "systemctl"),
        (TimeoutError("timed out"), EngineUnavailable, "no answer"),
        (NodeUnreachable("n", "gone", ""), NodeUnreachable, "gone"),
        (api_error(409, 'Conflict. The container name "/x" is already in use by container "y".'), NameTaken, "x"),
        (
            api_error(400, 'invalid mount config for type "bind": bind source path does not exist: /data/imagenet'),
            NodeUnfit,
            "/data/imagenet",
        ),
        (api_error(500, 'could not select device driver "nvidia" with capabilities: [[gpu]]'), NodeUnfit, "Toolkit"),
        (api_error(500, "write /x: no space left on device"), NodeUnfit, "disk is full"),
        (api_error(404, "No such image: x"), NodeUnfit, "launcher image ship"),
        (api_error(500, "something else"), EngineFailed, "something else"),
        (docker.errors.InvalidVersion("too old"), EngineFailed, "could not create a container: too old"),
        (KeyError("Id"), EngineFailed, "unexpected response from the Docker API (KeyError: 'Id')"),
    ],
)
def test_every_failure_has_a_kind_a_node_and_a_fix(error: Exception, kind: type[LauncherError], words: str) -> None:
    told = explain("gpu-a", "carol", "create a container", error)
    assert type(told) is kind
    assert words in str(told)
    if kind is not NodeUnreachable:
        assert str(told).startswith("gpu-a: ")


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


@pytest.mark.parametrize(
    ("code", "text", "reach"),
    [
        (2, "Connection refused", Reach.REFUSED),
        (2, "Connection timed out", Reach.SILENT),
        (2, "No route to host", Reach.SILENT),
        (1, "open failed", Reach.UNKNOWN),
        (1, "administratively prohibited", Reach.UNKNOWN),
        (2, "Name or service not known", Reach.UNKNOWN),
    ],
)
def test_sshds_refusals_are_interpreted(code: int, text: str, reach: Reach) -> None:
    assert refusal(code, text) is reach
