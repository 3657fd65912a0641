"""Conversion between our values and the JSON of the Docker Engine API, and `docker run` commands. Pure.

A container is its image, its program and OPTIONS, from which both the request and the command are made.
Reference: docs.docker.com/reference/api/engine.
"""

from __future__ import annotations

import base64
import hashlib
import json
import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

from launcher.model import labels
from launcher.model.container import KIT, ContainerSpec, ContainerState, Mount, Phase, Tool
from launcher.model.facts import EngineFacts, ImageInfo
from launcher.node.files import FileEntry

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

# Of a container's own layer, what a program or a package manager can have again
_AGAIN = re.compile(
    r"/(\.cache|__pycache__|\.nv|\.triton|site-packages|dist-packages)/|^/tmp/torch(inductor|elastic)_"
    r"|^/(etc|dev|proc|run|sys)/|^/usr/(s?bin|include|lib[^/]*|share)/|^/(s?bin|lib[^/]*)/|^/var/(cache|lib|log)/"
)
_OF_KIT = re.compile(r"/home/(\.entry\.|\.rank\.|\.debug/|\.flight_recorder/|quiet$|meeting\.json$)")
_NO_REGULAR_FILE = 0b1000_1111_0010_1000 << 16  # Go's os.ModeType: folder, link, pipe, socket, devices, irregular

Line: TypeAlias = Callable[[Any], Iterable[Sequence[str]]]


def _flag(name: str, form: Callable[[Any], str] = str) -> Line:
    """Return the line of an option that is given once, or once for each value of a list."""

    def line(value: Any) -> Iterable[Sequence[str]]:
        return [(name, form(one)) for one in (value if isinstance(value, list) else [value]) if one != ""]

    return line


def _device_requests(spec: ContainerSpec) -> list[dict[str, Any]]:
    """Return the GPUs of a container, by UUID: indices may change after a reboot."""
    if not spec.gpus:
        return []
    if spec.gpu_driver == "cdi":
        return [{"Driver": "cdi", "DeviceIDs": [f"nvidia.com/gpu={uuid}" for uuid in spec.gpus]}]
    return [{"Driver": spec.gpu_driver or "nvidia", "DeviceIDs": list(spec.gpus), "Capabilities": [["gpu"]]}]


def _gpus(requests: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for request in requests:
        if request["Driver"] == "cdi":
            yield from (("--device", name) for name in request["DeviceIDs"])
        else:
            yield "--gpus", csv("device=" + ",".join(request["DeviceIDs"]), "driver=" + request["Driver"])


def device(text: str) -> dict[str, str]:
    """`host[:container[:permissions]]` as in `docker run --device`; a folder means all devices below it."""
    host, _, rest = text.partition(":")
    inside, _, permissions = rest.partition(":")
    return {"PathOnHost": host, "PathInContainer": inside or host, "CgroupPermissions": permissions or "rwm"}


def _mounts(spec: ContainerSpec) -> list[dict[str, Any]]:
    """Return mounts, not binds: the engine fails for a missing source instead of creating it as root.

    The engine may not follow the link that ~/.launcher is: root has no rights in a home on NFS.
    """
    mounts, root = list(spec.mounts), posixpath.dirname(spec.output_dir)
    own = [(spec.output_dir, spec.layout.output), (spec.workdir, spec.layout.code)]
    for path, target in (*own, *((cache.source, cache.target) for cache in spec.caches)):
        if path:
            inside = posixpath.relpath(path, root)
            mounts.append(Mount(posixpath.join(spec.output_root or root, inside), target))
    return [{"Type": "bind", "Source": m.source, "Target": m.target, "ReadOnly": m.read_only} for m in mounts]


def _restart_policy(spec: ContainerSpec) -> dict[str, Any]:
    return {"Name": "on-failure", "MaximumRetryCount": spec.restarts} if spec.restarts else {"Name": "no"}


def _log_line(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "--log-driver", config["Type"]
    yield from (("--log-opt", f"{name}={value}") for name, value in config["Config"].items())


@dataclass(frozen=True)
class ContainerOption:
    """An option of a container, in both forms.

    key: in the request of the API. value: there, by the specification; None: it is left out. line: that value as
    arguments of `docker run`.
    """

    key: str
    value: Callable[[ContainerSpec], Any]
    line: Line


# What a container is, other than its image and program. A key of `docker` in the job file is in spec.docker.
OPTIONS = (
    ContainerOption("HostConfig.NetworkMode", lambda spec: spec.network, _flag("--network")),
    ContainerOption("HostConfig.IpcMode", lambda spec: spec.ipc, _flag("--ipc")),
    ContainerOption("HostConfig.UsernsMode", lambda spec: spec.userns or None, _flag("--userns")),
    ContainerOption("HostConfig.Init", lambda spec: spec.init, lambda on: [("--init",)] if on else []),
    ContainerOption("User", lambda spec: spec.user, _flag("--user")),
    ContainerOption("HostConfig.GroupAdd", lambda spec: [str(group) for group in spec.groups], _flag("--group-add")),
    ContainerOption("WorkingDir", lambda spec: spec.layout.code or None, _flag("--workdir")),
    ContainerOption("HostConfig.DeviceRequests", _device_requests, _gpus),
    ContainerOption(
        "HostConfig.Devices",
        lambda spec: [device(text) for text in spec.docker.get("devices", ())],
        _flag("--device", lambda one: ":".join(one.values())),
    ),
    ContainerOption(
        "HostConfig.Ulimits",
        lambda spec: [{"Name": name, "Soft": limit, "Hard": limit} for name, limit in spec.ulimits],
        _flag("--ulimit", lambda one: f"{one['Name']}={one['Soft']}:{one['Hard']}"),
    ),
    ContainerOption("HostConfig.CapAdd", lambda spec: list(spec.docker.get("cap_add", ())), _flag("--cap-add")),
    ContainerOption(
        "HostConfig.ExtraHosts",
        lambda spec: [f"{name}:{address}" for name, address in spec.docker.get("extra_hosts", {}).items()],
        _flag("--add-host"),
    ),
    # with ipc: host, it uses the host's /dev/shm
    ContainerOption(
        "HostConfig.ShmSize", lambda spec: None if spec.ipc == "host" else spec.shm_size, _flag("--shm-size")
    ),
    ContainerOption("HostConfig.Memory", lambda spec: spec.memory, _flag("--memory")),
    # by default the engine would allow the same amount of swap
    ContainerOption("HostConfig.MemorySwap", lambda spec: spec.memory, _flag("--memory-swap")),
    ContainerOption(
        "HostConfig.NanoCpus",
        lambda spec: None if spec.cpus is None else round(spec.cpus * 1e9),
        _flag("--cpus", lambda nano: f"{nano / 1e9:.9g}"),
    ),
    ContainerOption(
        "HostConfig.RestartPolicy",
        _restart_policy,
        lambda policy: [("--restart", f"on-failure:{policy['MaximumRetryCount']}")] if len(policy) > 1 else [],
    ),
    ContainerOption(
        "HostConfig.Mounts",
        _mounts,
        _flag("--mount", lambda one: bind(one["Source"], one["Target"], read_only=one["ReadOnly"])),
    ),
    ContainerOption("Env", lambda spec: [f"{name}={value}" for name, value in spec.env.items()], _flag("-e")),
    ContainerOption(
        "Labels",
        lambda spec: dict(spec.labels),
        lambda found: [("-l", f"{name}={value}") for name, value in found.items()],
    ),
    ContainerOption(
        "HostConfig.LogConfig",
        lambda _: {"Type": "json-file", "Config": {"max-size": LOG_FILE_SIZE, "max-file": LOG_FILES}},
        _log_line,
    ),
    # overrides the image's: a trainer saves its checkpoint on SIGTERM
    ContainerOption("StopSignal", lambda _: "SIGTERM", _flag("--stop-signal")),
    ContainerOption("Healthcheck", lambda _: {"Test": ["NONE"]}, lambda _: [("--no-healthcheck",)]),
)


def container_request(spec: ContainerSpec) -> dict[str, Any]:
    """Return the body of POST /containers/create for this container."""
    body: dict[str, Any] = {"Image": spec.image, "HostConfig": {}}
    body |= dict.fromkeys(("Tty", "OpenStdin", "AttachStdin"), False)
    for option in OPTIONS:
        part, _, name = option.key.rpartition(".")
        if (value := option.value(spec)) is not None:
            (body[part] if part else body)[name] = value
    if spec.argv:
        body |= {"Entrypoint": list(spec.argv), "Cmd": []}
    return body


def docker_run(spec: ContainerSpec) -> str:
    """Return a `docker run` command for a POSIX shell that starts the same container as the request."""
    values = [(option, option.value(spec)) for option in OPTIONS]
    lines = [words for option, value in values if value is not None for words in option.line(value)]
    first, *rest = spec.argv or ("",)
    entrypoint = _flag("--entrypoint")(first)
    groups = [("docker", "run", "-d"), ("--name", spec.name), *lines, *entrypoint, (spec.image, *rest)]
    return " \\\n  ".join(shlex.join(group) for group in groups)


def tool_argv(tool: Tool, name: str, uid: int) -> list[str]:
    """Return the `docker run` command of a tool, which removes the container at its end. uid: of the ssh user."""
    argv = [
        "docker",
        "run",
        "--name",
        name,
        "--rm",
        "--init",
        "--log-driver",
        "none",
        "--read-only",
        "--network",
        tool.network,
    ]
    # userns only matters to engines with userns-remap, which forbid the host's network and change the users otherwise
    argv += ["--userns", "host", "--user", tool.user, "--security-opt", "label=disable"]
    argv += ["--label", f"{labels.PURPOSE}={tool.purpose}", "--label", f"{labels.UID}={uid}"]
    argv += [*(["--interactive"] if tool.interactive else [])]
    argv += [word for group in tool.groups for word in ("--group-add", str(group))]
    more = () if tool.recursive else ("bind-nonrecursive=true",)
    for mount in tool.mounts:
        argv += ["--mount", bind(mount.source, mount.target, *more, read_only=mount.read_only)]
    return [*argv, "--entrypoint", "sh", tool.image, "-c", *tool.script]


def csv(*fields: str) -> str:
    """Return comma-separated values as docker's command line reads them."""
    return ",".join('"' + text.replace('"', '""') + '"' if {*text} & {*',"'} else text for text in fields)


def bind(source: str, target: str, *more: str, read_only: bool) -> str:
    """Return a value of --mount."""
    return csv("type=bind", f"source={source}", f"target={target}", *(["readonly"] if read_only else []), *more)


def label_filter(wanted: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Return a filter for docker-py: `name` or `name=value`."""
    return {"label": [name if value is None else f"{name}={value}" for name, value in wanted.items()]}


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


def wrote_outside(path: str, mounts: Iterable[str]) -> bool:
    """Whether a program may miss a file of its container's own layer: not a mount point, a cache, what packages
    install, or one of the launcher's.
    """
    if path in mounts or _AGAIN.search(path):
        return False
    return not path.startswith(f"{KIT}/") or (path.startswith(f"{KIT}/home/") and not _OF_KIT.match(path, len(KIT)))


def file_of_container(path: str, header: str) -> FileEntry | None:
    """From the header X-Docker-Container-Path-Stat of HEAD /containers/{id}/archive; None: it is no regular file."""
    stat = json.loads(base64.b64decode(header))
    size, mode = int(stat["size"]), int(stat["mode"])
    return None if mode & _NO_REGULAR_FILE else FileEntry(path, size, timestamp(stat["mtime"]))


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
