"""The output of `launcher plan` as text and as `docker run` lines."""

from __future__ import annotations

import argparse
import io
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.cli.plan import docker_lines, plan, show
from launcher.errors import UsageError
from launcher.job.loader import parse_job
from launcher.job.parts import DockerOptions
from launcher.model.container import ContainerSpec, Layout, Mount
from launcher.node.docker.values import container_request, device, docker_run
from launcher.planning.offline import offline

JOB = """
name: digits
image: {base: nvcr.io/nvidia/pytorch:26.09-py3}
nodes: [gpu-a, gpu-b]
run: {module: train, args: {data: /data, note: it's "two" words}}
mounts: {/data: /data:ro}
"""
PLAN = offline(parse_job(JOB), "c0de")
SPEC = ContainerSpec(
    name="n",
    image="sha256:1",
    argv=("sh", "-c", "echo $HOME 'x'"),
    env={"A": "it's", "B": 'two\nlines "', "EMPTY": ""},
    labels={"launcher.run": "r"},
    layout=Layout("/workspace/code", "/output", "/.launcher"),
    output_dir="/home/ada/out,put",
    user="1001:1002",
)
FULL = replace(
    SPEC,
    groups=(4, 27),
    mounts=(Mount('/a"b', "/in", read_only=True),),
    gpus=("GPU-1", "GPU-2"),
    gpu_driver="nvidia",
    ulimits=(("memlock", -1), ("stack", 67108864)),
    docker={
        "ipc": "private",
        "devices": ("/dev/fuse", "/dev/a:/dev/b:r"),
        "cap_add": ("SYS_NICE",),
        "extra_hosts": {"db": "10.0.0.9"},
    },
    shm_size=1 << 30,
    memory=1 << 34,
    cpus=2.5,
    restarts=3,
)


def test_arguments_of_a_node_override_those_of_the_job() -> None:
    nodes = "[{host: gpu-a, args: {batch-size: 256}}, {host: gpu-b, args: {lr: 0.2}}, gpu-c]"
    job = parse_job(JOB.replace("[gpu-a, gpu-b]", nodes).replace("note:", "batch_size: 96, note:"))
    options = [spec.container.argv for spec in offline(job, "c0de").nodes]
    rest = ("--data", "/data", "--batch-size")
    assert [argv[argv.index("train") + 1 :][:4] for argv in options] == [(*rest, "256"), (*rest, "96"), (*rest, "96")]
    assert [argv[-2:] == ("--lr", "0.2") for argv in options] == [False, True, False]


def csv(text: str) -> list[str]:
    """Parse a value as docker's command line does."""
    import csv as reader

    return next(iter(reader.reader(io.StringIO(text))))


def request_of(line: str) -> dict[str, Any]:
    """Return the request that docker would send to its engine: docs.docker.com/reference/cli/docker/container/run."""
    tokens = shlex.split(line.replace("\\\n", " "))
    assert tokens[:3] == ["docker", "run", "-d"]
    options = argparse.ArgumentParser()
    for name in ("name", "network", "ipc", "user", "workdir", "shm-size", "memory", "memory-swap", "cpus"):
        options.add_argument(f"--{name}")
    for name in ("restart", "log-driver", "stop-signal", "entrypoint", "gpus"):
        options.add_argument(f"--{name}")
    for name in ("group-add", "device", "ulimit", "cap-add", "add-host", "mount", "log-opt"):
        options.add_argument(f"--{name}", action="append", default=[])
    options.add_argument("-e", action="append", default=[])
    options.add_argument("-l", action="append", default=[])
    for name in ("init", "no-healthcheck"):
        options.add_argument(f"--{name}", action="store_true")
    options.add_argument("image")
    options.add_argument("argv", nargs=argparse.REMAINDER)
    found = options.parse_args(tokens[3:])
    mounts = [dict(field.partition("=")[::2] for field in csv(mount)) for mount in found.mount]
    requests = [{"Driver": "cdi", "DeviceIDs": [d]} for d in found.device if d.startswith("nvidia.com/gpu=")]
    if found.gpus:
        fields = dict(field.partition("=")[::2] for field in csv(found.gpus))
        uuids = fields["device"].split(",")
        requests = [{"Driver": fields["driver"], "DeviceIDs": uuids, "Capabilities": [["gpu"]]}]
    kind, _, count = (found.restart or "no").partition(":")
    host = {
        "NetworkMode": found.network,
        "IpcMode": found.ipc,
        "Init": found.init,
        "Ulimits": [
            {"Name": name, "Soft": int(both.split(":")[0]), "Hard": int(both.split(":")[1])}
            for name, both in (limit.split("=") for limit in found.ulimit)
        ],
        "DeviceRequests": requests,
        "Devices": [device(text) for text in found.device if not text.startswith("nvidia.com/gpu=")],
        "CapAdd": found.cap_add,
        "ExtraHosts": found.add_host,
        "GroupAdd": found.group_add,
        "Mounts": [
            {"Type": m["type"], "Source": m["source"], "Target": m["target"], "ReadOnly": "readonly" in m}
            for m in mounts
        ],
        "RestartPolicy": {"Name": kind, "MaximumRetryCount": int(count)} if count else {"Name": kind},
        "LogConfig": {"Type": found.log_driver, "Config": dict(opt.split("=") for opt in found.log_opt)},
    }
    for key, value in (("ShmSize", found.shm_size), ("Memory", found.memory), ("MemorySwap", found.memory_swap)):
        host |= {key: int(value)} if value else {}
    host |= {"NanoCpus": round(float(found.cpus) * 1e9)} if found.cpus else {}
    body = {
        "Image": found.image,
        "Env": found.e,
        "Labels": dict(label.split("=", 1) for label in found.l),
        "User": found.user or "",
        "Tty": False,
        "OpenStdin": False,
        "AttachStdin": False,
        "StopSignal": found.stop_signal,
        "Healthcheck": {"Test": ["NONE"]} if found.no_healthcheck else None,
        "HostConfig": host,
        "WorkingDir": found.workdir,
    }
    return body | ({"Entrypoint": [found.entrypoint, *found.argv], "Cmd": []} if found.entrypoint else {})


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        FULL,
        replace(FULL, gpu_driver="cdi", docker={}),
        replace(SPEC, argv=(), user=""),
        *(n.container for n in PLAN.nodes),
    ],
    ids=["plain", "full", "cdi", "image's own program", "offline 0", "offline 1"],
)
def test_a_docker_run_line_equals_the_request_of_up(spec: ContainerSpec) -> None:
    named = replace(spec, image=spec.image or "i")
    wanted = container_request(named)
    if named.gpu_driver == "cdi":  # docker sends one request per device
        (request,) = wanted["HostConfig"]["DeviceRequests"]
        wanted["HostConfig"]["DeviceRequests"] = [{"Driver": "cdi", "DeviceIDs": [id_]} for id_ in request["DeviceIDs"]]
    assert request_of(docker_run(named)) == wanted


@pytest.mark.parametrize("key", DockerOptions.model_fields)
def test_a_key_of_docker_is_in_the_request_and_on_the_line(key: str) -> None:
    (example, *_) = DockerOptions.model_fields[key].examples or ()
    docker = dict(DockerOptions.model_validate({key: example}))
    with_it, without = replace(SPEC, docker=docker), replace(SPEC, docker=dict(DockerOptions()))
    assert container_request(with_it) != container_request(without)
    assert docker_run(with_it) != docker_run(without)


def test_the_script_names_image_and_folder_of_every_node() -> None:
    text = docker_lines(replace(PLAN, warnings=("one\nrm -rf /",)))
    assert text.count("docker run -d") == 2
    assert text.count("nvcr.io/nvidia/pytorch:26.09-py3 /.launcher/entry.sh") == 2
    assert text.count("mkdir -p /home/user/.launcher/digits-00000000-000000-0000/workdir/gpu-") == 2
    assert "# warning: one rm -rf /\n" in text
    assert "--gpus '\"device=GPU-assumed-0," in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_plan_shows_gpus_workers_and_whole_commands(width: int) -> None:
    file = io.StringIO()
    show(PLAN, Console(file=file, width=width, highlight=False, soft_wrap=True))
    text = file.getvalue()
    assert text.count("8 workers") == 2
    assert "gpus none" not in text
    assert "gpus: all is assumed to be 8 GPUs per machine (gpu-a, gpu-b)" in text
    assert tuple(shlex.split(text.splitlines()[-3])) == PLAN.nodes[1].container.argv


@pytest.mark.parametrize("width", [80, 120])
def test_docker_lines_fit_a_terminal_if_their_values_do(width: int) -> None:
    long = [line for line in docker_lines(PLAN).splitlines() if len(line) > width]
    assert all(line.startswith(("  --gpus", "  --mount", "  nvcr.io", "  -l", "  -e", "# warning")) for line in long)


def test_plain_processes_have_no_docker_lines(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("name: p\nruntime: process\nnodes: [local]\nrun: {command: [true]}\n")
    with pytest.raises(UsageError, match="runtime: process"):
        plan(job, docker=True)
