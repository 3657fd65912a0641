"""Conversion between our values and the JSON of the Docker Engine API, and `docker run` commands. Pure.

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
from launcher.node.docker.tool import bind, csv

LOG_FILE_SIZE = "64m"  # so that the log cannot fill the disk; it is a fallback: the run has its own log files
LOG_FILES = "2"
# Fields of an image's configuration that affect containers; the others describe its build
_CONFIGURATION = (
    *("User", "ExposedPorts", "Env", "Entrypoint", "Cmd", "Healthcheck", "Volumes", "WorkingDir", "OnBuild", "Labels"),
    *("StopSignal", "Shell"),
)
_CUDA, _GPU_CODE = "CUDA_VERSION", "TORCH_CUDA_ARCH_LIST"  # in the environment of NVIDIA's images
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")
_PHASES = {phase.value: phase for phase in Phase} | {"removing": Phase.DEAD}


def container_request(spec: ContainerSpec) -> dict[str, Any]:
    """Return the body of POST /containers/create for this container."""
    body: dict[str, Any] = {
        "Image": spec.image,
        "Env": [f"{name}={value}" for name, value in spec.env.items()],
        "Labels": dict(spec.labels),
        "User": spec.user,
        "Tty": False,
        "OpenStdin": False,
        "AttachStdin": False,
        "StopSignal": "SIGTERM",  # overrides the image's: a trainer saves its checkpoint on SIGTERM
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
    if spec.workdir:
        mounts.append(Mount(spec.workdir, spec.layout.code))
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
        # mounts, not binds: the engine fails for a missing source instead of creating it as root
        "Mounts": [{"Type": "bind", "Source": m.source, "Target": m.target, "ReadOnly": m.read_only} for m in mounts],
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {"Type": "json-file", "Config": {"max-size": LOG_FILE_SIZE, "max-file": LOG_FILES}},
    }
    if spec.userns:
        config["UsernsMode"] = spec.userns
    if spec.restarts:
        config["RestartPolicy"] = {"Name": "on-failure", "MaximumRetryCount": spec.restarts}
    if spec.shm_size is not None and spec.ipc != "host":  # with ipc: host, it uses the host's /dev/shm
        config["ShmSize"] = spec.shm_size
    if spec.memory is not None:
        config["Memory"] = spec.memory
        config["MemorySwap"] = spec.memory  # by default the engine would allow the same amount of swap
    if spec.cpus is not None:
        config["NanoCpus"] = round(spec.cpus * 1e9)
    return config


def device_requests(spec: ContainerSpec) -> list[dict[str, Any]]:
    """Return the GPUs of a container, by UUID: indices may change after a reboot."""
    if not spec.gpus:
        return []
    if spec.gpu_driver == "cdi":
        return [{"Driver": "cdi", "DeviceIDs": [f"nvidia.com/gpu={uuid}" for uuid in spec.gpus]}]
    return [{"Driver": spec.gpu_driver or "nvidia", "DeviceIDs": list(spec.gpus), "Capabilities": [["gpu"]]}]


def device(text: str) -> dict[str, str]:
    """`host[:container[:permissions]]` as in `docker run --device`; a folder means all devices below it."""
    host, _, rest = text.partition(":")
    inside, _, permissions = rest.partition(":")
    return {"PathOnHost": host, "PathInContainer": inside or host, "CgroupPermissions": permissions or "rwm"}


def docker_run(spec: ContainerSpec) -> str:
    """Return a `docker run` command for a POSIX shell, made from the same request that `up` sends."""
    body = container_request(spec)
    host = body["HostConfig"]
    options = [
        ("--name", spec.name),
        ("--network", host["NetworkMode"]),
        ("--ipc", host["IpcMode"]),
        *_each("--userns", [host.get("UsernsMode", "")]),
        *([("--init",)] if host["Init"] else []),
        *_each("--user", [body["User"]]),
        *_each("--group-add", host["GroupAdd"]),
        *_each("--workdir", [body.get("WorkingDir", "")]),
        *(option for request in host["DeviceRequests"] for option in _gpus(request)),
        *_each("--device", [":".join(device.values()) for device in host["Devices"]]),
        *_each("--ulimit", [f"{u['Name']}={u['Soft']}:{u['Hard']}" for u in host["Ulimits"]]),
        *_each("--cap-add", host["CapAdd"]),
        *_each("--add-host", host["ExtraHosts"]),
        *_each("--shm-size", [host.get("ShmSize", "")]),
        *_each("--memory", [host.get("Memory", "")]),
        *_each("--memory-swap", [host.get("MemorySwap", "")]),
        *_each("--cpus", [f"{host['NanoCpus'] / 1e9:.9g}"] if "NanoCpus" in host else []),
        *_each("--restart", [f"on-failure:{spec.restarts}"] if spec.restarts else []),
        *_each("--mount", [bind(m["Source"], m["Target"], read_only=m["ReadOnly"]) for m in host["Mounts"]]),
        *_each("-e", body["Env"]),
        *_each("-l", [f"{name}={value}" for name, value in body["Labels"].items()]),
        ("--log-driver", host["LogConfig"]["Type"]),
        *_each("--log-opt", [f"{name}={value}" for name, value in host["LogConfig"]["Config"].items()]),
        ("--stop-signal", body["StopSignal"]),
        ("--no-healthcheck",),
    ]
    first, *rest = body.get("Entrypoint") or [""]
    groups = [("docker", "run", "-d"), *options, *_each("--entrypoint", [first]), (spec.image, *rest)]
    return " \\\n  ".join(shlex.join(group) for group in groups)


def _each(option: str, values: list[str]) -> list[tuple[str, str]]:
    return [(option, str(value)) for value in values if value != ""]


def _gpus(request: dict[str, Any]) -> list[tuple[str, str]]:
    if request["Driver"] == "cdi":
        return _each("--device", request["DeviceIDs"])
    return [("--gpus", csv("device=" + ",".join(request["DeviceIDs"]), "driver=" + request["Driver"]))]


def label_filter(labels: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Return a filter for docker-py: `name` or `name=value`."""
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
        exit_code=int(state["ExitCode"]) if phase.ended and "ExitCode" in state else None,
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
    # Image stores differ in which fields are missing, null or empty: all of these count as absent
    kept = {key: config[key] for key in _CONFIGURATION if config.get(key)}
    platform = [found.get(key) or "" for key in ("Os", "Architecture", "Variant")]
    variables = dict(str(text).partition("=")[::2] for text in config.get("Env") or ())
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
        cuda=variables.get(_CUDA, ""),
        gpu_code=variables.get(_GPU_CODE, ""),
        content=hashlib.sha256(content.encode()).hexdigest(),
    )


def engine_facts(info: Mapping[str, Any]) -> EngineFacts:
    """From GET /info."""
    devices = info.get("DiscoveredDevices") or ()  # since engine 28.2
    podman = "BuildahVersion" in info
    options = [str(option) for option in info.get("SecurityOptions") or ()]
    containerd = "io.containerd.snapshotter" in str(info.get("DriverStatus"))
    store = "podman's" if podman else "containerd's" if containerd else "the classic"
    return EngineFacts(
        id=str(info.get("ID", "")),
        version=str(info.get("ServerVersion", "")),
        rootless=any("name=rootless" in option for option in options),
        runtimes=tuple(sorted(info.get("Runtimes") or ())),
        cdi_devices=tuple(str(d.get("ID", "")) for d in devices if isinstance(d, Mapping) and d.get("Source") == "cdi"),
        root_dir=str(info.get("DockerRootDir", "")),
        kind="podman" if podman else "Docker",
        store=f"{store} image store, {info.get('Driver')}",
        cgroup=str(info.get("CgroupDriver") or ""),
        remapped=any("name=userns" in option for option in options),
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
