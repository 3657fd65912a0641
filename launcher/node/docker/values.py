"""Between our values and what Docker takes and tells: the JSON of its Engine API, `docker run`. Pure.

Reference: docs.docker.com/reference/api/engine.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from launcher.model.container import ContainerSpec, ContainerState, Mount, Phase
from launcher.model.facts import EngineFacts, ImageInfo

LOG_FILE_SIZE = "64m"  # a node's disk cannot fill: the run's own log files are elsewhere, this is the fallback
LOG_FILES = "2"
# What of an image's configuration a container gets; the rest says how and where it was built
_CONFIGURATION = (
    *("User", "ExposedPorts", "Env", "Entrypoint", "Cmd", "Healthcheck", "Volumes", "WorkingDir", "OnBuild", "Labels"),
    *("StopSignal", "Shell"),
)
_CUDA = "CUDA_VERSION="  # in the environment of NVIDIA's images
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")
_PHASES = {phase.value: phase for phase in Phase} | {"removing": Phase.DEAD}


def container_request(spec: ContainerSpec) -> dict[str, Any]:
    """The body of POST /containers/create that makes exactly this container."""
    body: dict[str, Any] = {
        "Image": spec.image,
        "Env": [f"{name}={value}" for name, value in spec.env.items()],
        "Labels": dict(spec.labels),
        "User": spec.user,
        "Tty": False,
        "OpenStdin": False,
        "AttachStdin": False,
        "StopSignal": "SIGTERM",  # an image may say otherwise; a trainer saves its checkpoint on SIGTERM
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": host_config(spec),
    }
    if spec.layout.code:
        body["WorkingDir"] = spec.layout.code
    if spec.argv:
        body["Entrypoint"] = list(spec.argv)
        body["Cmd"] = []
    return body


def host_config(spec: ContainerSpec) -> dict[str, Any]:
    mounts = list(spec.mounts)
    if spec.output_dir:
        mounts.append(Mount(spec.output_dir, spec.layout.output))
    config: dict[str, Any] = {
        "NetworkMode": spec.network,
        "IpcMode": spec.ipc,
        "Init": spec.init,
        "Ulimits": [{"Name": name, "Soft": limit, "Hard": limit} for name, limit in spec.ulimits],
        "DeviceRequests": device_requests(spec),
        "Devices": [device(text) for text in spec.devices],
        "CapAdd": list(spec.cap_add),
        "ExtraHosts": [f"{name}:{address}" for name, address in spec.extra_hosts.items()],
        "GroupAdd": [str(group) for group in spec.groups],
        # mounts, not binds: for a source that is missing the engine fails, it does not make it as root's
        "Mounts": [{"Type": "bind", "Source": m.source, "Target": m.target, "ReadOnly": m.read_only} for m in mounts],
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {"Type": "json-file", "Config": {"max-size": LOG_FILE_SIZE, "max-file": LOG_FILES}},
    }
    if spec.restarts:
        config["RestartPolicy"] = {"Name": "on-failure", "MaximumRetryCount": spec.restarts}
    if spec.shm_size is not None and spec.ipc != "host":  # with the host's ipc there is the host's /dev/shm
        config["ShmSize"] = spec.shm_size
    if spec.memory is not None:
        config["Memory"] = spec.memory
        config["MemorySwap"] = spec.memory  # the engine's default is as much swap again
    if spec.cpus is not None:
        config["NanoCpus"] = round(spec.cpus * 1e9)
    return config


def device_requests(spec: ContainerSpec) -> list[dict[str, Any]]:
    """The GPUs of a container, by UUID: indices mean other devices after a reboot."""
    if not spec.gpus:
        return []
    if spec.gpu_driver == "cdi":
        return [{"Driver": "cdi", "DeviceIDs": [f"nvidia.com/gpu={uuid}" for uuid in spec.gpus]}]
    return [{"Driver": spec.gpu_driver or "nvidia", "DeviceIDs": list(spec.gpus), "Capabilities": [["gpu"]]}]


def device(text: str) -> dict[str, str]:
    """`host[:container[:permissions]]` as `docker run --device` takes it; a folder stands for all devices below it."""
    host, _, rest = text.partition(":")
    inside, _, permissions = rest.partition(":")
    return {"PathOnHost": host, "PathInContainer": inside or host, "CgroupPermissions": permissions or "rwm"}


def docker_run(spec: ContainerSpec) -> str:
    """For a person to read and to paste into a POSIX shell; made from the very request that `up` sends."""
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
        *_each("--mount", [_mount_option(mount) for mount in host["Mounts"]]),
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


def _mount_option(mount: dict[str, Any]) -> str:
    places = (f"source={mount['Source']}", f"target={mount['Target']}")
    return _csv("type=bind", *places, *(["readonly"] if mount["ReadOnly"] else []))


def _csv(*fields: str) -> str:
    """The comma separated values that docker's command line reads."""
    return ",".join('"' + text.replace('"', '""') + '"' if {*text} & {*',"'} else text for text in fields)


def label_filter(labels: Mapping[str, str | None]) -> dict[str, list[str]]:
    """As docker-py takes it: `name` or `name=value`."""
    return {"label": [name if value is None else f"{name}={value}" for name, value in labels.items()]}


def container_state(found: Mapping[str, Any]) -> ContainerState:
    """From GET /containers/{id}/json."""
    state = found.get("State") or {}
    phase = _PHASES.get(str(state.get("Status", "")), Phase.DEAD)
    return ContainerState(
        id=str(found["Id"]),
        name=str(found.get("Name", "")).lstrip("/"),
        image=str(found.get("Image", "")),
        labels={str(k): str(v) for k, v in ((found.get("Config") or {}).get("Labels") or {}).items()},
        phase=phase,
        exit_code=int(state.get("ExitCode", 0)) if phase.ended else None,
        oom_killed=bool(state.get("OOMKilled")),
        restarts=int(found.get("RestartCount") or 0),
        started=timestamp(state.get("StartedAt")),
        finished=timestamp(state.get("FinishedAt")),
        error=str(state.get("Error") or ""),
    )


def image_info(found: Mapping[str, Any]) -> ImageInfo:
    """From GET /images/{name}/json."""
    config = found.get("Config") or {}
    layers = tuple((found.get("RootFS") or {}).get("Layers") or ())
    # Stores with other ids show the same image with other fields missing, null or empty, so those count as absent
    kept = {key: config[key] for key in _CONFIGURATION if config.get(key)}
    platform = [found.get(key) or "" for key in ("Os", "Architecture", "Variant")]
    content = json.dumps([layers, platform, kept, timestamp(found.get("Created"))], sort_keys=True)
    return ImageInfo(
        id=str(found["Id"]),
        tags=tuple(found.get("RepoTags") or ()),
        repo_digests=tuple(found.get("RepoDigests") or ()),
        arch=str(found.get("Architecture", "")),
        entrypoint=tuple(config.get("Entrypoint") or ()),
        labels=dict(config.get("Labels") or {}),
        layers=layers,
        size=int(found.get("Size") or 0),
        user=str(config.get("User") or ""),
        created=str(found.get("Created") or ""),
        cuda=next((text[len(_CUDA) :] for text in config.get("Env") or () if str(text).startswith(_CUDA)), ""),
        content=hashlib.sha256(content.encode()).hexdigest(),
    )


def engine_facts(info: Mapping[str, Any]) -> EngineFacts:
    """From GET /info."""
    devices = info.get("DiscoveredDevices") or ()  # since engine 28.2
    podman = "BuildahVersion" in info
    containerd = "io.containerd.snapshotter" in str(info.get("DriverStatus"))
    store = "podman's" if podman else "containerd's" if containerd else "the classic"
    return EngineFacts(
        id=str(info.get("ID", "")),
        version=str(info.get("ServerVersion", "")),
        rootless=any("name=rootless" in str(option) for option in info.get("SecurityOptions") or ()),
        runtimes=tuple(sorted(info.get("Runtimes") or ())),
        cdi_devices=tuple(str(d.get("ID", "")) for d in devices if isinstance(d, Mapping) and d.get("Source") == "cdi"),
        root_dir=str(info.get("DockerRootDir", "")),
        kind="podman" if podman else "Docker",
        store=f"{store} image store, {info.get('Driver')}",
        cgroup=str(info.get("CgroupDriver") or ""),
    )


def timestamp(text: object) -> float:
    """Seconds since the epoch; 0 for the engine's zero time and for any other text."""
    match = _TIME.fullmatch(text) if isinstance(text, str) else None
    if match is None or match.group(1).startswith("0001"):
        return 0.0
    second, fraction, zone = match.groups("")
    try:
        whole = datetime.fromisoformat(second + (zone if zone.strip("Z") else "+00:00"))
    except ValueError:
        return 0.0
    return whole.timestamp() + float(fraction or 0)
