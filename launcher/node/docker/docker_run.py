"""A container as the `docker run` that would make it: for a person to read and to paste."""

from __future__ import annotations

import shlex
from typing import Any

from launcher.model.container import ContainerSpec
from launcher.node.docker.values import container_request


def docker_run(spec: ContainerSpec) -> str:
    """For a POSIX shell, a line an option; made from the very request that `up` sends."""
    body = container_request(spec)
    host = body["HostConfig"]
    options = [
        ("--name", spec.name),
        ("--network", host["NetworkMode"]),
        ("--ipc", host["IpcMode"]),
        *([("--init",)] if host["Init"] else []),
        *_each("--user", [body["User"]]),
        *_each("--group-add", host["GroupAdd"]),
        *_each("--workdir", [body.get("WorkingDir", "")]),
        *(word for request in host["DeviceRequests"] for word in _gpus(request)),
        *_each("--device", [":".join(device.values()) for device in host["Devices"]]),
        *_each("--ulimit", [f"{u['Name']}={u['Soft']}:{u['Hard']}" for u in host["Ulimits"]]),
        *_each("--cap-add", host["CapAdd"]),
        *_each("--add-host", host["ExtraHosts"]),
        *_each("--shm-size", [host.get("ShmSize", "")]),
        *_each("--memory", [host.get("Memory", "")]),
        *_each("--memory-swap", [host.get("MemorySwap", "")]),
        *_each("--cpus", [f"{host['NanoCpus'] / 1e9:.9g}"] if "NanoCpus" in host else []),
        *_each("--restart", [f"on-failure:{spec.restarts}"] if spec.restarts else []),
        *_each("--mount", [_mount(mount) for mount in host["Mounts"]]),
        *_each("-e", body["Env"]),
        *_each("-l", [f"{name}={value}" for name, value in body["Labels"].items()]),
        ("--log-driver", host["LogConfig"]["Type"]),
        *_each("--log-opt", [f"{name}={value}" for name, value in host["LogConfig"]["Config"].items()]),
        ("--stop-signal", body["StopSignal"]),
        ("--no-healthcheck",),
    ]
    first, *rest = body.get("Entrypoint") or [""]
    words = [("docker", "run", "-d"), *options, *_each("--entrypoint", [first]), (spec.image, *rest)]
    return " \\\n  ".join(shlex.join(group) for group in words)


def _each(option: str, values: list[str]) -> list[tuple[str, str]]:
    return [(option, str(value)) for value in values if value != ""]


def _gpus(request: dict[str, Any]) -> list[tuple[str, str]]:
    if request["Driver"] == "cdi":
        return _each("--device", request["DeviceIDs"])
    return [("--gpus", _csv("device=" + ",".join(request["DeviceIDs"]), "driver=" + request["Driver"]))]


def _mount(mount: dict[str, Any]) -> str:
    places = (f"source={mount['Source']}", f"target={mount['Target']}")
    return _csv("type=bind", *places, *(["readonly"] if mount["ReadOnly"] else []))


def _csv(*fields: str) -> str:
    """The comma separated values that docker's command line reads."""
    return ",".join('"' + text.replace('"', '""') + '"' if {*text} & {*',"'} else text for text in fields)
