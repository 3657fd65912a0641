"""A container as the `docker run` that would make it: for a person to read and to paste."""

from __future__ import annotations

import shlex

from launcher.model.container import ContainerSpec
from launcher.node.docker.values import container_request


def docker_run(spec: ContainerSpec) -> list[tuple[str, ...]]:
    """The words of the command, an option with its value at a time; made from the very request that `up` sends."""
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
        *_each("--gpus", [_gpus(r["Driver"], r["DeviceIDs"]) for r in host["DeviceRequests"] if r["Driver"] != "cdi"]),
        *_each("--device", [id_ for r in host["DeviceRequests"] if r["Driver"] == "cdi" for id_ in r["DeviceIDs"]]),
        *_each("--device", [":".join(device.values()) for device in host["Devices"]]),
        *_each("--ulimit", [f"{u['Name']}={u['Soft']}:{u['Hard']}" for u in host["Ulimits"]]),
        *_each("--cap-add", host["CapAdd"]),
        *_each("--add-host", host["ExtraHosts"]),
        *_each("--shm-size", [host.get("ShmSize", "")]),
        *_each("--memory", [host.get("Memory", "")]),
        *_each("--memory-swap", [host.get("MemorySwap", "")]),
        *([("--cpus", f"{host['NanoCpus'] / 1e9:.9g}")] if "NanoCpus" in host else []),
        *([("--restart", f"on-failure:{spec.restarts}")] if spec.restarts else []),
        *_each("--mount", [_mount(m["Source"], m["Target"], read_only=m["ReadOnly"]) for m in host["Mounts"]]),
        *_each("-e", body["Env"]),
        *_each("-l", [f"{name}={value}" for name, value in body["Labels"].items()]),
        ("--log-driver", host["LogConfig"]["Type"]),
        *_each("--log-opt", [f"{name}={value}" for name, value in host["LogConfig"]["Config"].items()]),
        ("--stop-signal", body["StopSignal"]),
        ("--no-healthcheck",),
    ]
    first, *rest = body.get("Entrypoint") or [""]
    return [("docker", "run", "-d"), *options, *_each("--entrypoint", [first]), (spec.image, *rest)]


def pasteable(words: list[tuple[str, ...]]) -> str:
    """For a POSIX shell, a line an option."""
    return " \\\n  ".join(shlex.join(group) for group in words)


def _each(option: str, values: list[str]) -> list[tuple[str, str]]:
    return [(option, str(value)) for value in values if value != ""]


def _gpus(driver: str, uuids: list[str]) -> str:
    return f"{_field('device=' + ','.join(uuids))},driver={driver}"


def _mount(source: str, target: str, *, read_only: bool) -> str:
    fields = ["type=bind", _field(f"source={source}"), _field(f"target={target}"), *(["readonly"] if read_only else [])]
    return ",".join(fields)


def _field(text: str) -> str:
    """One field of the comma separated values that docker's command line reads."""
    return '"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text
