"""`launcher image build | verify | ship | list`: manage images, without a run."""

from __future__ import annotations

import json as json_
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from launcher.cli import options, terminal
from launcher.cli.commands import Command, Group
from launcher.cli.long_work import LongWork
from launcher.cli.terminal import Reporter
from launcher.errors import ImageUnfit, UsageError
from launcher.image.builder import IN_CONTEXT, add_code
from launcher.image.distribution import publish, registry_repository
from launcher.image.ensure import ensure
from launcher.image.image_locations import ImageLocations, ImageOnNodes, image_store
from launcher.image.lock import lock_path
from launcher.image.names import OCI_BASE_NAME, RECIPE
from launcher.image.repair import ImageVerdict, probe_image
from launcher.image.versions import Release, release, releases
from launcher.job.files import check_code
from launcher.job.loader import load_job
from launcher.job.models import Job
from launcher.node.connect import caller_engine, connect
from launcher.node.engine import Engine
from launcher.records.snapshot import list_code, pack, repack
from launcher.run.gpus import uses_gpus

image = typer.Typer(
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Build, verify, ship and list images.",
)


@image.command(cls=Command, short_help="Build the job's image.")
def build(
    job: options.JobFile,
    sets: options.Sets = None,
    with_code: Annotated[
        bool, typer.Option("--with-code", help="Add the code as a layer at /workspace/code, for Kubernetes.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="REGISTRY", help="Push the image to REGISTRY/JOB and print its digest."),
    ] = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Build the job's image with the local Docker engine, or on the first node if
    this machine has none.

    Example: launcher image build job.yaml
    """
    loaded = load_job(job, sets or [])
    log = Reporter().log
    if with_code:  # before minutes of building
        check_code(loaded, Path.cwd())
        listing = list_code(loaded, Path.cwd(), log)
    to = None if push is None else registry_repository(push, loaded.name)
    with caller_engine() as local, ExitStack() as stack:
        engine = local or stack.enter_context(connect(loaded.hosts()[:1], ssh_config=ssh_config)).engines[0]
        done = _ensure(loaded, job, [engine], local)
        _report(done)
        made = done.images[engine.node]
        if with_code:
            code = pack(listing, log)
            members = repack(code.archive, IN_CONTEXT, 0, 0)
            with LongWork() as work:
                name, made = add_code(engine, made, loaded.name, code.digest, members, work.log)
            typer.echo(f"{name} {made.id}")
        if to is not None:
            typer.echo(publish(engine, made, to))


@image.command(cls=Command, short_help="Send the job's image to every node.")
def ship(
    job: options.JobFile,
    sets: options.Sets = None,
    nodes: options.JobNodes = None,
    on: options.NotOn = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Send the job's image to every node. It is built first if needed; only missing
    layers are sent.

    Example: launcher image ship job.yaml
    """
    fix = "push it with: launcher image build JOB --push REGISTRY; then set image.ref to the reference that it prints"
    options.refuse_cluster(on, "a cluster imports images from a registry with its own tool", fix)
    loaded = load_job(job, sets or [], options.hosts(nodes))
    with connect(loaded.hosts(), ssh_config=ssh_config) as fleet, caller_engine() as local:
        _report(_ensure(loaded, job, fleet.engines, local))


@image.command(cls=Command, name="verify", short_help="Test an image in a container.")
def verify_(
    tag: Annotated[str, typer.Argument(metavar="JOB|TAG", help="A job file or an image.")],
    node: Annotated[str | None, typer.Option(help="Use this node's Docker engine instead of the local one.")] = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """Test an image in a container: imports, torchvision operators, VGG16. Exit
    code 4, with the cause, on failure.

    Example: launcher image verify job.yaml --node gpu-a
    """
    engine: Engine | None
    with ExitStack() as stack:
        if node is not None:
            engine = stack.enter_context(connect([(node, node)], ssh_config=ssh_config)).engines[0]
        elif not (engine := stack.enter_context(caller_engine())):
            fix = "use a node that has one: --node gpu-a"
            raise UsageError("launcher image", "this machine has no Docker engine", fix)
        is_job = tag.endswith((".yaml", ".yml")) and Path(tag).exists()
        name = _ensure(load_job(tag), Path(tag), [engine], engine).reference if is_job else tag
        info = image_store(engine).inspect(name)
        if info is None:
            raise ImageUnfit(name, f"is not on {engine.node}", "to build a job's image, run: launcher image build JOB")
        base = info.labels.get(OCI_BASE_NAME, "")
        found = image_store(engine).inspect(base) if base else None
        with LongWork() as work:
            before = probe_image(engine, found, base, work.log) if found else None
            verdict = ImageVerdict(name, probe_image(engine, info, name, work.log), before)
    if json:
        typer.echo(json_.dumps({"image": name, "rows": verdict.rows(), "faults": verdict.faults()}, indent=2))
    else:
        terminal.table_console().print(table_of(verdict))
    verdict.check()


@image.command(cls=Command, name="list", short_help="List NVIDIA's releases and images built here.")
def list_(
    tag: Annotated[str | None, typer.Option(help="Show only this NVIDIA release: 19.06, 25.03-py3.")] = None,
    json: options.Json = False,
) -> None:
    """List NVIDIA's PyTorch releases with their versions and known faults, and
    images that launcher built here.

    Example: launcher image list --tag 25.03
    """
    found = release(tag) if tag is not None else None
    if tag is not None and found is None:
        raise UsageError("--tag", f"{tag} is not a documented release", "a job may use any tag: its image is probed")
    rows: Sequence[Release] = [found] if found else releases()
    if json:
        typer.echo(json_.dumps([{**vars(row), "mismatch": row.mismatch} for row in rows], indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("release", "torch", "torchvision", "CUDA", "Python", "driver", "known mismatch"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row.tag, row.torch, row.torchvision, row.cuda, row.python, row.driver, row.mismatch)
    console = terminal.table_console()
    console.print(table)
    if tag is not None:
        return
    with caller_engine() as engine:
        for built in image_store(engine).list({RECIPE: None}) if engine else ():
            console.print(f"built here: {escape(', '.join(built.tags) or built.id[:19])}  {built.size >> 20} MiB")


def table_of(verdict: ImageVerdict) -> Table:
    """Return the verdict as a table, with columns before and after if the base image was tested too."""
    table = Table(box=None, pad_edge=False, header_style="bold", title=verdict.image, title_justify="left")
    compared = verdict.before is not None
    for column in ("", "before", "after") if compared else ("", "now"):
        table.add_column(column, overflow="fold")
    for what, before, after in verdict.rows():
        table.add_row(*map(escape, (what, before, after) if compared else (what, after)))
    return table


def _ensure(job: Job, file: Path, nodes: Sequence[Engine], local: Engine | None) -> ImageOnNodes:
    if job.image is None:
        raise UsageError(f"job {job.name}", "has no image: runtime process uses the Python of the machine", "")
    with LongWork() as work:
        locations = ImageLocations(nodes, local, work.log, work.progress, uses_gpus(job))
        return ensure(job.image, locations, job=job.name, mounted=bool(job.mounts), lock_file=lock_path(file))


def _report(done: ImageOnNodes) -> None:
    if done.why:
        typer.echo(terminal.escaped(done.why))
    for node, sent in done.shipped.items():
        typer.echo(f"{node}: {sent:,} bytes")
    typer.echo(f"{done.reference} {done.id}")
