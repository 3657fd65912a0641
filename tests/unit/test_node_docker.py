"""Containers as requests to the Engine API, and the states and failures in its responses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.model.container import ContainerSpec, Layout, Mount, Phase, Tool
from launcher.node.docker.values import (
    container_request,
    container_state,
    device,
    docker_run,
    engine_facts,
    image_info,
    timestamp,
    tool_argv,
)

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
            ulimits=(("memlock", -1), ("stack", 67108864)),
            docker={
                "ipc": "private",
                "devices": ("/dev/infiniband", "/dev/fuse:/dev/fuse:r"),
                "cap_add": ("IPC_LOCK",),
                "extra_hosts": {"store": "10.0.0.9"},
            },
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


def test_a_tool_sees_nothing_but_its_mounts_and_leaves_nothing() -> None:
    mounts = (Mount("/data", "/in,side", read_only=True), Mount("/copies", "/copies"))
    tool = Tool("image", ("cat", "name"), "data", mounts, "7:8", (27, 9), "host", interactive=True)
    line = " ".join(tool_argv(tool, "launcher-tool-1", 7))
    assert line.startswith(
        "docker run --name launcher-tool-1 --rm --init --log-driver none --read-only --network host --userns host "
        "--user 7:8"
    )
    assert (
        "--label launcher.purpose=data --label launcher.uid=7 --interactive --group-add 27 --group-add 9 --mount"
        in line
    )
    assert line.endswith(
        '--mount type=bind,source=/data,"target=/in,side",readonly --mount type=bind,source=/copies,target=/copies '
        "--entrypoint sh image -c cat name"
    )
    shallow = " ".join(tool_argv(replace(tool, recursive=False, interactive=False), "x", 7))
    assert shallow.count("bind-nonrecursive=true") == 2
    assert "--interactive" not in shallow


def test_shm_size_is_ignored_with_the_hosts_ipc() -> None:
    assert "ShmSize" not in container_request(spec(docker={"ipc": "host"}, shm_size=1 << 30))["HostConfig"]


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
    )
    assert new.rootless
    assert new.runtimes == ("nvidia", "runc")
    assert new.cdi_devices == ("nvidia.com/gpu=0",)
    old = engine_facts({"SecurityOptions": None, "Runtimes": None})
    assert not old.rootless


def test_an_engine_that_remaps_users_is_told_not_to() -> None:
    """It refuses the host's network otherwise, and the program could not read the node's files."""
    assert engine_facts({"SecurityOptions": ["name=seccomp,profile=builtin", "name=userns"]}).remapped
    assert not engine_facts({"SecurityOptions": ["name=seccomp,profile=builtin"]}).remapped
    assert "UsernsMode" not in container_request(PLAIN)["HostConfig"]
    remapped = replace(PLAIN, userns="host")
    assert container_request(remapped)["HostConfig"]["UsernsMode"] == "host"
    assert "--userns host" in docker_run(remapped)


def test_kind_and_image_store_of_engines() -> None:
    containerd = [["driver-type", "io.containerd.snapshotter.v1"]]
    engines = [
        engine_facts(info)
        for info in (
            {"Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "extfs"]]},
            {"Driver": "overlayfs", "DriverStatus": containerd},
            {"Driver": "overlay", "BuildahVersion": "1.28.2"},
        )
    ]
    assert [engine.kind for engine in engines] == ["Docker", "Docker", "podman"]
    assert [engine.store for engine in engines] == [
        "the classic image store, overlay2",
        "containerd's image store, overlayfs",
        "podman's image store, overlay",
    ]
