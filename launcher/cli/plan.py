"""`launcher plan`, `export`, `init` and `schema`: print job files, plans and exports; nothing is started."""

from __future__ import annotations

import json as json_
import os
import shlex
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

import launcher
from launcher.cli import options, terminal
from launcher.errors import NodeUnfit, UsageError
from launcher.export import kubernetes, slurm
from launcher.job.dump import json_schema
from launcher.job.files import code_folder
from launcher.job.models import Job
from launcher.job.settings import read_settings
from launcher.local_files import write_atomic
from launcher.model.plan import NodePlan, Plan, new_run_id
from launcher.node.docker.values import docker_run
from launcher.planning.cluster import build
from launcher.records.code_files import code_files, readable
from launcher.records.trainer import needed_trainer


def plan(
    job: options.JobFile,
    sets: options.Sets = None,
    nodes: options.JobNodes = None,
    offline_: Annotated[bool, typer.Option("--offline", help="Assume the properties of nodes; contact none.")] = False,
    docker: Annotated[bool, typer.Option("--docker", help="Print `docker run` commands, one per node.")] = False,
    json: options.Json = False,
    on: Annotated[str | None, typer.Option(metavar="CLUSTER", help="Print what `up --on CLUSTER` submits.")] = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Nothing is started, built or sent. Without --offline, the nodes are
    inspected.

    If `up` would have to wait for GPUs that are in use, a warning lists them;
    the exit code is still 0.

    Example: launcher plan job.yaml --offline
    """
    loaded = launcher.load(job, set=sets or [], nodes=options.hosts(nodes))
    if on is not None:
        if docker or json:
            raise UsageError(f"--on {on}", "on a cluster the plan is an sbatch script", "omit --docker and --json")
        typer.echo(_sbatch(loaded, on), nl=False)
        return
    if docker and loaded.runtime != "docker":
        raise UsageError("--docker", f"the job has runtime: {loaded.runtime}", "run: launcher plan JOB")
    made = launcher.plan(loaded, offline=offline_, log=terminal.Reporter().log, ssh_config=ssh_config)
    if json:
        typer.echo(made.to_json())
    elif docker:
        typer.echo(docker_lines(made))
    else:
        show(made, terminal.console())


def docker_lines(plan: Plan) -> str:
    """Return a shell script, node by node. Its comments describe the other steps of `up`."""
    first = plan.nodes[0].container
    text = (
        "# `up` creates these containers, copies the code and its own scripts into them\n"
        f"# ({first.layout.code}, {first.layout.kit}; manually: docker create, docker cp),\n"
        "# and then starts all of them or none.\n"
    )
    text += "".join(f"# warning: {' '.join(warning.split())}\n" for warning in plan.warnings)
    for node in plan.nodes:
        spec = replace(node.container, image=node.container.image or plan.image)  # the image ID is unknown offline
        text += f"\n# {node.node}, {_role(plan, node)}\nmkdir -p {shlex.quote(spec.output_dir)}\n"
        text += docker_run(spec) + "\n"
    return text


def _role(plan: Plan, node: NodePlan) -> str:
    spare = node.rank >= len(plan.nodes) - plan.spares
    return "spare, until a node is lost" if spare else f"node rank {node.rank}"


def show(plan: Plan, console: Console) -> None:
    """Print a plan as text: common settings first, then those of each node."""
    meeting = plan.rendezvous
    console.print(
        f"[bold]{plan.run}[/]  {plan.runtime}  image {escape(plan.image or '-')} {escape(plan.image_id[:19])}"
    )
    console.print(f"rendezvous {meeting.address}:{meeting.port}  code {plan.code}")
    for node in plan.nodes:
        spec = node.container
        console.print(
            f"\n[bold cyan]{escape(node.node)}[/]  {_role(plan, node)}  {node.processes} worker(s)  {spec.name}"
        )
        console.print(f"  address {meeting.addresses[node.rank]} on {meeting.interfaces[node.rank]}")
        if plan.runtime == "docker":
            limits = " ".join(f"--ulimit {k}={v}" for k, v in spec.ulimits)
            console.print(f"  --network {spec.network} --ipc {spec.ipc} --init --user {spec.user} {limits}".rstrip())
        console.print(f"  gpus {', '.join(spec.gpus) or 'none'}")
        console.print(f"  output {escape(spec.output_dir)} -> {escape(spec.layout.output)}")
        for mount in spec.mounts:
            mode = "read only" if mount.read_only else "writable"
            console.print(f"  mount {escape(mount.source)} -> {escape(mount.target)} ({mode})")
        for name, value in sorted(spec.env.items()):
            console.print(f"  {escape(name)}={escape(value)}")
        console.print("  " + escape(" ".join(spec.argv)), style="green")
    for warning in plan.warnings:
        console.print(f"[yellow]warning[/] {escape(warning)}")


def export(
    job: options.JobFile,
    to: Annotated[
        Literal["slurm", "jobset", "job"],
        typer.Option(
            "--to", metavar="slurm|jobset|job", help="slurm: an sbatch script; jobset, job: Kubernetes manifests."
        ),
    ],
    sets: options.Sets = None,
    nodes: options.JobNodes = None,
    on: Annotated[str | None, typer.Option(metavar="CLUSTER", help="Use this cluster's settings.")] = None,
    image: Annotated[
        str | None, typer.Option("--image", help="Kubernetes: pushed image with the code at /workspace/code.")
    ] = None,
) -> None:
    """Nothing is started or contacted. Keys of the job file that the target does
    not support are rejected.

    Example: launcher export job.yaml --to slurm
    """
    loaded = launcher.load(job, set=sets or [], nodes=options.hosts(nodes))
    if to == "slurm":
        _note_trainer(loaded)
        typer.echo(_sbatch(loaded, on), nl=False)
        return
    settings = kubernetes.ANY if on is None else read_settings(os.environ).kubernetes(on)
    kubernetes.check(loaded, jobset=to == "jobset", image=image)
    planned, target = build(loaded, "python3"), kubernetes.Target(image or "", new_run_id(loaded.name), settings)
    made = (kubernetes.jobset if to == "jobset" else kubernetes.indexed_job)(planned, target)
    typer.echo(kubernetes.text(planned, target, made), nl=False)


def _sbatch(job: Job, on: str | None) -> str:
    """Return the sbatch script. Raises JobInvalid, UsageError."""
    cluster = slurm.ANY if on is None else read_settings(os.environ).cluster(on)
    slurm.check(job, cluster.container)
    planned = build(job, cluster.python, cluster.gpus)
    for warning in planned.warnings:
        terminal.Reporter().warn(warning)
    return slurm.render(planned, cluster)


def _note_trainer(job: Job) -> None:
    """If `up` would add the launcher's trainer to the code, print how to do so manually. Raises JobInvalid."""
    code = code_folder(job, Path.cwd())
    if not code.is_dir():  # the code may be on another machine
        return
    with readable(code):
        trainer = needed_trainer(job, code, code_files(code))
    if trainer is not None:
        copy = shlex.join(["cp", "-R", str(trainer), f"{code}/"])
        terminal.Reporter().log(
            f"`up --on` adds the launcher's module {trainer.name} to the code; to do so manually: {copy}"
        )


def init(
    path: Annotated[Path, typer.Argument(help="File to create.")] = Path("job.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """The file documents every key and its default.

    Example: launcher init job.yaml
    """
    if path.exists() and not force:
        raise UsageError(str(path), "already exists", "choose another name or use --force")
    if path.exists() and not path.is_file():
        raise UsageError(str(path), "is not a regular file", "choose another name")
    try:
        write_atomic(path.resolve(), resources.files("launcher.job").joinpath("template.yaml").read_bytes())
    except OSError as error:
        fix = "check free space and permissions, or choose another path"
        raise NodeUnfit(str(path), f"could not be written: {error.strerror}", fix) from error
    typer.echo(f"wrote {path}; to preview the run: launcher plan {path} --offline")


def schema() -> None:
    """Editors use it for completion and validation: add
    `# yaml-language-server: $schema=...` to the job file.

    Example: launcher schema > job.schema.json
    """
    typer.echo(json_.dumps(json_schema(), indent=2))
