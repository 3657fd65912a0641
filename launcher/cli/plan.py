"""`launcher plan`, `export` and `schema`: print job files, plans and exports; nothing is started."""

from __future__ import annotations

import json as json_
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import launcher
from launcher import features
from launcher.api.jobs import plan_text, resolved
from launcher.cli import options, terminal
from launcher.errors import UsageError
from launcher.export.target import Target
from launcher.job.dump import json_schema
from launcher.job.models import Job
from launcher.job.overrides import expand_sweep
from launcher.job.overrides import variants as variants_of
from launcher.model.plan import NodePlan, Plan
from launcher.model.sizes import counted
from launcher.node.docker.values import docker_run


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

    If `up` would have to wait for GPUs or a port in use, a warning names them;
    the exit code is still 0.

    Example: launcher plan job.yaml --offline
    """
    loaded = resolved(launcher.load(job, set=sets or [], nodes=options.hosts(nodes)))
    if on is not None:
        if docker or json:
            raise UsageError(f"--on {on}", "on a cluster the plan is an sbatch script", "omit --docker and --json")
        text = plan_text(loaded, on, terminal.Reporter().log)
        terminal.say(text + _listed(_names(loaded), "# "), nl=False)
        return
    if docker and not loaded.traits.has_limits:
        raise UsageError("--docker", f"the job has runtime: {loaded.runtime}", "run: launcher plan JOB")
    made = launcher.plan(expand_sweep(loaded)[0], offline=offline_, log=terminal.Reporter().log, ssh_config=ssh_config)
    variants = _names(loaded)
    if json:
        terminal.say(made.to_json() if not variants else _with_variants(made, variants))
    elif docker:
        terminal.say(docker_lines(made) + _listed(variants, "# "), nl=not variants)
    else:
        show(made, terminal.console())
        terminal.say(_listed(variants), nl=False)


def _names(job: Job) -> list[str]:
    return [variant.name for variant in variants_of(job)] if job.sweep else []


def _listed(variants: Sequence[str], lead: str = "") -> str:
    """Return the lines about the variants of a sweep."""
    if not variants:
        return ""
    head = f"{counted(len(variants), 'variant')}; the plan is that of the first:"
    return "\n" + "".join(f"{lead}{line}\n" for line in (head, *(f"  {name}" for name in variants)))


def _with_variants(plan: Plan, variants: Sequence[str]) -> str:
    return json_.dumps(json_.loads(plan.to_json()) | {"variants": variants}, indent=2, sort_keys=True)


def docker_lines(plan: Plan) -> str:
    """Return a shell script, node by node. Its comments describe the other steps of `up`."""
    first = plan.nodes[0].container
    text = (
        "# `up` creates these containers, unpacks the code into the folder that is\n"
        f"# mounted at {first.layout.code}, copies its own scripts to {first.layout.kit}\n"
        "# (manually: docker create, docker cp), and then starts all of them or none.\n"
    )
    text += "".join(f"# warning: {' '.join(warning.split())}\n" for warning in plan.warnings)
    for node in plan.nodes:
        spec = replace(node.container, image=node.container.image or plan.image)  # the image ID is unknown offline
        text += f"\n# {node.node}, {_role(plan, node)}\nmkdir -p {shlex.quote(spec.workdir)}\n"
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
        workers = counted(node.processes, "worker")
        console.print(f"\n[bold cyan]{escape(node.node)}[/]  {_role(plan, node)}  {workers}  {spec.name}")
        console.print(f"  address {meeting.addresses[node.rank]} on {meeting.interfaces[node.rank]}")
        if plan.traits.has_limits:
            limits = " ".join(f"--ulimit {k}={v}" for k, v in spec.ulimits)
            console.print(f"  --network {spec.network} --ipc {spec.ipc} --init --user {spec.user} {limits}".rstrip())
        console.print(f"  gpus {', '.join(spec.gpus) or 'none'}")
        console.print(f"  output {escape(spec.output_dir)} -> {escape(spec.layout.output)}")
        console.print(f"  code {escape(spec.workdir)} -> {escape(spec.layout.code)}")
        for mount in spec.mounts:
            mode = "read only" if mount.read_only else "writable"
            console.print(f"  mount {escape(mount.source)} -> {escape(mount.target)} ({mode})")
        for name, value in sorted(spec.env.items()):
            console.print(f"  {escape(name)}={escape(value)}")
        console.print("  " + escape(shlex.join(spec.argv)), style="green")
    for warning in plan.warnings:
        console.print(f"[yellow]warning[/] {escape(warning)}")


_EXPORTS = {name: each for feature in features.FEATURES.values() for name, each in feature.exports.items()}
TARGETS = {name: each.help for name, each in _EXPORTS.items()}  # name -> what it prints


def _known(name: str) -> str:
    """Return the name. Raises ValueError if there is no such target."""
    if name not in TARGETS:
        raise ValueError(f"'{name}' is not one of {', '.join(map(repr, TARGETS))}.")
    return name


def _names_of(printed: str) -> str:
    return ", ".join(name for name, each in TARGETS.items() if each == printed)


def export(
    job: options.JobFile,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="|".join(TARGETS),
            parser=_known,
            autocompletion=lambda incomplete: [name for name in TARGETS if name.startswith(incomplete)],
            help="; ".join(f"{_names_of(each)}: {each}" for each in dict.fromkeys(TARGETS.values())) + ".",
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
    typer.echo(target(to).text(loaded, on, image), nl=False)


def target(name: str) -> Target:
    """Import a target from its feature."""
    found: Target = features.load(_EXPORTS[name])
    return found


def schema() -> None:
    """Editors use it for completion and validation: add
    `# yaml-language-server: $schema=...` to the job file.

    Example: launcher schema > job.schema.json
    """
    terminal.say_json(json_schema())
